"""``lockstep chaos --script``: the cells of a user's script, one after the other, and the report on them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from launch.bench.output import publish
from launch.chaos.error import ChaosError
from launch.chaos.names import print_names
from launch.chaos.nccl_shim import build_shim
from launch.chaos.script.cells import ScriptCell, script_cells
from launch.chaos.script.outcome import ScriptCellReport, ScriptOutcome, judged
from launch.chaos.script.report import script_report
from launch.chaos.script.run import ScriptRun, run_script
from launch.cli.parse import UsageError
from launch.commands import ChaosCommand
from launch.exit_codes import ExitCode
from launch.node.rank_processes import SIGNALS, signals_held
from launch.progress import progress_bar
from tp.compiled_library import cache_folder

_ATTEMPTS = 3


def run_script_chaos(command: ChaosCommand) -> ExitCode:
    """Puts a script to its cells and prints what became of each; returns the exit code.

    Raises:
        ChaosError: The script does not run to its end undisturbed, or the shim cannot be built.
        UsageError: No cell has such a name.
        KeyboardInterrupt, Terminated: A signal came; what was finished is reported before.
    """
    run = ScriptRun(
        script=command.script or "",
        ranks=command.ranks,
        limit_s=command.limit_s,
        start_limit_s=command.start_limit_s,
        group_timeout_s=command.group_timeout_s,
        nccl_shim=build_shim(cache_folder(os.environ), os.environ) if command.nccl_shim else None,
    )
    with tempfile.TemporaryDirectory(prefix="lockstep-chaos-") as name:
        root = Path(name)
        undisturbed, calls = _undisturbed(run, root)
        cells = script_cells(calls, command.matrix, only=command.only, seed=command.seed)
        if not cells:
            raise UsageError(f"--only {' '.join(command.only)}: no cell of the {command.matrix} matrix has such a name")
        if command.list_only:
            return print_names(cell.name for cell in cells)
        reports: list[ScriptCellReport] = []
        try:
            with progress_bar() as progress:
                task = progress.add_task("chaos", total=len(cells) * command.repeat, rate="")
                for repeat in range(command.repeat):
                    for number, cell in enumerate(cells):
                        progress.update(task, rate=cell.name)
                        reports.append(_run_cell(run, root / f"{repeat}-{number}", cell, undisturbed))
                        progress.advance(task)
        except SIGNALS:
            with signals_held():
                publish(script_report(command, undisturbed, calls, reports, is_cut=True), command.json_file)
            raise
    report = script_report(command, undisturbed, calls, reports)
    publish(report, command.json_file)
    return ExitCode.OK if report.all_well else ExitCode.CHAOS_FAILED


def _run_cell(run: ScriptRun, folder: Path, cell: ScriptCell, undisturbed: ScriptOutcome) -> ScriptCellReport:
    """Returns what became of a cell; a run that failed before its fault, as one may by itself, is tried again."""
    for attempt in range(1, _ATTEMPTS + 1):
        outcome, _ = run_script(run, folder / str(attempt), cell.injection)
        if outcome.fired is not None:
            break
    return judged(cell.name, cell.injection, outcome, undisturbed, attempts=attempt)


def _undisturbed(run: ScriptRun, root: Path) -> tuple[ScriptOutcome, dict[int, dict[str, int]]]:
    """Returns what becomes of the script without a fault, and the calls that each rank makes."""
    outcome, words = run_script(run, root / "undisturbed", None)
    if outcome.exit_code is None:
        where = "; ".join(f"rank {end.rank} {end.how} {end.error or end.where}".strip() for end in outcome.ranks)
        raise ChaosError(f"{run.script} did not end in {run.start_limit_s:g} s without a fault: {where}")
    if outcome.exit_code or len(words) < run.ranks:
        said = next((end.error for end in outcome.ranks if end.error), "") or _tail(root / "undisturbed")
        raise ChaosError(f"{run.script} fails without a fault: {said}")
    calls = {rank: dict(word.calls) for rank, word in sorted(words.items())}
    if not any(calls.values()):
        raise ChaosError(f"{run.script} makes no call of torch.distributed that a fault could strike")
    return outcome, calls


def _tail(folder: Path) -> str:
    """Returns the last line that a rank or torchrun wrote."""
    logs = [*sorted((folder / "logs").rglob("stderr.log")), folder / "torchrun.log"]
    lines = [line for log in logs if log.exists() for line in log.read_text(errors="replace").splitlines() if line]
    return lines[-1] if lines else "no word of why"
