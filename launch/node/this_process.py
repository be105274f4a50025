"""This process as the system sees it: its name and threads (Linux only), and the program that it runs."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

_MAX_LENGTH = 15
_NO_CORE_BYTES = 1


def name_process(name: str) -> None:
    """Calls this process ``name``: what ``ps -o comm`` and ``top`` show, of which the kernel keeps 15 bytes.

    Call it from the main thread. A forked process keeps the name until it takes its own.
    """
    if sys.platform.startswith("linux"):
        Path("/proc/self/comm").write_text(name[:_MAX_LENGTH])


def has_threads() -> bool:
    """Whether this process has threads beside its main one, Python's or a library's: then it cannot be forked."""
    return len(list(Path("/proc/self/task").iterdir())) > 1


def leave_no_core_file() -> None:
    """Has the kernel end this process at once when it crashes, without writing its memory to a file first.

    While it is written the process is not gone, and nobody can take its place. One byte, less than any core file has,
    is the limit that also keeps one from a program that takes core files from the kernel: such a program gets them
    whatever the limit is, 0 included.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    soft = _NO_CORE_BYTES if hard == resource.RLIM_INFINITY else min(_NO_CORE_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


def become(command: list[str], environ: Mapping[str, str]) -> NoReturn:
    """Replaces this process by ``command``, a program's path and its arguments, with ``environ`` as its environment.

    Raises:
        OSError: The program cannot be run.
    """
    os.execve(command[0], command, environ)  # noqa: S606 - no shell is wanted
