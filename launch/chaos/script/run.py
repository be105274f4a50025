"""Runs a user's script once under torchrun, with or without a fault, and sees how every rank of it ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from launch.chaos.faults import Injection
from launch.chaos.nccl_shim import ACTIONS, FUNCTIONS, shim_environ
from launch.chaos.processes import Deaths, end_processes
from launch.chaos.record import CellFolder
from launch.chaos.script.outcome import Ending, RankEnd, ScriptOutcome
from launch.chaos.script.words import GROUP_TIMEOUT, SCRIPT, LastWord, innermost_frame, last_words
from launch.environment import CHAOS_FOLDER, with_import_path, without_rank_variables

_POLL_S = 0.02
_ROOT_CAUSE = re.compile(r"Root Cause.*?rank\s*:\s*(\d+)", re.DOTALL)


class ScriptRun(msgspec.Struct, frozen=True, kw_only=True):
    """How a script is run.

    Args:
        script: ``module:function``.
        ranks: How many.
        limit_s: How long ranks may take to leave once the fault happened.
        start_limit_s: How long they may take until it happens, or to the end where there is none.
        group_timeout_s: The time-out of every process group; None = the script's own.
        nccl_shim: Where faults that NCCL itself can have happen; None = in the backend around it, like all others.
    """

    script: str
    ranks: int
    limit_s: float
    start_limit_s: float
    group_timeout_s: float | None
    nccl_shim: Path | None = None

    def shim_variables(self, injection: Injection | None) -> dict[str, str]:
        """Returns what has a fault happen within NCCL; nothing where it happens elsewhere."""
        if self.nccl_shim is None or injection is None:
            return {}
        if injection.action not in ACTIONS or injection.call not in FUNCTIONS:
            return {}
        return shim_environ(self.nccl_shim, injection, os.environ)


def run_script(run: ScriptRun, path: Path, injection: Injection | None) -> tuple[ScriptOutcome, dict[int, LastWord]]:
    """Returns what became of a run and what its ranks said last; none of its processes is left.

    Args:
        run: How.
        path: The cell's folder, which is made.
        injection: The fault; None = an undisturbed run.
    """
    variables = run.shim_variables(injection)
    folder = CellFolder.create(path, () if injection is None or variables else (injection,), armed=True)
    began_s = time.monotonic()
    with (path / "torchrun.log").open("wb") as log:
        agent = subprocess.Popen(
            _command(run, path), env=_environ(run, folder) | variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    deaths = Deaths()
    try:
        exit_code = _watch(agent, run, folder, deaths)
        ended_s = time.monotonic()
        places = {rank: folder.place_of(rank) for rank in range(run.ranks)}
    finally:
        end_processes(path)
        agent.wait()
        deaths.close()
    fired = next(iter(folder.fired()), None)
    words = last_words(folder)
    blamed = _ROOT_CAUSE.search((path / "torchrun.log").read_text(errors="replace"))
    ends = [_end(rank, folder, words.get(rank), deaths, places[rank]) for rank in range(run.ranks)]
    outcome = ScriptOutcome(
        fired=fired,
        exit_code=exit_code,
        ended_s=None if fired is None or exit_code is None else ended_s - fired.t_s,
        blamed=None if blamed is None else int(blamed[1]),
        ranks=ends if fired is None else [_since(end, fired.t_s) for end in ends],
        wall_s=ended_s - began_s,
    )
    return outcome, words


def _command(run: ScriptRun, path: Path) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(run.ranks)]
    return [*torchrun, "--log-dir", str(path / "logs"), "--redirects", "3", "-m", "launch.chaos.script.worker"]


def _environ(run: ScriptRun, folder: CellFolder) -> dict[str, str]:
    environ = with_import_path(without_rank_variables(os.environ))
    environ["PYTHONPATH"] = os.pathsep.join([str(Path.cwd()), environ["PYTHONPATH"]])
    ours = {CHAOS_FOLDER: str(folder.path), SCRIPT: run.script, "TMPDIR": str(folder.temporary)}
    if run.group_timeout_s is not None:
        ours[GROUP_TIMEOUT] = str(run.group_timeout_s)
    return {"OMP_NUM_THREADS": "1"} | environ | ours


def _watch(agent: subprocess.Popen[bytes], run: ScriptRun, folder: CellFolder, deaths: Deaths) -> int | None:
    """Returns torchrun's exit code, or None when the time is over."""
    deadline_s = time.monotonic() + run.start_limit_s
    fired = False
    while (code := agent.poll()) is None and time.monotonic() < deadline_s:
        for rank in range(run.ranks):
            pid = folder.pid_of(rank)
            if pid is not None:
                deaths.watch(pid)
        deaths.wait(_POLL_S)
        if not fired and folder.fired():
            fired = True
            deadline_s = time.monotonic() + run.limit_s
    deaths.wait(0)
    return code


def _end(rank: int, folder: CellFolder, word: LastWord | None, deaths: Deaths, place: str) -> RankEnd:
    """Returns how a rank ended, and when by the system's monotonic clock."""
    if word is not None:
        error = f"{word.error}: {word.text}" if word.how == "raised" else ""
        return RankEnd(rank=rank, how=word.how, after_s=word.t_s, error=error, where=place, result=word.result)
    pid = folder.pid_of(rank)
    died_s = deaths.at_s.get(pid) if pid is not None else None
    frame = innermost_frame(folder, rank)
    how: Ending = "waiting" if died_s is None else "killed" if frame else "gone"
    return RankEnd(rank=rank, how=how, after_s=died_s, where=frame or place)


def _since(end: RankEnd, fault_s: float) -> RankEnd:
    """Returns how a rank ended, its time counted from the fault."""
    after_s = None if end.after_s is None else max(0.0, end.after_s - fault_s)
    return msgspec.structs.replace(end, after_s=after_s)
