"""The processes of a cell, found by the mark in their environment, and what they leave behind (Linux only)."""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from launch.environment import CHAOS_FOLDER

_POLL_S = 0.02


def marked_processes(folder: Path) -> dict[int, str]:
    """Returns the living processes of the cell in ``folder``, however they are related now, as pid → name."""
    mark = f"{CHAOS_FOLDER}={folder}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        with suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0") and not _is_zombie(entry):
                found[int(entry.name)] = (entry / "comm").read_text().strip()
    return found


def processes_named(folder: Path, name: str) -> list[int]:
    """Returns the processes of a cell of one name, the eldest first."""
    return sorted(pid for pid, own in marked_processes(folder).items() if own == name)


def end_processes(folder: Path, within_s: float = 5.0) -> list[str]:
    """Kills what is left of a cell; returns the names of what there was."""
    left: dict[int, str] = {}
    deadline_s = time.monotonic() + within_s
    while alive := marked_processes(folder):
        left |= alive
        for pid in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() >= deadline_s:
            break
        time.sleep(_POLL_S)
    return sorted(left.values())


def _is_zombie(entry: Path) -> bool:
    return (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"


class Deaths:
    """When processes that are not this one's children end."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._files: dict[int, int] = {}
        self.at_s: dict[int, float] = {}

    def watch(self, pid: int) -> None:
        """Begins to watch a process; one that is gone already ended now."""
        if pid in self._files.values() or pid in self.at_s:
            return
        try:
            file = os.pidfd_open(pid)
        except ProcessLookupError:
            self.at_s[pid] = time.monotonic()
            return
        self._files[file] = pid
        self._poll.register(file, select.POLLIN)

    def wait(self, timeout_s: float) -> None:
        """Waits until one ends, at most so long."""
        for file, _ in self._poll.poll(1000 * timeout_s):
            self.at_s[self._files.pop(file)] = time.monotonic()
            self._poll.unregister(file)
            os.close(file)

    def close(self) -> None:
        """Stops watching."""
        for file in self._files:
            os.close(file)
        self._files.clear()


class Leftovers(msgspec.Struct, frozen=True, kw_only=True):
    """What was still there when a cell was over.

    Args:
        processes: Names of processes, ended since.
        files: Sockets and files in its temporary folder.
        shared_memory: Segments that were not there before.
    """

    processes: list[str]
    files: list[str]
    shared_memory: list[str]

    @property
    def any(self) -> bool:
        """Whether there was anything."""
        return bool(self.processes or self.files or self.shared_memory)


def shared_memory() -> set[str]:
    """Returns the segments of shared memory of this machine."""
    folder = Path("/dev/shm")  # noqa: S108 - it is only listed
    return {entry.name for entry in folder.iterdir()} if folder.exists() else set()


def leftovers(folder: Path, temporary: Path, memory_before: set[str], grace_s: float) -> Leftovers:
    """Returns what is left of a cell after ``grace_s``, and ends its processes.

    Shared memory of other programs that came meanwhile counts only while it carries a name of ours.
    """
    deadline_s = time.monotonic() + grace_s
    while marked_processes(folder) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    processes = end_processes(folder)
    files = sorted(str(path.relative_to(temporary)) for path in temporary.rglob("*"))
    grown = sorted(name for name in shared_memory() - memory_before if "lockstep" in name)
    return Leftovers(processes=processes, files=files, shared_memory=grown)
