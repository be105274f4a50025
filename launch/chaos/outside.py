"""Faults from outside: signals to the processes of an engine, and load on the machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from launch.chaos.faults import Action
from launch.chaos.processes import marked_processes, processes_named
from launch.chaos.record import CellFolder
from launch.environment import ZYGOTE_SOCKET

_AGENT = "pt_elastic"
_PAUSE_S = 1.0
_POLL_S = 0.01
_BUSY = "import time\nend = time.monotonic() + {seconds}\nwhile time.monotonic() < end:\n    pass"
_SIGNALS = {
    "kill": signal.SIGKILL,
    "segv": signal.SIGSEGV,
    "stop": signal.SIGSTOP,
    "sigterm": signal.SIGTERM,
    "sigint": signal.SIGINT,
    "store_dead": signal.SIGKILL,
    "store_slow": signal.SIGSTOP,
}


class NoVictimError(RuntimeError):
    """The process that a fault was for is not there."""


def find_process(folder: CellFolder, victim: str, rank: int | None, *, not_pid: int = 0, within_s: float = 60.0) -> int:
    """Returns the process id of a victim, once there is one.

    Args:
        folder: The cell's.
        victim: ``zygote``, ``supervisor``, ``agent``, ``front`` (this process), or a rank's role.
        rank: Which rank, where it is one.
        not_pid: A process that had the place before, and is not meant.
        within_s: How long to look for it.

    Raises:
        NoVictimError: There is none in time.
    """
    if victim == "front":
        return os.getpid()
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        if victim == "supervisor":
            found = _supervisors(folder.path)
        else:
            name = {"zygote": "lockstep zygote", "agent": _AGENT}.get(victim, f"lockstep r{rank}")
            found = processes_named(folder.path, name)
        others = [pid for pid in found if pid != not_pid]
        if others:
            return others[0]
        time.sleep(_POLL_S)
    raise NoVictimError(f"there is no process of the {victim} in {within_s:g} s")


def strike(folder: CellFolder, action: Action, pid: int, *, rank: int = -1) -> None:
    """Has a fault befall a process, and notes it.

    Args:
        folder: The cell's.
        action: What.
        pid: To whom.
        rank: Which rank that is.
    """
    if action == "load":
        folder.note(action, "all cores", rank=rank)
        cores = len(os.sched_getaffinity(0))
        busy = [subprocess.Popen([sys.executable, "-c", _BUSY.format(seconds=_PAUSE_S)]) for _ in range(cores)]
        for process in busy:
            process.wait()
        return
    if action == "none":
        return
    folder.note(action, f"process {pid}", rank=rank)
    os.kill(pid, _SIGNALS[action])
    if action == "store_slow":
        time.sleep(_PAUSE_S)
        os.kill(pid, signal.SIGCONT)


def _supervisors(folder: Path) -> list[int]:
    """Returns the processes between the agent and ranks: torchrun's children that were told of a zygote."""
    found = []
    for pid in marked_processes(folder):
        try:
            names = {entry.partition(b"=")[0] for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")}
        except OSError:
            continue
        if {b"RANK", ZYGOTE_SOCKET.encode()} <= names:
            found.append(pid)
    return sorted(found)
