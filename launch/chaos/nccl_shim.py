"""Faults within NCCL itself: a library loaded before libnccl, built by this machine's compiler when asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from launch.chaos.error import ChaosError
from launch.chaos.faults import Injection
from tp.compiled_library import BuildError, build_library

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


def build_shim(folder: Path, environ: Mapping[str, str]) -> Path:
    """Returns the library in ``folder``, built there unless it was before.

    Raises:
        ChaosError: It cannot be built.
    """
    try:
        return build_library(SOURCE, _FLAGS, ("-ldl",), folder, environ)
    except BuildError as error:
        raise ChaosError(f"--nccl-shim {error}") from error


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
