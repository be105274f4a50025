"""The leader's side of output checks: what is to be checked, what came of it, and a new process when one hangs."""

from __future__ import annotations

import logging
import os
import select
import subprocess
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable

import msgspec

from runtime.engine_statistics import CheckCounters
from runtime.output_check import CheckJob, CheckResult

RUN_LIMIT_S = 1.0
"""Seconds that one check may run."""

HOLD_LIMIT_S = 3.0
"""Seconds that an output may wait behind others until its check begins."""

_START_LIMIT_S = 30.0
_CLOSE_LIMIT_S = 1.0
_MAX_HARD_SCHEMAS = 1024
_READ_BYTES = 1 << 16
_LOG = logging.getLogger(__name__)


class _Child:
    """A process that checks one output at a time."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._buffer = b""

    def ask(self, job: CheckJob | None, limit_s: float) -> CheckResult | None:
        """Returns the answer to a job, or the process's first word; None when it did not come in time or is lost."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            return None
        try:
            if job is not None:
                stdin.write(msgspec.json.encode(job) + b"\n")
                stdin.flush()
            line = self._line(stdout.fileno(), time.monotonic() + limit_s)
        except OSError:
            return None
        return None if line is None else msgspec.json.decode(line, type=CheckResult)

    def end(self) -> None:
        """Ends it, whatever it does."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()

    def _line(self, descriptor: int, end_s: float) -> bytes | None:
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, end_s - time.monotonic()))
            data = os.read(descriptor, _READ_BYTES) if ready else b""
            if not data:
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


class OutputChecker:
    """Has finished outputs checked beside the step loop; no method waits for a check.

    One that takes too long is unchecked, and so is every later output of its schema: a schema can cost its check's time
    once.

    Args:
        start: Starts a process that runs ``output_check.serve`` on its standard input and output.
        on_finished: Called in the checker's thread after each result: an idle leader waits for it.
        run_limit_s: Seconds that one check may run.
        hold_limit_s: Seconds from ``submit`` after which a check is not begun any more.
    """

    def __init__(
        self,
        start: Callable[[], subprocess.Popen[bytes]],
        *,
        on_finished: Callable[[], None] | None = None,
        run_limit_s: float = RUN_LIMIT_S,
        hold_limit_s: float = HOLD_LIMIT_S,
    ) -> None:
        self._start = start
        self._on_finished = on_finished
        self._run_limit_s = run_limit_s
        self._hold_limit_s = hold_limit_s
        self._changed = threading.Condition()
        self._queue: deque[tuple[int, CheckJob, float]] = deque()
        self._results: list[tuple[int, CheckResult]] = []
        self._counters = CheckCounters()
        self._hard: OrderedDict[str, None] = OrderedDict()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="output-check", daemon=True)
        self._thread.start()

    def submit(self, number: int, job: CheckJob) -> None:
        """Has an output checked; ``number`` is the caller's, and comes back with the result."""
        with self._changed:
            self._queue.append((number, job, time.monotonic() + self._hold_limit_s))
            self._changed.notify()

    def results(self) -> list[tuple[int, CheckResult]]:
        """Returns what came since the last call, in the order of ``submit``."""
        with self._changed:
            results, self._results = self._results, []
            return results

    def counters(self) -> CheckCounters:
        """Returns what was counted so far."""
        with self._changed:
            return msgspec.structs.replace(self._counters)

    def close(self) -> None:
        """Ends the process; what waits is never answered."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(_CLOSE_LIMIT_S + self._run_limit_s)

    # The checker's thread.

    def _run(self) -> None:
        child = self._started()
        while (item := self._next()) is not None:
            number, job, end_s = item
            result = self._refused(job, end_s)
            if result is None:
                child = child or self._started()
                result = None if child is None else child.ask(job, self._run_limit_s)
                if result is None:
                    result = CheckResult(
                        "unchecked", f"its check took more than {self._run_limit_s:g} s, or ended its process"
                    )
                    self._remember(job)
                    if child is not None:
                        child.end()
                    child = None
            self._settle(number, result)
            child = child or self._started()
        if child is not None:
            child.end()

    def _next(self) -> tuple[int, CheckJob, float] | None:
        with self._changed:
            while not self._queue and not self._closed:
                self._changed.wait()
            return None if self._closed else self._queue.popleft()

    def _refused(self, job: CheckJob, end_s: float) -> CheckResult | None:
        """Returns why a job is not to be tried, or None."""
        if job.schema in self._hard:
            return CheckResult("unchecked", "an earlier check of this schema took too long")
        if time.monotonic() >= end_s:
            return CheckResult("unchecked", f"others were checked for {self._hold_limit_s:g} s before it")
        return None

    def _remember(self, job: CheckJob) -> None:
        self._hard[job.schema] = None
        while len(self._hard) > _MAX_HARD_SCHEMAS:
            self._hard.popitem(last=False)

    def _started(self) -> _Child | None:
        """Returns a new process that is ready, or None when it cannot be had."""
        try:
            child = _Child(self._start())
        except OSError:
            _LOG.exception("the process that checks outputs cannot be started")
            return None
        if child.ask(None, _START_LIMIT_S) is None:
            _LOG.error("the process that checks outputs did not come up in %g s", _START_LIMIT_S)
            child.end()
            return None
        return child

    def _settle(self, number: int, result: CheckResult) -> None:
        with self._changed:
            self._results.append((number, result))
            setattr(self._counters, result.state, getattr(self._counters, result.state) + 1)
            closed = self._closed
        if self._on_finished is not None and not closed:
            self._on_finished()
