"""``lockstep chaos``: the cells of Lockstep's own engine, and the report on them."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from launch.bench.output import publish
from launch.chaos.engine.judge import Bounds, judge
from launch.chaos.engine.outcome import EngineOutcome, RequestEnd
from launch.chaos.engine.plan import FrontPlan
from launch.chaos.engine.report import CellReport, engine_report
from launch.chaos.engine.run import run_engine
from launch.chaos.engine.scenario import Scenario, engine_scenarios
from launch.chaos.engine.tiny_model import write_tiny_model
from launch.chaos.error import ChaosError
from launch.chaos.names import print_names
from launch.checks import check_engine
from launch.cli.parse import UsageError
from launch.exit_codes import ExitCode
from launch.options import ChaosCommand, EngineOptions
from launch.progress import progress_bar

_ATTEMPTS = 2
_LEAST_JOBS = 2
"""Ranks that start, stall or recover mostly wait: two cells of four ranks keep two cores busy."""
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
    """
    scenarios = engine_scenarios(command.matrix, tp=command.tp, pp=command.pp, only=command.only, seed=command.seed)
    if not scenarios:
        raise UsageError(f"--only {' '.join(command.only)}: no cell of the {command.matrix} matrix has such a name")
    if command.list_only:
        return print_names(scenario.name for scenario in scenarios)
    with tempfile.TemporaryDirectory(prefix="lockstep-chaos-") as name:
        runs = _Runs(command, Path(name))
        cells = runs.all(scenarios)
    report = engine_report(
        cells,
        model="a tiny random Llama" if command.model is None else command.model.name,
        tp=command.tp,
        pp=command.pp,
        matrix=command.matrix,
        seed=command.seed,
        bounds=runs.bounds,
    )
    publish(report, command.json_file)
    if command.plot_file is not None:
        command.plot_file.write_text(report.plot())
    return ExitCode.OK if report.all_well else ExitCode.CHAOS_FAILED


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
        timeout_s = command.group_timeout_s or _GROUP_TIMEOUT_S
        options = EngineOptions(model=self._model, tp=command.tp, pp=command.pp, group_timeout_s=timeout_s)
        check_engine(options)
        self.bounds = Bounds(group_timeout_s=timeout_s, stall_s=options.stall_timeout_s)

    def all(self, scenarios: Sequence[Scenario]) -> list[CellReport]:
        """Returns what became of every cell, as often as each is to be run; says on stderr at once what broke.

        Raises:
            ChaosError: The engine does not do its work undisturbed.
        """
        repeats = range(self._command.repeat)
        runs = [(scenario, f"{repeat}-{at}") for repeat in repeats for at, scenario in enumerate(scenarios)]
        cells: list[CellReport] = []
        ranks = self._command.tp * self._command.pp
        jobs = self._command.jobs or max(_LEAST_JOBS, len(os.sched_getaffinity(0)) // ranks)
        pool = ThreadPoolExecutor(jobs)
        with ExitStack() as stack:
            progress = stack.enter_context(progress_bar())
            # Whoever interrupts this waits for those cells only that are under way.
            stack.callback(pool.shutdown, cancel_futures=True)
            task = progress.add_task("chaos", total=len(runs), rate="undisturbed")
            numerics = sorted({scenario.numerics for scenario in scenarios})
            self._truths = dict(zip(numerics, pool.map(self._truth, numerics), strict=True))
            for cell in pool.map(lambda run: self._cell(run[0], self._root / run[1]), runs):
                progress.update(task, rate=cell.name)
                progress.advance(task)
                if not cell.judgement.is_kept:
                    print(f"lockstep: {cell.name}: {cell.what_broke()}", file=sys.stderr)
                cells.append(cell)
        return cells

    def _cell(self, scenario: Scenario, folder: Path) -> CellReport:
        truth = self._truths[scenario.numerics]
        for attempt in range(1, _ATTEMPTS + 1):
            outcome = self._run(scenario, scenario.numerics, scenario.mode, folder / str(attempt))
            rank = scenario.victim_rank(self._command.tp, self._command.pp)
            judgement = judge(scenario, outcome, truth, self.bounds, rank=rank)
            if judgement.happened:
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
        return run_engine(plan, folder, command.start_limit_s + command.limit_s)
