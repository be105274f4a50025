"""The compile process of a stage: vets each grammar in a worker that it forks, and outlives whatever becomes of that.

It has one thread and the engines loaded, so that a worker is there in milliseconds and can take nothing with it: what
a worker crashes on, hangs in or swells to is gone with it.
"""

from __future__ import annotations

import logging
import os
import resource
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from grammar_sync.engines.backend import GrammarBackend
from grammar_sync.vetting.lanes import Lanes
from grammar_sync.vetting.messages import (
    Answer,
    Busy,
    CandidateRefused,
    Candidates,
    Drop,
    FrameBuffer,
    FrameError,
    Order,
    Phase,
    Refused,
    Setup,
    Vet,
    Vetted,
    VettingLimits,
    VettingOutcome,
    WorkerWord,
    to_frame,
    write_all,
)
from grammar_sync.vetting.warm_backend import WarmBackend, own_backend
from grammar_sync.vetting.worker import Job, limit_this_process, memory_refusal, vet

_WALL_FACTOR = 3
# Most grammars take well under a second of CPU: at 5 they get a third of a rank's share of a core that both want, at 10
# a tenth, which made hundreds that came at once wait for minutes. What takes longer is made to yield to the ranks.
_NICENESS = 5
_LONG_NICENESS = 10
_MAX_NICENESS = 19
_LONG_S = 1.0
_BEAT_S = 1.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_UNKNOWN_DEATHS: Mapping[int, str] = {
    1: "internal error of the grammar compiler",
    -signal.SIGKILL: "the grammar compiler was killed while it worked on it",
}
_LOG = logging.getLogger(__name__)


@dataclass
class _Case:
    """A job and what is known of it; ``refusals`` has one for each form that was tried."""

    order: Vet
    asked_s: float
    budget_s: float
    first_start_s: float | None = None
    engines: tuple[str, ...] = ()
    refusals: list[Refused] = field(default_factory=list)
    is_wanted: bool = True


@dataclass
class _Worker:
    pid: int
    pipe: int
    case: _Case
    ends_s: float
    phase: Phase | None = None
    outcome: VettingOutcome | None = None
    is_late: bool = False
    is_long: bool = False
    talks_nonsense: bool = False
    buffer: FrameBuffer = field(default_factory=FrameBuffer)


def serve(connection: socket.socket, on_fork: Callable[[], None], born_with: WarmBackend | None = None) -> None:
    """Vets what is asked for through ``connection`` until it is closed; the process must have one thread.

    Args:
        connection: To the rank; the first message is a ``Setup``.
        on_fork: Called first in each worker: ties its life to this process.
        born_with: Engines that are there already; used where they are those of the ``Setup``.
    """
    os.nice(_NICENESS)
    inbox = FrameBuffer()
    frames: list[bytes] = []
    while not frames:
        if not inbox.read(connection.fileno()):
            return
        frames = inbox.frames()
    setup = msgspec.msgpack.decode(frames[0], type=Setup)
    backend = born_with.backend if born_with is not None and born_with.fits(setup) else own_backend(setup)
    process = VettingProcess(connection, setup, backend, on_fork)
    process.take(frames[1:])
    process.run(inbox)


