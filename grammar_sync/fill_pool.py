"""Runs a step's mask fills in a few daemon threads beside the step loop, and gives up those that do not end.

An engine's fill cannot be stopped. One that runs for too long keeps its thread, which is replaced; its row alone fails,
and the rows behind it go on in the same step.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from grammar_sync.engines.backend import MatcherError

DEFAULT_DEADLINE_S = 1.0
"""CPU seconds that one fill may take: 1,000 times what the 99th percentile of real grammars takes."""

DEFAULT_MAX_ABANDONED = 8
"""Fills that were given up and still run: each burns a core."""

_WALL_PER_CPU = 5
_POLL_S = 0.02
_CALLS_PER_THREAD = 16


class CallState(Enum):
    """How a call came out."""

    PENDING = auto()
    DONE = auto()
    FAILED = auto()
    LATE = auto()


class CallResult(NamedTuple):
    """How one call came out.

    Attributes:
        state: Never PENDING once its batch was waited for.
        seconds: How long it ran; 0 for one that did not begin.
        message: What went wrong, in one line; empty for a call that is done.
    """

    state: CallState
    seconds: float = 0.0
    message: str = ""


_PENDING = CallResult(CallState.PENDING)


@dataclass(eq=False)
class CallBatch:
    """Calls under way; only the pool looks inside."""

    calls: Sequence[Callable[[], None]]
    results: list[CallResult]
    done: threading.Condition
    left: int


@dataclass(eq=False, slots=True)
class _Worker:
    """A thread, and the call it runs."""

    batch: CallBatch | None = None
    index: int = 0
    started_s: float = 0.0
    cpu_clock: int = 0
    started_cpu_s: float = 0.0
    is_abandoned: bool = False


@dataclass
class FillPool:
    """Daemon threads that run calls, each within a deadline.

    The deadline counts the CPU time of the thread, so that a loaded machine ends no request; a call that waits instead
    of computing is given up after five times as many seconds by the wall clock.

    Args:
        threads: How many run at once; one more is woken for every 16 calls.
        deadline_s: CPU seconds of one call.
        beat: Called now and then by who waits for calls, to show that it waits and does not hang.
        max_abandoned: How many abandoned calls may still be running; beyond that no thread is replaced, and calls fail
            at once when no thread is left.
    """

    threads: int = 1
    deadline_s: float = DEFAULT_DEADLINE_S
    max_abandoned: int = DEFAULT_MAX_ABANDONED
    beat: Callable[[], None] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _workers: list[_Worker] = field(default_factory=list)
    _queue: deque[tuple[CallBatch, int]] = field(default_factory=deque)
    _abandoned: int = 0
    _closed: bool = False

    def __post_init__(self) -> None:
        """Makes the condition that threads wait for work on."""
        self._work = threading.Condition(self._lock)

    @property
    def abandoned(self) -> int:
        """How many calls that were given up still run."""
        with self._lock:
            return self._abandoned

    def submit(self, calls: Sequence[Callable[[], None]]) -> CallBatch:
        """Begins to run ``calls``, in order, without waiting; each may raise ``MatcherError``."""
        batch = CallBatch(calls, [_PENDING] * len(calls), threading.Condition(self._lock), len(calls))
        with self._lock:
            self._queue.extend((batch, index) for index in range(len(calls)))
            self._start_threads()
            self._work.notify(1 + (len(calls) - 1) // _CALLS_PER_THREAD)
        return batch

    def close(self) -> None:
        """Lets the threads end; calls that have not begun are never run."""
        with self._lock:
            self._closed = True
            self._queue.clear()
            self._work.notify_all()

    def wait(self, batch: CallBatch) -> list[CallResult]:
        """Returns how each call came out, in order; none is waited for beyond the deadline."""
        with self._lock:
            while batch.left:
                self._abandon_late()
                self._start_threads()
                if not self._workers:
                    self._refuse_queued()
                if batch.left:
                    batch.done.wait(_POLL_S)
                    if self.beat is not None:
                        self.beat()
            return batch.results

    def _start_threads(self) -> None:
        """Starts threads up to what the queue can use, abandoned ones counted only against their bound."""
        wanted = min(self.threads, 1 + (len(self._queue) - 1) // _CALLS_PER_THREAD)
        while len(self._workers) < wanted and self._abandoned < self.max_abandoned and not self._closed:
            worker = _Worker()
            self._workers.append(worker)
            threading.Thread(target=self._run, args=(worker,), name="mask-fill", daemon=True).start()

    def _refuse_queued(self) -> None:
        message = f"{self._abandoned} mask fills that were given up still run: no thread is left"
        while self._queue:
            batch, index = self._queue.popleft()
            self._settle(batch, index, CallResult(CallState.FAILED, 0.0, message))

    def _abandon_late(self) -> None:
        for worker in tuple(self._workers):
            if worker.batch is None:
                continue
            elapsed_s = time.monotonic() - worker.started_s
            cpu_s = time.clock_gettime(worker.cpu_clock) - worker.started_cpu_s
            if max(cpu_s, elapsed_s / _WALL_PER_CPU) < self.deadline_s:
                continue
            worker.is_abandoned = True
            self._workers.remove(worker)
            self._abandoned += 1
            late = CallResult(CallState.LATE, elapsed_s, f"took more than {self.deadline_s:g} s")
            self._settle(worker.batch, worker.index, late)

    def _settle(self, batch: CallBatch, index: int, result: CallResult) -> None:
        batch.results[index] = result
        batch.left -= 1
        if not batch.left:
            batch.done.notify_all()

    def _run(self, worker: _Worker) -> None:
        worker.cpu_clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            while self._run_next(worker):
                pass
        finally:
            with self._lock:
                if worker in self._workers:
                    self._workers.remove(worker)

    def _run_next(self, worker: _Worker) -> bool:
        """Waits for a call and runs it; returns whether the thread goes on."""
        with self._lock:
            while not self._queue and not self._closed:
                self._work.wait()
            if self._closed:
                return False
            batch, index = self._queue.popleft()
            worker.batch, worker.index = batch, index
            worker.started_s = time.monotonic()
            worker.started_cpu_s = time.thread_time()
        # Stays when an error that nobody expected ends this thread: the row fails, the traceback is printed.
        state, message = CallState.FAILED, "internal error"
        try:
            batch.calls[index]()
            state, message = CallState.DONE, ""
        except MatcherError as error:
            message = str(error)
        finally:
            with self._lock:
                worker.batch = None
                if worker.is_abandoned:
                    self._abandoned -= 1
                else:
                    self._settle(batch, index, CallResult(state, time.monotonic() - worker.started_s, message))
        return not worker.is_abandoned
