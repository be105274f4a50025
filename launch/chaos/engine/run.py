"""Runs one cell of the engine in processes of its own, and sees what is left of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from launch.chaos.engine.outcome import EngineOutcome, FrontOutcome
from launch.chaos.engine.plan import FrontPlan, write_plan
from launch.chaos.load import load_factor
from launch.chaos.processes import end_processes, leftovers, marked_processes, shared_memory
from launch.chaos.record import CellFolder
from launch.environment import CHAOS_FOLDER, with_import_path, without_rank_variables

_POLL_S = 0.02
_GRACE_S = 5.0


def run_engine(plan: FrontPlan, path: Path, limit_s: float) -> EngineOutcome:
    """Returns what was seen of a run; none of its processes is left.

    Args:
        plan: What its front side does.
        path: The cell's folder, which is made.
        limit_s: How long the whole run may take.
    """
    scenario = plan.scenario
    injections = () if scenario is None else scenario.injections(plan.tp, plan.pp)
    folder = CellFolder.create(path, injections, armed=False)
    write_plan(path, plan)
    load = load_factor(plan.tp * plan.pp)
    memory, began_s = shared_memory(), time.monotonic()
    with (path / "front.log").open("wb") as log:
        front = subprocess.Popen(
            [sys.executable, "-m", "launch.chaos.engine.front", str(path)],
            env=_environ(folder),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        exit_code = front.wait(limit_s)
    except subprocess.TimeoutExpired:
        exit_code = None
    left_s = time.monotonic() + _GRACE_S * load
    while exit_code is not None and marked_processes(path) and time.monotonic() < left_s:
        time.sleep(_POLL_S)
    gone_s = None if exit_code is None or marked_processes(path) else time.monotonic()
    left = leftovers(path, folder.temporary, memory, 0.0)
    end_processes(path)
    front.wait()
    file = path / "outcome.json"
    lines = [line for line in (path / "front.log").read_text(errors="replace").splitlines() if line]
    return EngineOutcome(
        front=msgspec.json.decode(file.read_bytes(), type=FrontOutcome) if file.exists() else None,
        fired=folder.fired(),
        exit_code=exit_code,
        gone_s=gone_s,
        left=left,
        load=max(load, load_factor(plan.tp * plan.pp)),
        wall_s=time.monotonic() - began_s,
        said=lines[-1] if lines else "",
    )


def _environ(folder: CellFolder) -> dict[str, str]:
    environ = with_import_path(without_rank_variables(os.environ))
    return environ | {CHAOS_FOLDER: str(folder.path), "TMPDIR": str(folder.temporary)}
