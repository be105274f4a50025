"""The rank's side of the compile process: what was asked, what came of it, and a new process when one is lost."""

from __future__ import annotations

import logging
import select
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import msgspec

from grammar_sync.spec import GrammarSpec
from grammar_sync.vetting.messages import (
    Busy,
    Drop,
    FrameBuffer,
    FrameError,
    Refused,
    Reply,
    Setup,
    Vet,
    Vetted,
    to_frame,
)
from grammar_sync.vetting.protocol import OutcomeStore, VettingCounters, VettingReport
from grammar_sync.wanted_cache import WantedCache

DEFAULT_OUTCOME_CACHE_BYTES = 64 << 20
_ENTRY_OVERHEAD_BYTES = 1024
_MAX_ATTEMPTS = 2
_MAX_LOSSES = 5
_LOST = Refused("crash", "the compile process was lost while it worked on it", is_final=False)
_NO_PROCESS = Refused("crash", "the compile process cannot be started", is_final=False)
_CLOSED = Refused("crash", "the grammar compiler was closed", is_final=False)
_LOG = logging.getLogger(__name__)


class VettingError(RuntimeError):
    """The vetter was asked for a grammar that nobody submitted, or after it was closed."""


class CompileProcess(Protocol):
    """A process that runs ``vetting_process.serve``."""

    @property
    def connection(self) -> socket.socket:
        """To it."""

    def end(self) -> None:
        """Ends it, whatever it does, and closes the connection."""


@dataclass
class _Job:
    """What the compile process has to do; ``losses`` counts the processes that were lost while it had it."""

    number: int
    spec: GrammarSpec
    losses: int = 0