class VettingProcess:
    """The loop of the compile process.

    Args:
        connection: To the rank.
        setup: What the rank said first.
        backend: The engines.
        on_fork: Called first in each worker.
    """

    def __init__(
        self, connection: socket.socket, setup: Setup, backend: GrammarBackend, on_fork: Callable[[], None]
    ) -> None:
        self._connection = connection
        self._limits: VettingLimits = setup.limits
        self._vocabulary = setup.vocabulary
        self._backend = backend
        self._on_fork = on_fork
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self._lanes = Lanes()
        self._cases: dict[int, _Case] = {}
        self._workers: dict[int, _Worker] = {}
        self._wall_limit_s = _WALL_FACTOR * (self._limits.deadline_s + self._limits.probe_limit_s)
        self._beat_due_s = 0.0
        yields_by = os.getpriority(os.PRIO_PROCESS, 0) + _LONG_NICENESS - _NICENESS
        self._long_niceness = min(_MAX_NICENESS, yields_by)
        self._own_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def run(self, inbox: FrameBuffer) -> None:
        """Serves until the rank closes the connection; ends its workers then."""
        is_open = True
        while is_open:
            for key, _ in self._selector.select(self._patience_s()):
                if key.fileobj is self._connection:
                    is_open = inbox.read(self._connection.fileno())
                    self.take(inbox.frames())
                else:
                    self._hear(self._workers[key.data])
            self._end_overdue()
            self._beat()
            self._start_workers()
        for worker in self._workers.values():
            os.kill(worker.pid, signal.SIGKILL)

    def take(self, frames: list[bytes]) -> None:
        """Takes orders in."""
        for frame in frames:
            order: Order = msgspec.msgpack.decode(frame, type=Order)
            match order:
                case Vet():
                    self._cases[order.job] = _Case(order, time.monotonic(), self._limits.deadline_s)
                    self._lanes.add(order.job)
                case Drop():
                    self._drop(order.job)
                case Setup():
                    raise RuntimeError("the compile process was set up twice")
        self._start_workers()

    def _drop(self, job: int) -> None:
        """Forgets a job, and ends it when it runs; it may have been answered meanwhile."""
        if job in self._workers:
            self._cases[job].is_wanted = False
            os.kill(self._workers[job].pid, signal.SIGKILL)
        elif job in self._cases:
            self._lanes.drop(job)
            del self._cases[job]

    def _patience_s(self) -> float | None:
        moments = [worker.ends_s for worker in self._workers.values()]
        if moments:
            moments.append(self._beat_due_s)
        now_s = time.monotonic()
        next_s = self._lanes.next_s(now_s)
        if next_s is not None:
            moments.append(next_s)
        return max(0.0, min(moments) - now_s) if moments else None

    def _start_workers(self) -> None:
        while (job := self._lanes.start(time.monotonic())) is not None:
            self._fork(self._cases[job])

    def _fork(self, case: _Case) -> None:
        now_s = time.monotonic()
        case.first_start_s = case.first_start_s if case.first_start_s is not None else now_s
        job = Job(case.order.spec, len(case.refusals), case.budget_s)
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._work(job, writing)
        os.close(writing)
        os.set_blocking(reading, False)
        worker = _Worker(pid, reading, case, now_s + self._wall_limit_s)
        self._workers[case.order.job] = worker
        self._selector.register(reading, selectors.EVENT_READ, case.order.job)

    def _work(self, job: Job, pipe: int) -> None:
        """Is what a worker does; never returns."""
        code = 1
        try:
            self._on_fork()
            self._let_go()
            limit_this_process(self._limits)
            vet(self._backend, job, self._limits, self._vocabulary, lambda word: write_all(pipe, to_frame(word)))
            code = 0
        except Exception:  # noqa: BLE001 - the process boundary: nothing may run on in the loop of the parent
            _LOG.exception("vetting failed")
        finally:
            logging.shutdown()
            os._exit(code)

    def _let_go(self) -> None:
        """Closes, in a worker, what belongs to the parent: nobody else may keep the rank's connection open."""
        self._connection.close()
        self._selector.close()
        for worker in self._workers.values():
            os.close(worker.pipe)

    def _hear(self, worker: _Worker) -> None:
        is_open = worker.buffer.read(worker.pipe)
        words: list[WorkerWord] = []
        try:
            words = [msgspec.msgpack.decode(frame, type=WorkerWord) for frame in worker.buffer.frames()]
        except (FrameError, msgspec.DecodeError):
            worker.talks_nonsense = True
            os.kill(worker.pid, signal.SIGKILL)
        for word in words:
            match word:
                case Candidates():
                    worker.case.engines = word.engines
                case Phase():
                    worker.phase = word
                case CandidateRefused():
                    worker.case.refusals.append(word.refused)
                case Vetted() | Refused():
                    worker.outcome = word
        if not is_open:
            self._bury(worker)

    def _bury(self, worker: _Worker) -> None:
        """Takes a worker that has ended off the list; answers, or goes on with the grammar's next form."""
        case, job = worker.case, worker.case.order.job
        self._selector.unregister(worker.pipe)
        os.close(worker.pipe)
        _, status, usage = os.wait4(worker.pid, 0)
        del self._workers[job]
        self._lanes.done(job)
        if not case.is_wanted:
            del self._cases[job]
            return
        code = os.waitstatus_to_exitcode(status)
        if worker.talks_nonsense:
            worker.outcome = None
        if worker.outcome is None and (code != 0 or not case.engines):
            case.refusals.append(self._death(worker, code, usage.ru_maxrss))
        case.budget_s = max(0.1, case.budget_s - usage.ru_utime - usage.ru_stime)
        if worker.outcome is None and len(case.refusals) < len(case.engines):
            self._lanes.add(job)
            return
        self._answer(case, worker.outcome or _final_refusal(case))

    def _death(self, worker: _Worker, code: int, peak_kib: int) -> Refused:
        """Returns what is said of a worker that ended without an outcome."""
        limits = self._limits
        if worker.talks_nonsense:
            return Refused("crash", "the grammar compiler sent what is no message")
        if worker.is_late or code == -signal.SIGPROF:
            if not worker.is_late and worker.phase is not None and worker.phase.name == "probe":
                return Refused("masks", f"one of its masks takes more than {limits.fill_limit_s:g} s to fill")
            return Refused("time", f"it was not compiled in {limits.deadline_s:g} s", is_final=False)
        if code == -signal.SIGABRT and peak_kib * 1024 - self._own_bytes > limits.memory_bytes // 2:
            return memory_refusal(limits)
        if code in _UNKNOWN_DEATHS:
            return Refused("crash", _UNKNOWN_DEATHS[code], is_final=False)
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return Refused("crash", f"the grammar compiler crashed on it ({name})")

    def _answer(self, case: _Case, outcome: VettingOutcome) -> None:
        started_s = case.first_start_s if case.first_start_s is not None else case.asked_s
        answer = Answer(case.order.job, outcome, started_s - case.asked_s, time.monotonic() - started_s)
        del self._cases[case.order.job]
        write_all(self._connection.fileno(), to_frame(answer))

    def _end_overdue(self) -> None:
        now_s = time.monotonic()
        for worker in self._workers.values():
            if now_s < worker.ends_s:
                continue
            worker.ends_s = now_s + self._wall_limit_s
            # One that wants to run is only short of CPU: what it may use of that is bounded by its timer.
            if not _Activity.of(worker.pid).wants_cpu:
                worker.is_late = True
                os.kill(worker.pid, signal.SIGKILL)
        while (job := self._lanes.overdue(now_s)) is not None:
            self._end_for_now(job)

    def _beat(self) -> None:
        """Tells the rank from time to time that workers compute, and has those yield that have done so for long."""
        now_s = time.monotonic()
        if not self._workers or now_s < self._beat_due_s:
            return
        self._beat_due_s = now_s + _BEAT_S
        is_busy = False
        for worker in self._workers.values():
            activity = _Activity.of(worker.pid)
            is_busy |= activity.wants_cpu
            if activity.cpu_s > _LONG_S and not worker.is_long:
                worker.is_long = True
                os.setpriority(os.PRIO_PROCESS, worker.pid, self._long_niceness)
        if is_busy:
            write_all(self._connection.fileno(), to_frame(Busy()))

    def _end_for_now(self, job: int) -> None:
        """Ends a hard job to make room for others; it starts over later, at the form it had come to."""
        worker = self._workers.pop(job)
        os.kill(worker.pid, signal.SIGKILL)
        self._selector.unregister(worker.pipe)
        os.close(worker.pipe)
        os.waitpid(worker.pid, 0)
        if not worker.case.is_wanted:
            self._lanes.drop(job)
            del self._cases[job]


class _Activity(NamedTuple):
    """What a child does: whether it runs or waits for nothing but a CPU, and the seconds of CPU that it has used."""

    wants_cpu: bool
    cpu_s: float

    @classmethod
    def of(cls, pid: int) -> _Activity:
        """Returns what a child does now; one that has ended and was not waited for is still there."""
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return cls(fields[0] in {"R", "Z"}, (int(fields[11]) + int(fields[12])) / _TICKS_PER_S)


def _final_refusal(case: _Case) -> Refused:
    """Returns the refusal of a grammar none of whose forms will do: every engine's reason, once where they agree."""
    if len({refusal.message for refusal in case.refusals}) == 1:
        return case.refusals[0]
    told = [f"{engine}: {refusal.message}" for engine, refusal in zip(case.engines, case.refusals, strict=False)]
    is_final = all(refusal.is_final for refusal in case.refusals)
    return Refused(case.refusals[0].reason, "; ".join(told), is_final)
