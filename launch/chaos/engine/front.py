"""The front side of a cell, in a process of its own: starts an engine, gives it requests, tells what came of them."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from launch.chaos.engine.outcome import EpochSeen, FrontOutcome, RequestEnd
from launch.chaos.engine.plan import AFTERWARDS, REQUESTS, FrontPlan, read_plan
from launch.chaos.engine.scenario import Scenario
from launch.chaos.outside import find_process, strike
from launch.chaos.record import CellFolder
from launch.engine import Engine
from launch.exit_codes import ExitCode
from launch.front.engine_errors import EngineClosedError, RequestFailedError, RequestRefusedError
from launch.node.parent_death import die_with_parent
from launch.node.rank_fault import FaultReport
from launch.node.rank_processes import RanksFailedError, Terminated, raise_on_signals
from runtime.client_socket import ClientSocketError

_TOKENS_BEFORE = 3
_IDLE_S = 0.3
_LOOK_S = 0.01
_ALL = 2
_FAILURES = (RequestRefusedError, RequestFailedError, EngineClosedError, RanksFailedError, ClientSocketError)


class Stream:
    """One request under way."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.token_ids: list[int] = []
        self.times_s: list[float] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.error = ""
        self.failed_s: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes of it."""
        return self.finish_reason is not None or bool(self.error)

    async def run(self, engine: Engine, fields: dict[str, Any]) -> None:
        """Takes all that comes."""
        try:
            async for chunk in engine.stream_async(**fields):
                self.token_ids += chunk.token_ids
                self.times_s += [time.monotonic()] * len(chunk.token_ids)
                self.text += chunk.text
                self.finish_reason = chunk.finish_reason or self.finish_reason
        except _FAILURES as error:
            self.error, self.failed_s = f"{type(error).__name__}: {error}", time.monotonic()

    def end(self) -> RequestEnd:
        """Returns what came of it."""
        return RequestEnd(
            name=self.name,
            token_ids=self.token_ids,
            times_s=self.times_s,
            text=self.text,
            finish_reason=self.finish_reason,
            error=self.error,
        )


class Fault:
    """The fault of this cell, which strikes when its moment comes.

    Args:
        folder: The cell's.
        plan: What is to happen.
    """

    def __init__(self, folder: CellFolder, plan: FrontPlan) -> None:
        self._folder = folder
        self._scenario = plan.scenario
        self._rank = None if plan.scenario is None else plan.scenario.victim_rank(plan.tp, plan.pp)
        self._thread: threading.Thread | None = None

    def reach(self, moment: str) -> None:
        """Has it strike if this is its moment; one from outside does so beside what goes on here."""
        scenario = self._scenario
        if scenario is None or moment != ("decode" if scenario.moment == "recovery" else scenario.moment):
            return
        self._folder.arm(_ALL)
        if scenario.is_from_outside:
            self._thread = threading.Thread(target=self._strike, args=(scenario,), daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Returns when it is over."""
        if self._thread is not None:
            self._thread.join()

    def _strike(self, scenario: Scenario) -> None:
        before = 0
        if scenario.moment == "recovery":
            before = find_process(self._folder, scenario.victim, self._rank)
            while not self._folder.fired():
                time.sleep(_LOOK_S)
        victim = "front" if scenario.victim == "nobody" else scenario.victim
        pid = find_process(self._folder, victim, self._rank, not_pid=before)
        strike(self._folder, scenario.action, pid, rank=-1 if self._rank is None else self._rank)


class Front:
    """What goes on in this process.

    Args:
        folder: The cell's.
        plan: What to do.
    """

    def __init__(self, folder: CellFolder, plan: FrontPlan) -> None:
        self._folder = folder
        self._plan = plan
        self._reports: list[FaultReport] = []
        self._fault = Fault(folder, plan)
        self._epochs: list[EpochSeen] = []
        self._streams = [Stream(name) for name in REQUESTS]

    def run(self) -> FrontOutcome:
        """Returns what came of it."""
        plan = self._plan
        self._fault.reach("init")
        try:
            engine = Engine(plan.model, tp_size=plan.tp, pp_size=plan.pp, **plan.options)
        except RanksFailedError as error:
            return self._outcome(str(error), time.monotonic(), answers_after=False, closed_in_s=0.0)
        try:
            answers_after = asyncio.run(self._serve(engine))
        finally:
            closing_s = time.monotonic()
            engine.close()
            closed_in_s = time.monotonic() - closing_s
        self._fault.wait()
        failed = [stream for stream in self._streams if stream.error]
        failure = failed[0].error.partition(": ")[2] if failed else ""
        failed_s = min((stream.failed_s for stream in failed if stream.failed_s is not None), default=None)
        return self._outcome(failure, failed_s, answers_after=answers_after, closed_in_s=closed_in_s)

    async def _serve(self, engine: Engine) -> bool:
        """Runs the requests; returns whether one after them is answered."""
        watch = asyncio.create_task(self._watch(engine))
        self._fault.reach("idle")
        if self._plan.scenario is not None and self._plan.scenario.moment == "idle":
            await asyncio.sleep(_IDLE_S)
        self._fault.reach("prefill")
        tasks = [asyncio.create_task(stream.run(engine, REQUESTS[stream.name])) for stream in self._streams]
        while not all(stream.is_over or len(stream.token_ids) >= _TOKENS_BEFORE for stream in self._streams):
            await asyncio.sleep(_LOOK_S)
        self._fault.reach("decode")
        await asyncio.gather(*tasks)
        await asyncio.to_thread(self._fault.wait)
        after = Stream("afterwards")
        await after.run(engine, AFTERWARDS)
        watch.cancel()
        # Closing the engine removes them.
        self._reports = fault_reports(self._folder)
        return after.finish_reason == "length"

    async def _watch(self, engine: Engine) -> None:
        """Takes note of every life of the ranks."""
        while True:
            epoch = engine.ready.epoch
            if not self._epochs or self._epochs[-1].epoch != epoch:
                self._epochs.append(EpochSeen(epoch=epoch, ready_s=time.monotonic()))
            await asyncio.sleep(_LOOK_S)

    def _outcome(
        self, failure: str, failed_s: float | None, *, answers_after: bool, closed_in_s: float
    ) -> FrontOutcome:
        # Reports tell the time of day.
        clock_s = time.time() - time.monotonic()
        return FrontOutcome(
            epochs=self._epochs,
            requests=[stream.end() for stream in self._streams],
            failure=failure,
            failed_s=failed_s,
            blamed=[[fault.rank for fault in report.culprits] for report in self._reports],
            seen_s=[report.seen_at - clock_s for report in self._reports],
            tokens=[max((fault.tokens for fault in report.culprits), default=0) for report in self._reports],
            answers_after=answers_after,
            closed_in_s=closed_in_s,
        )


def fault_reports(folder: CellFolder) -> list[FaultReport]:
    """Returns what the keeper of the ranks reported, in order."""
    paths = sorted(folder.temporary.glob("lockstep-*/faults/*.json"), key=lambda path: int(path.stem))
    return [msgspec.json.decode(path.read_bytes(), type=FaultReport) for path in paths]


def main(argv: list[str]) -> int:
    """Runs the cell in the folder that ``argv`` names; returns the exit code."""
    die_with_parent(signal.SIGKILL)
    raise_on_signals()
    folder = CellFolder(Path(argv[0]))
    try:
        outcome = Front(folder, read_plan(folder.path)).run()
    except Terminated:
        return ExitCode.TERMINATED
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    (folder.path / "outcome.json").write_bytes(msgspec.json.encode(outcome))
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
