"""What ``check-grammar`` says of a grammar: a line of JSONL, or a report to read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape

from grammar_sync.engines.prepared import Finding
from grammar_sync.text_check import StartTokens, TextVerdict
from launch.check_grammar.lines import GrammarLine
from launch.commands import CheckGrammarCommand
from launch.exit_codes import ExitCode
from runtime.messages import ErrorInfo

_SHOWN_TEXT = 60


class TextRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one text: ``TextVerdict``; all None where the grammar is refused."""

    ok: bool
    at: int | None = None
    expected: str | None = None
    error: str | None = None

    @classmethod
    def of(cls, verdict: TextVerdict) -> TextRecord:
        """Returns a verdict as it is written."""
        return cls(ok=verdict.ok, at=verdict.at, expected=verdict.expected, error=verdict.error)


class GrammarRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One line of JSONL output.

    Args:
        id: The line's.
        accepted: Whether the grammar would be used.
        error: Why not.
        not_enforced: What outputs may violate all the same.
        rewritten: Where the grammar is narrower than was asked for, or said in another way.
        compile_s: Seconds of CPU to compile it; None when it was not.
        texts: One for each text.
        engine: Which engine has it.
        size_bytes: How much memory it holds.
        slowest_fill_s: Seconds of CPU of the slowest mask that was filled on some random outputs.
        start: What an output may begin with.
        ignored: Fields of the input line that mean nothing here, or nothing for this kind of grammar.
    """

    id: Any
    accepted: bool
    error: ErrorInfo | None = None
    not_enforced: list[Finding] = []
    rewritten: list[Finding] = []
    compile_s: float | None = None
    texts: list[TextRecord] = []
    engine: str | None = None
    size_bytes: int | None = None
    slowest_fill_s: float | None = None
    start: StartTokens | None = None
    ignored: list[str] = []


@dataclass(slots=True)
class Totals:
    """What the summary line says."""

    grammars: int = 0
    malformed: int = 0
    refused: int = 0
    loose: int = 0
    texts: int = 0
    wrong_texts: int = 0

    def add(self, line: GrammarLine, record: GrammarRecord) -> None:
        """Counts a grammar."""
        self.grammars += 1
        self.malformed += line.is_malformed
        self.refused += not record.accepted and not line.is_malformed
        self.loose += record.accepted and bool(record.not_enforced)
        if record.accepted:
            self.texts += len(line.texts)
            self.wrong_texts += sum(text.ok != wanted for text, wanted in zip(record.texts, line.expect, strict=True))

    def exit_code(self, command: CheckGrammarCommand) -> int:
        """Returns the exit code that ``--fail-on`` asks for."""
        counts = {"refused": self.refused, "text": self.wrong_texts, "not-enforced": self.loose}
        if any(counts[name] for name in command.fail_on):
            return ExitCode.GRAMMARS_FAILED
        return ExitCode.REQUESTS_FAILED if self.malformed else ExitCode.OK

    def summary(self, elapsed_s: float) -> str:
        """Returns the counts as one line."""
        plural = "" if self.grammars == 1 else "s"
        parts = [f"{self.grammars} grammar{plural}"]
        parts += [f"{self.malformed} malformed"] * bool(self.malformed)
        parts += [f"{self.refused} refused"] * bool(self.refused)
        parts += [f"{self.loose} not enforced in full"] * bool(self.loose)
        parts.append(f"{self.wrong_texts} of {self.texts} texts not as wanted")
        return f"lockstep: {', '.join(parts)} ({elapsed_s:.1f} s)"


def json_line(record: GrammarRecord) -> str:
    """Returns a record as a line of JSONL."""
    return msgspec.json.encode(record).decode() + "\n"


def print_report(console: Console, record: GrammarRecord, texts: tuple[str, ...], expect: tuple[bool, ...]) -> None:
    """Prints a record for people."""
    if record.error is not None:
        console.print(f"[bold red]refused[/]  {escape(record.error.message)}")
    else:
        console.print(f"[bold green]accepted[/]  {_facts(record)}")
    for title, findings in (("not enforced", record.not_enforced), ("rewritten", record.rewritten)):
        for finding in findings:
            place = finding.path or "the whole"
            console.print(f"[yellow]{title}[/]  {escape(place)}: {escape(finding.keyword)}: {escape(finding.message)}")
    if record.ignored:
        console.print(f"[yellow]ignored[/]  {escape(', '.join(record.ignored))}")
    if record.start is not None:
        sample = ", ".join(escape(repr(text)) for _, text in record.start.sample)
        more = ", …" if record.start.count > len(record.start.sample) else ""
        console.print(f"starts with one of {record.start.count:,} tokens: {sample}{more}")
    if record.accepted:
        for text, verdict, wanted in zip(texts, record.texts, expect, strict=True):
            for line in _text_lines(text, verdict, wanted=wanted):
                console.print(line)


def _facts(record: GrammarRecord) -> str:
    facts = [f"by {record.engine}"]
    if record.compile_s is not None:
        facts.append(f"compiled in {1e3 * record.compile_s:.1f} ms")
    if record.size_bytes is not None:
        facts.append(f"{record.size_bytes / 1024:,.1f} KiB")
    if record.slowest_fill_s is not None:
        facts.append(f"slowest mask {1e3 * record.slowest_fill_s:.2f} ms")
    return ", ".join(facts)


def _text_lines(text: str, verdict: TextRecord, *, wanted: bool) -> Iterator[str]:
    colour = "green" if verdict.ok == wanted else "red"
    word = "takes" if verdict.ok else "refuses"
    at = verdict.at or 0
    first = max(0, at - _SHOWN_TEXT // 2) if len(text) > _SHOWN_TEXT else 0
    shown = text[first : first + _SHOWN_TEXT]
    # One column a character, so that the mark below stands where it should.
    flat = "".join(character if character.isprintable() else "·" for character in shown)
    yield f"[{colour}]{word}[/]{' ' * (8 - len(word))}{'…' if first else ' '}{escape(flat)}"
    if not verdict.ok:
        reason = verdict.error if verdict.error is not None else f"expected {verdict.expected}"
        yield f"{' ' * (9 + at - first)}[{colour}]^[/] at {at}: {escape(reason)}"
