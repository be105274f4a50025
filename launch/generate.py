"""``lockstep generate``: an offline batch, results in the order of the input."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import msgspec
from rich.progress import Progress, TaskID

from grammar_sync.statistics import GrammarStatistics
from launch.checks import check_command
from launch.commands import GenerateCommand
from launch.exit_codes import ExitCode
from launch.front.engine_link import EngineLink
from launch.front.engine_output import RequestOutput
from launch.front.engine_process import EngineProcess, print_line, start_or_attach, wait_until_ready
from launch.front.metrics import EngineMetrics
from launch.invariant_check import described
from launch.node.rank_processes import replace_by_agent
from launch.output_file import open_output, writes_text
from launch.progress import progress_bar
from launch.request_file import InputRequest, read_requests
from runtime.engine_statistics import EngineStatistics
from runtime.messages import (
    EngineMessage,
    EngineReady,
    ErrorInfo,
    FinishReason,
    Submit,
    TokenDelta,
    TokenInfo,
    Usage,
)

_POLL_S = 0.1
_STATISTICS_S = 5.0
_OUTSTANDING_REQUESTS = 512


class ResultRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of JSONL output: a choice of a request, or why the request failed.

    ``reasoning_content`` is what the model thought before ``text``, ``grammar`` what a grammar cost.

    ``logprobs`` has an entry for each token, ``prompt_logprobs`` one for each of the prompt; the first of these is
    null, since nothing comes before it.
    """

    id: Any
    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenInfo] | None
    prompt_logprobs: list[TokenInfo | None] | None = None
    usage: Usage | None
    error: ErrorInfo | None
    reasoning_content: str | None = None
    grammar: GrammarStatistics | None = None


@dataclass(slots=True)
class _Pending:
    """A request that is not written yet."""

    request: InputRequest
    output: RequestOutput

    def records(self) -> Iterator[ResultRecord]:
        output = self.output
        if output.error is not None:
            yield ResultRecord(
                id=self.request.user_id,
                index=0,
                text="",
                token_ids=[],
                finish_reason="error",
                logprobs=None,
                usage=None,
                error=output.error,
            )
        for index, choice in enumerate(output.choices):
            if choice.finished is not None:
                yield ResultRecord(
                    id=self.request.user_id,
                    index=index,
                    text="".join(choice.text),
                    token_ids=choice.token_ids,
                    finish_reason=choice.finished.finish_reason,
                    logprobs=choice.logprobs or None,
                    prompt_logprobs=None if index else output.prompt_logprobs(),
                    usage=choice.finished.usage,
                    error=choice.finished.error,
                    reasoning_content="".join(choice.reasoning) or None,
                    grammar=choice.finished.grammar,
                )


@dataclass(slots=True)
class Totals:
    """What the summary line says."""

    requests: int = 0
    failed: int = 0
    tokens: int = 0


def run_generate(command: GenerateCommand, argv: list[str], front_endpoint: str | None) -> int:
    """Runs the batch; returns the exit code.

    Args:
        command: What to do.
        argv: The command line, run again by each rank.
        front_endpoint: Where the leader that started this process connects; None when this process starts the ranks.
    """
    check_command(command)
    if front_endpoint is None and command.nodes.nnodes > 1:
        replace_by_agent(command.engine, command.nodes, argv)
    engine = start_or_attach(command.engine, argv, front_endpoint)
    try:
        with progress_bar() as progress:
            task = progress.add_task("starting ranks", total=None, rate="")
            ready = wait_until_ready(engine, command.engine.start_timeout_s)
            if ready.invariant is not None:
                print(f"lockstep: {described(ready.invariant)}", file=sys.stderr)
            started_s = time.monotonic()
            metrics = EngineMetrics() if command.metrics_file is not None else None
            link = EngineLink(engine, ready, print_line, metrics)
            with open_output(command.output_file) as output:
                totals = _Batch(command, link, output, progress, task).run()
            elapsed_s = time.monotonic() - started_s
            if metrics is not None and command.metrics_file is not None:
                _write_metrics(metrics, ready, engine, command.metrics_file)
    finally:
        engine.stop()
    _print_summary(ready, totals, elapsed_s)
    return ExitCode.REQUESTS_FAILED if totals.failed else ExitCode.OK


