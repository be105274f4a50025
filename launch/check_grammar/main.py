"""The process of ``lockstep check-grammar``: compiles grammars and walks texts; no ranks, no process groups."""

from __future__ import annotations

from launch.node.early_signals import leave_on_signals

leave_on_signals()

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TextIO

from rich.console import Console

from grammar_sync.engines.backend import MatcherError
from grammar_sync.engines.prepared import CompileError
from grammar_sync.text_check import TextChecker
from grammar_sync.vocabulary import VocabularyError
from launch.check_grammar.judge import CompileProcess, GrammarJudge
from launch.check_grammar.lines import GrammarLine, read_grammars
from launch.check_grammar.report import GrammarRecord, TextRecord, Totals, json_line, print_report
from launch.cli.parse import UsageError, parse_command
from launch.commands import CheckGrammarCommand
from launch.front.exit import exit_code_of
from launch.node.rank_processes import raise_on_signals
from launch.output_file import open_output, writes_text
from runtime.assembly import VocabularyMismatchError, grammar_vocabulary
from runtime.chat_template import ChatTemplateError
from runtime.checkpoint import open_checkpoint
from runtime.messages import ErrorInfo
from runtime.tokenizer import Tokenizer, TokenizerError

_MODEL_ERRORS = (TokenizerError, ChatTemplateError, VocabularyError, VocabularyMismatchError)
_LINES_AHEAD = 16


def main(argv: list[str]) -> int:
    """Runs ``lockstep`` with ``argv``, which ask for ``check-grammar``; returns the exit code."""
    raise_on_signals()
    _silence_engines()
    return exit_code_of(partial(_run, argv), more_usage_errors=_MODEL_ERRORS)


def _run(argv: list[str]) -> int:
    command = parse_command(argv)
    if not isinstance(command, CheckGrammarCommand):
        raise UsageError("this process runs check-grammar only")
    return run_check_grammar(command)


def run_check_grammar(command: CheckGrammarCommand) -> int:
    """Checks all grammars of a command; returns the exit code."""
    process = CompileProcess()
    tokenizer = Tokenizer.load(command.model)
    config = open_checkpoint(command.model).config
    eos_token_ids = tuple(sorted({*tokenizer.eos_token_ids, *config.eos_token_ids}))
    vocabulary = grammar_vocabulary(tokenizer, config, eos_token_ids)
    judge = GrammarJudge(vocabulary, command, process)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    checker = _Checker(judge, TextChecker(vocabulary, encode))
    totals = Totals()
    start_s = time.monotonic()
    try:
        with open_output(command.output_file) as output:
            write = _writer(command, output)
            for line, record in checker.records(read_grammars(command)):
                totals.add(line, record)
                write(line, record)
    finally:
        judge.close()
    if command.input_file is not None:
        print(totals.summary(time.monotonic() - start_s), file=sys.stderr)
    return totals.exit_code(command)


def _writer(command: CheckGrammarCommand, output: TextIO) -> Callable[[GrammarLine, GrammarRecord], None]:
    console = Console(file=output, highlight=False, soft_wrap=True)

    def write_report(line: GrammarLine, record: GrammarRecord) -> None:
        print_report(console, record, line.texts, line.expect)

    def write_json(_: GrammarLine, record: GrammarRecord) -> None:
        output.write(json_line(record))
        output.flush()

    return (
        write_report
        if writes_text(
            command.output_format, has_input_file=command.input_file is not None, output_file=command.output_file
        )
        else write_json
    )


class _Checker:
    """Turns lines into records."""

    def __init__(self, judge: GrammarJudge, texts: TextChecker) -> None:
        self._judge = judge
        self._texts = texts

    def records(self, lines: Iterable[GrammarLine]) -> Iterator[tuple[GrammarLine, GrammarRecord]]:
        """Yields a record for each line, in their order; some grammars are vetted ahead."""
        ahead: deque[GrammarLine] = deque()
        for line in lines:
            if line.spec is not None:
                self._judge.submit(line.spec)
            ahead.append(line)
            if len(ahead) > _LINES_AHEAD:
                yield self._next(ahead)
        while ahead:
            yield self._next(ahead)

    def _next(self, ahead: deque[GrammarLine]) -> tuple[GrammarLine, GrammarRecord]:
        line = ahead.popleft()
        return line, self._record(line)

    def _record(self, line: GrammarLine) -> GrammarRecord:
        if line.spec is None:
            return self._refused(line, line.error)
        try:
            judged = self._judge.judgement(line.spec)
            start = self._texts.start_tokens(judged.compiled)
        except (CompileError, MatcherError) as error:
            return self._refused(line, ErrorInfo("grammar_error", f"{line.kind}: {error}", line.kind))
        verdicts = [self._texts.check(judged.compiled, text) for text in line.texts]
        return GrammarRecord(
            id=line.user_id,
            accepted=True,
            not_enforced=list(judged.prepared.not_enforced),
            rewritten=list(judged.prepared.rewritten),
            compile_s=judged.compile_s,
            texts=[TextRecord.of(verdict) for verdict in verdicts],
            engine=judged.prepared.engine,
            size_bytes=judged.compiled.size_bytes,
            slowest_fill_s=judged.slowest_fill_s,
            start=start,
            ignored=list(line.ignored),
        )

    def _refused(self, line: GrammarLine, error: ErrorInfo | None) -> GrammarRecord:
        return GrammarRecord(
            id=line.user_id,
            accepted=False,
            error=error,
            texts=[TextRecord(ok=False)] * len(line.texts),
            ignored=list(line.ignored),
        )


def _silence_engines() -> None:
    """Takes descriptor 2 from the engines, which write warnings there about what the schema walk tells already."""
    sys.stderr = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace", buffering=1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