class VettingService:
    """Has grammars vetted by a compile process, each once for all who want it.

    Outcomes are kept, good and bad, but not time-outs and losses. A compile process that is lost is replaced at once;
    what it had is asked again, once.

    Args:
        setup: What the compile process is told first.
        process: A compile process that was told nothing yet.
        start: Starts another one.
        cache_limit_bytes: Bound on the outcomes kept.
        on_finished: Called in the service's thread after outcomes, until ``close``: an idle leader waits for it.
        store: Keeps outcomes from run to run.
    """

    def __init__(
        self,
        setup: Setup,
        process: CompileProcess,
        start: Callable[[], CompileProcess],
        *,
        cache_limit_bytes: int = DEFAULT_OUTCOME_CACHE_BYTES,
        on_finished: Callable[[], None] | None = None,
        store: OutcomeStore | None = None,
    ) -> None:
        self._setup = setup
        self._start = start
        self._on_finished = on_finished
        self._store = store
        self._lock = threading.Lock()
        self._cache: WantedCache[GrammarSpec, VettingReport] = WantedCache(cache_limit_bytes)
        self._jobs: dict[GrammarSpec, _Job] = {}
        self._asked: dict[int, _Job] = {}
        self._orders: deque[Vet | Drop] = deque()
        self._counters = VettingCounters()
        self._next_number = 0
        self._closed = False
        self._heard_s = time.monotonic()
        self._wake_reading, self._wake_writing = socket.socketpair()
        self._wake_reading.setblocking(False)
        self._wake_writing.setblocking(False)
        self._thread = threading.Thread(target=self._run, args=(process,), name="grammar-vetting", daemon=True)
        self._thread.start()

    @property
    def heard_s(self) -> float:
        """When the compile process last answered, said that it computes, or was started; monotonic clock."""
        return self._heard_s

    def submit(self, spec: GrammarSpec) -> None:
        """Makes sure that ``spec`` is vetted, or under way; one call for each request that wants it.

        Raises:
            VettingError: The service was closed.
        """
        with self._lock:
            if self._closed:
                raise VettingError(f"submit of a {spec.kind} grammar after close")
            self._counters.asked += 1
            if not self._cache.want(spec):
                self._counters.cache_hits += self._cache[spec] is not None
                return
            job = self._jobs[spec] = _Job(self._next_number, spec)
            self._next_number += 1
            self._order(Vet(job.number, spec))

    def poll(self, spec: GrammarSpec) -> VettingReport | None:
        """Returns what came of a grammar that was submitted and not yet discarded; None while it is under way.

        Raises:
            VettingError: No request wants this grammar.
        """
        with self._lock:
            self._check_wanted(spec, "poll")
            return self._cache[spec]

    def discard(self, spec: GrammarSpec) -> None:
        """Says that one request less wants the grammar; one that nobody wants is vetted no further.

        Raises:
            VettingError: No request wants this grammar.
        """
        with self._lock:
            self._check_wanted(spec, "discard")
            report = self._cache[spec]
            if not self._cache.unwant(spec):
                return
            if report is None:
                self._cache.forget(spec)
                self._counters.dropped += 1
                self._order(Drop(self._jobs.pop(spec).number))
            elif not _is_final(report):
                self._cache.forget(spec)

    def counters(self) -> VettingCounters:
        """Returns what was counted so far."""
        with self._lock:
            return msgspec.structs.replace(self._counters, refused=dict(self._counters.refused))

    def close(self) -> None:
        """Drops everything and ends the compile process; takes no more."""
        with self._lock:
            self._closed = True
            self._wake()
        self._thread.join()

    def _check_wanted(self, spec: GrammarSpec, operation: str) -> None:
        if not self._cache.is_wanted(spec):
            raise VettingError(f"{operation} of a {spec.kind} grammar that no request wants")

    def _order(self, order: Vet | Drop) -> None:
        self._orders.append(order)
        self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # so many unread already: the thread wakes anyway
            self._wake_writing.send(b"x")

    # The service's thread.

    def _run(self, process: CompileProcess) -> None:
        losses = 0
        while True:
            answers = self._serve(process)
            process.end()
            if self._closed:
                break
            self._ask_again()
            losses = 0 if answers else losses + 1
            if losses == _MAX_LOSSES:
                _LOG.error("%d compile processes were lost before they answered: grammars are refused", losses)
                break
            _LOG.warning("the compile process was lost; another one is started")
            try:
                process = self._start()
            except OSError:
                _LOG.exception("the compile process cannot be started: grammars are refused")
                break
            self._heard_s = time.monotonic()
            with self._lock:
                self._counters.restarts += 1
        self._refuse_all()

    def _serve(self, process: CompileProcess) -> int:
        """Talks with one compile process until it is lost or the service closed; returns how often it answered."""
        connection = process.connection
        connection.setblocking(False)
        outgoing = bytearray(to_frame(self._setup))
        inbox = FrameBuffer()
        answers = 0
        is_open = True
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_READ)
            selector.register(self._wake_reading, selectors.EVENT_READ)
            while is_open and not self._closed:
                outgoing += self._take_orders()
                writing = selectors.EVENT_WRITE if outgoing else 0
                selector.modify(connection, selectors.EVENT_READ | writing)
                for key, events in selector.select():
                    if key.fileobj is self._wake_reading:
                        self._wake_reading.recv(4096)
                        continue
                    try:
                        if events & selectors.EVENT_WRITE:
                            del outgoing[: connection.send(outgoing)]
                        if events & selectors.EVENT_READ:
                            is_open = inbox.read(connection.fileno())
                            answers += self._take_answers(inbox.frames())
                    except OSError:
                        is_open = False
                    except (FrameError, msgspec.DecodeError) as error:
                        _LOG.error("the compile process sent what is no answer: %s", error)
                        is_open = False
        return answers

    def _take_orders(self) -> bytes:
        """Returns the frames of the orders that have gathered, but for what is known from an earlier run."""
        frames = bytearray()
        while True:
            with self._lock:
                if not self._orders:
                    return bytes(frames)
                order = self._orders.popleft()
                job = None if isinstance(order, Drop) else self._jobs.get(order.spec)
            if isinstance(order, Drop):
                if self._asked.pop(order.job, None) is not None:
                    frames += to_frame(order)
                continue
            if job is None or job.number != order.job:
                continue
            stored = None if self._store is None else self._store.load(order.spec)
            if stored is None:
                self._asked[order.job] = job
                frames += to_frame(order)
            else:
                self._resolve(job, VettingReport(stored), is_stored=True)

    def _take_answers(self, frames: list[bytes]) -> int:
        """Takes in what the compile process says; returns how many answers were in it."""
        answers = 0
        for frame in frames:
            answer: Reply = msgspec.msgpack.decode(frame, type=Reply)
            self._heard_s = time.monotonic()
            if isinstance(answer, Busy):
                continue
            answers += 1
            job = self._asked.pop(answer.job, None)
            if job is not None:
                report = VettingReport(answer.outcome, answer.queue_s, answer.vet_s)
                self._resolve(job, report)
                if self._store is not None and _is_final(report):
                    self._store.save(job.spec, answer.outcome)
        return answers

    def _resolve(self, job: _Job, report: VettingReport, *, is_stored: bool = False) -> None:
        with self._lock:
            if self._jobs.get(job.spec) is not job:
                return
            del self._jobs[job.spec]
            self._cache.put(job.spec, report, 2 * len(job.spec.source) + _ENTRY_OVERHEAD_BYTES)
            self._count(report, is_stored=is_stored)
            closed = self._closed
        if self._on_finished is not None and not closed:
            self._on_finished()

    def _count(self, report: VettingReport, *, is_stored: bool) -> None:
        counters = self._counters
        if is_stored:
            counters.stored_hits += 1
            return
        match report.outcome:
            case Vetted(compile_s=compile_s):
                counters.vetted += 1
                counters.compile_s += compile_s
            case Refused(reason=reason):
                counters.refused[reason] = counters.refused.get(reason, 0) + 1
        counters.queue_s += report.queue_s
        counters.vet_s += report.vet_s

    def _ask_again(self) -> None:
        """Has what the lost process was asked asked again, unless that was so before."""
        lost = list(self._asked.values())
        self._asked.clear()
        for job in reversed(lost):
            job.losses += 1
            if job.losses < _MAX_ATTEMPTS:
                with self._lock:
                    self._orders.appendleft(Vet(job.number, job.spec))
            else:
                self._resolve(job, VettingReport(_LOST))

    def _refuse_all(self) -> None:
        """Refuses what is asked from now on, after the service was closed or when no process can be had."""
        while not self._closed:
            with self._lock:
                waiting = list(self._jobs.values())
                self._orders.clear()
            for job in waiting:
                self._resolve(job, VettingReport(_NO_PROCESS))
            select.select([self._wake_reading], [], [])
            self._wake_reading.recv(4096)
        with self._lock:
            waiting = list(self._jobs.values())
        for job in waiting:
            self._resolve(job, VettingReport(_CLOSED))


def _is_final(report: VettingReport) -> bool:
    return not isinstance(report.outcome, Refused) or report.outcome.is_final
