"""``lockstep chaos``: the cells of Lockstep's own engine, and the report on them."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.progress import Progress, TaskID

from launch.bench.output import publish
from launch.chaos.engine.judge import Bounds, judge
from launch.chaos.engine.outcome import EngineOutcome, RequestEnd
from launch.chaos.engine.plan import FrontPlan
from launch.chaos.engine.report import CellReport, EngineReport, engine_report
from launch.chaos.engine.run import run_engine
from launch.chaos.engine.scenario import Scenario, engine_scenarios
from launch.chaos.engine.tiny_model import write_tiny_model
from launch.chaos.error import ChaosError
from launch.chaos.names import print_names
from launch.chaos.processes import end_processes
from launch.checks import check_engine
from launch.cli.parse import UsageError
from launch.commands import ChaosCommand
from launch.exit_codes import ExitCode
from launch.node.rank_processes import SIGNALS
from launch.options import EngineOptions
from launch.progress import progress_bar

_ATTEMPTS = 2
_LEAST_JOBS = 2
"""Ranks that start, stall or recover mostly wait: two cells of four ranks keep two cores busy."""
_POLL_S = 0.05
_GROUP_TIMEOUT_S = 10.0
_RECOVERIES = 8
_KV_CACHE_BYTES = 32 << 20

Truth = dict[str, RequestEnd]


def run_engine_chaos(command: ChaosCommand) -> ExitCode:
    """Puts an engine to its cells and prints what became of each; returns the exit code.

    Raises:
        ChaosError: The engine does not do its work undisturbed.
        UsageError: No cell has such a name.
        CheckpointError, ModelConfigError, StagePartitionError: The model cannot be used so.
        KeyboardInterrupt, Terminated: A signal came; what was finished is reported before.
    """
    scenarios = engine_scenarios(command.matrix, tp=command.tp, pp=command.pp, only=command.only, seed=command.seed)
    if not scenarios:
        raise UsageError(f"--only {' '.join(command.only)}: no cell of the {command.matrix} matrix has such a name")
    if command.list_only:
        return print_names(scenario.name for scenario in scenarios)
    with tempfile.TemporaryDirectory(prefix="lockstep-chaos-") as name:
        runs = _Runs(command, Path(name))
        cells: list[CellReport] = []
        try:
            runs.all(scenarios, cells)
        except SIGNALS:
            _publish(command, runs.bounds, cells, is_cut=True)
            raise
    return ExitCode.OK if _publish(command, runs.bounds, cells).all_well else ExitCode.CHAOS_FAILED


def _publish(command: ChaosCommand, bounds: Bounds, cells: list[CellReport], *, is_cut: bool = False) -> EngineReport:
    """Prints and writes the report on cells that were run, all of them unless it ``is_cut``; returns it."""
    report = engine_report(
        cells,
        model="a tiny random Llama" if command.model is None else command.model.name,
        tp=command.tp,
        pp=command.pp,
        matrix=command.matrix,
        seed=command.seed,
        bounds=bounds,
        is_cut=is_cut,
    )
    publish(report, command.json_file)
    if command.plot_file is not None:
        command.plot_file.write_text(report.plot())
    return report


class _Runs:
    """The runs of one command.

    Args:
        command: What to run.
        root: Where cells have their folders.
    """

    def __init__(self, command: ChaosCommand, root: Path) -> None:
        self._command = command
        self._root = root
        self._model = write_tiny_model(root / "model") if command.model is None else command.model
        self._truths: dict[str, Truth] = {}
        self._running: set[Path] = set()
        self._is_left = False
        timeout_s = command.group_timeout_s or _GROUP_TIMEOUT_S
        options = EngineOptions(model=self._model, tp=command.tp, pp=command.pp, group_timeout_s=timeout_s)
        check_engine(options)
        self.bounds = Bounds(group_timeout_s=timeout_s, stall_s=options.stall_timeout_s)

    def all(self, scenarios: Sequence[Scenario], cells: list[CellReport]) -> None:
        """Runs every cell as often as it is to be, and says on stderr at once what broke.

        Args:
            scenarios: The cells.
            cells: Takes what became of each, in order; when a signal ends this, those that are finished.

        Raises:
            ChaosError: The engine does not do its work undisturbed.
        """
        repeats = range(self._command.repeat)
        runs = [(scenario, f"{repeat}-{at}") for repeat in repeats for at, scenario in enumerate(scenarios)]
        ranks = self._command.tp * self._command.pp
        jobs = self._command.jobs or max(_LEAST_JOBS, len(os.sched_getaffinity(0)) // ranks)
        pool = ThreadPoolExecutor(jobs)
        with ExitStack() as stack:
            progress = stack.enter_context(progress_bar())
            stack.callback(self._leave, pool)
            task = progress.add_task("chaos", total=len(runs), rate="undisturbed")
            numerics = sorted({scenario.numerics for scenario in scenarios})
            self._truths = dict(zip(numerics, pool.map(self._truth, numerics), strict=True))
            futures = [pool.submit(self._cell, scenario, self._root / place) for scenario, place in runs]
            try:
                for future in futures:
                    cells.append(future.result())
                    self._tell(cells[-1], progress, task)
            except SIGNALS:
                rest = [one for one in futures[len(cells) :] if one.done() and not one.cancelled()]
                cells += [one.result() for one in rest if one.exception() is None]
                raise

    def _leave(self, pool: ThreadPoolExecutor) -> None:
        """Returns when no cell is under way; those that are, since a signal or an error came, are ended."""
        self._is_left = True
        pool.shutdown(wait=False, cancel_futures=True)
        while self._running:
            for folder in tuple(self._running):
                end_processes(folder, within_s=0.0)
            time.sleep(_POLL_S)
        pool.shutdown()

    def _tell(self, cell: CellReport, progress: Progress, task: TaskID) -> None:
        progress.update(task, rate=cell.name)
        progress.advance(task)
        if not cell.judgement.is_kept:
            print(f"lockstep: {cell.name}: {cell.what_broke()}", file=sys.stderr)

    def _cell(self, scenario: Scenario, folder: Path) -> CellReport:
        truth = self._truths[scenario.numerics]
        for attempt in range(1, _ATTEMPTS + 1):
            outcome = self._run(scenario, scenario.numerics, scenario.mode, folder / str(attempt))
            rank = scenario.victim_rank(self._command.tp, self._command.pp)
            judgement = judge(scenario, outcome, truth, self.bounds, rank=rank)
            if judgement.happened or self._is_left:
                break
        return CellReport(
            name=scenario.name,
            row=scenario.row,
            scenario=scenario,
            judgement=judgement,
            outcome=outcome,
            attempts=attempt,
        )

    def _truth(self, numerics: str) -> Truth:
        """Returns what requests give without a fault."""
        outcome = self._run(None, numerics, "end", self._root / f"undisturbed-{numerics}")
        ends = outcome.front.requests if outcome.front is not None else []
        if outcome.front is None or not all(end.is_done for end in ends):
            words = [end.error for end in ends if end.error]
            why = outcome.front.failure if outcome.front is not None and outcome.front.failure else outcome.said
            raise ChaosError(f"the engine fails without a fault: {why or ' '.join(words) or 'no word of why'}")
        return {end.name: end for end in ends}

    def _run(self, scenario: Scenario | None, numerics: str, mode: str, folder: Path) -> EngineOutcome:
        options: dict[str, Any] = {
            "group_timeout_s": self.bounds.group_timeout_s,
            "threads_per_rank": 1,
            "kv_cache_bytes": _KV_CACHE_BYTES,
            "invariant": numerics == "invariant",
            "max_recoveries": _RECOVERIES if mode == "refork" else 0,
        }
        command = self._command
        plan = FrontPlan(scenario=scenario, model=self._model, tp=command.tp, pp=command.pp, options=options)
        folder.parent.mkdir(exist_ok=True)
        self._running.add(folder)
        try:
            return run_engine(plan, folder, command.start_limit_s + command.limit_s)
        finally:
            self._running.remove(folder)