class _Batch:
    """Keeps requests outstanding until the input is used up, and writes results in its order."""

    def __init__(
        self,
        command: GenerateCommand,
        link: EngineLink,
        output: TextIO,
        progress: Progress,
        task: TaskID,
    ) -> None:
        self._link = link
        self._output = output
        self._progress = progress
        self._task = task
        self._as_text = writes_text(
            command.output_format, has_input_file=command.input_file is not None, output_file=command.output_file
        )
        self._score = command.score
        self._several = len(command.prompts) > 1
        self._requests = enumerate(read_requests(command))
        self._pending: dict[int, _Pending] = {}
        self._order: deque[int] = deque()
        self._totals = Totals()
        self._started_s = time.monotonic()

    def run(self) -> Totals:
        """Runs to the end of the input."""
        exhausted = not self._submit()
        while self._order:
            messages = self._link.receive(_POLL_S)
            for message in messages:
                self._take(message)
            if not messages:
                self._link.check()
            self._write_finished()
            if not exhausted:
                exhausted = not self._submit()
            self._show_progress()
        return self._totals

    def _submit(self) -> bool:
        """Submits requests up to the bound; returns whether the input may hold more."""
        room = _OUTSTANDING_REQUESTS - len(self._order)
        taken = list(islice(self._requests, room))
        for request_id, request in taken:
            self._order.append(request_id)
            self._pending[request_id] = _Pending(request, RequestOutput(request.error))
        batch = [Submit(number, request.body, self._score) for number, request in taken if request.body is not None]
        if batch:
            self._link.submit(batch)
        return len(taken) == room

    def _take(self, message: EngineMessage) -> None:
        if isinstance(message, EngineReady | EngineStatistics):
            return
        self._pending[message.request_id].output.take(message)
        if isinstance(message, TokenDelta):
            self._totals.tokens += len(message.token_ids)

    def _write_finished(self) -> None:
        """Writes the results that no unfinished request stands before."""
        while self._order and self._pending[self._order[0]].output.is_done:
            pending = self._pending.pop(self._order.popleft())
            records = list(pending.records())
            self._totals.requests += 1
            self._totals.failed += any(record.error is not None for record in records)
            for record in records:
                self._output.write(self._line(pending, record))
            self._output.flush()

    def _line(self, pending: _Pending, record: ResultRecord) -> str:
        if not self._as_text:
            return msgspec.json.encode(record).decode() + "\n"
        text = record.text if record.error is None else f"error: {record.error.message}"
        head = f"== {record.id}[{record.index}]\n" if self._several or len(pending.output.choices) > 1 else ""
        return f"{head}{text}\n"

    def _show_progress(self) -> None:
        rate = self._totals.tokens / max(time.monotonic() - self._started_s, 1e-9)
        self._progress.update(
            self._task,
            description="generating",
            completed=self._totals.requests,
            total=self._totals.requests + len(self._order),
            rate=f"{rate:.0f} tokens/s",
        )


def _write_metrics(metrics: EngineMetrics, ready: EngineReady, engine: EngineProcess, path: Path) -> None:
    """Writes the metrics, once the engine has told what it counted, or has had the time for it."""
    metrics.heard(ready)
    told = 0
    deadline_s = time.monotonic() + _STATISTICS_S
    # The first message may have been on its way before the last request ended.
    while told < 2 and time.monotonic() < deadline_s:
        for message in engine.socket.receive(_POLL_S):
            metrics.heard(message)
            told += isinstance(message, EngineStatistics)
    path.write_bytes(metrics.exposition())


def _print_summary(ready: EngineReady, totals: Totals, elapsed_s: float) -> None:
    failed = f", {totals.failed} failed" if totals.failed else ""
    plural = "" if totals.requests == 1 else "s"
    print(
        f"lockstep: {totals.requests} request{plural}{failed}, {totals.tokens} tokens in {elapsed_s:.1f} s "
        f"({totals.tokens / max(elapsed_s, 1e-9):.1f} tokens/s) on TP{ready.tp_size} x PP{ready.pp_size}, "
        f"{ready.dtype} on {ready.device}" + (f" ({ready.compute})" if ready.compute else ""),
        file=sys.stderr,
    )
