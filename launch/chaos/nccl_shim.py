"""Faults within NCCL itself: a library loaded before libnccl, built by this machine's compiler when asked for."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from launch.chaos.error import ChaosError
from launch.chaos.faults import Injection

SOURCE: Final = Path(__file__).with_name("nccl_shim.c")
ACTIONS: Final[Mapping[str, str]] = {"error": "error", "async_error": "async", "slow": "delay", "sleep": "hang"}
FUNCTIONS: Final[Mapping[str, str]] = {
    "all_reduce": "ncclAllReduce",
    "broadcast": "ncclBroadcast",
    "reduce": "ncclReduce",
    "all_gather": "ncclAllGather",
    "reduce_scatter": "ncclReduceScatter",
    "send": "ncclSend",
    "recv": "ncclRecv",
}
_REMOTE_ERROR = 6
_FLAGS = ("-shared", "-fPIC", "-O1", "-Wall", "-Werror")
_BUILD_S = 60.0


def compiler(environ: Mapping[str, str]) -> list[str]:
    """Returns the C compiler's command: ``CC``, else ``cc``, ``gcc`` or ``clang``.

    Raises:
        ChaosError: There is none.
    """
    asked = shlex.split(environ.get("CC", ""))
    names = [asked] if asked else [["cc"], ["gcc"], ["clang"]]
    for command in names:
        if shutil.which(command[0], path=environ.get("PATH")) is not None:
            return command
    raise ChaosError(f"--nccl-shim needs a C compiler: {' or '.join(command[0] for command in names)} is not there")


def build_shim(folder: Path, environ: Mapping[str, str]) -> Path:
    """Returns the library in ``folder``, built there unless it was before from the same source by the same compiler.

    Raises:
        ChaosError: It cannot be built.
    """
    command = compiler(environ)
    key = hashlib.sha256(SOURCE.read_bytes() + " ".join(command).encode()).hexdigest()[:16]
    library = folder / f"libnccl_faults-{key}.so"
    if library.exists():
        return library
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        part = Path(name) / library.name
        built = subprocess.run(
            [*command, *_FLAGS, "-o", str(part), str(SOURCE), "-ldl"],
            capture_output=True,
            text=True,
            timeout=_BUILD_S,
            check=False,
        )
        if built.returncode:
            lines = built.stderr.strip().splitlines() or ["no word of why"]
            raise ChaosError(f"--nccl-shim: {command[0]} cannot build it: {lines[0]}")
        part.rename(library)
    return library


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Returns where built libraries are kept."""
    base = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "lockstep"


def shim_environ(library: Path, injection: Injection, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that have a fault happen within NCCL.

    Args:
        library: What ``build_shim`` returned.
        injection: A fault of ``ACTIONS`` at a call of ``FUNCTIONS``, counted over all groups.
        environ: What is to be added to.
    """
    values = {"async_error": _REMOTE_ERROR, "error": _REMOTE_ERROR, "slow": round(1000 * injection.seconds)}
    action, function = ACTIONS[injection.action], FUNCTIONS[injection.call]
    value = values.get(injection.action, 0)
    loaded = [str(library), *filter(None, [environ.get("LD_PRELOAD")])]
    return {
        "LD_PRELOAD": os.pathsep.join(loaded),
        "LOCKSTEP_NCCL_FAULT": f"{injection.rank}:{function}:{injection.number}:{action}:{value}",
    }
