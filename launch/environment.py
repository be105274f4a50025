"""The environment variables Lockstep reads and sets, in one place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

RUN_FOLDER = "LOCKSTEP_RUN_FOLDER"
"""Set by the front side for the ranks it started: where socket, logs and failure reports are."""

FRONT_ENDPOINT = "LOCKSTEP_FRONT_ENDPOINT"
"""Set by a leader that torchrun started for the front side it starts itself: where to bind."""

FRONT_PID = "LOCKSTEP_FRONT_PID"
"""Set by the front side for the agent it starts: whose child it must be."""

AGENT_PID = "LOCKSTEP_AGENT_PID"
"""Set by the agent for its ranks: whose child they must be."""

ZYGOTE_SOCKET = "LOCKSTEP_ZYGOTE_SOCKET"
"""Set by the agent for the processes it starts: where its zygote forks their ranks."""

RECOVERY = "LOCKSTEP_RECOVERY"
"""Set by the front side for the ranks of an engine: how they are watched and recovered."""

EPOCH = "LOCKSTEP_EPOCH"
"""Set by the zygote for the ranks it forks: how often all ranks of the run were forked anew before."""

API_KEY = "LOCKSTEP_API_KEY"
"""The key that clients of ``lockstep serve`` must give, where no file names any."""

CORE_FILES = "LOCKSTEP_CORE_FILES"
"""``1``: ranks that crash leave core files, as far as the system's limits let them."""

CHAOS_FOLDER = "LOCKSTEP_CHAOS_FOLDER"
"""Set by ``lockstep chaos`` for the processes of a cell: where faults to come and faults that happened are told."""

_EPOCH_BITS = 20
_RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"


class RankEnvironmentError(ValueError):
    """An environment variable that torchrun sets is missing or wrong."""


@dataclass(frozen=True)
class RankEnvironment:
    """What torchrun tells a rank.

    Args:
        rank: Global rank.
        world_size: All ranks of all nodes.
        local_rank: Rank within this node.
        local_world_size: Ranks on this node.
        master_address: Where the store is.
        master_port: Its port.
        agent_has_store: Whether torchrun's agent keeps the store.
        attempt: How often torchrun restarted the ranks.
        run_folder: The front side's folder; None when torchrun was started by hand.
        epoch: How often all ranks were forked anew in this attempt.
        chaos_folder: Where faults that this rank is to suffer are told; None = there are none.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_address: str
    master_port: int
    agent_has_store: bool
    attempt: int
    run_folder: Path | None
    epoch: int = 0
    chaos_folder: Path | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> RankEnvironment:
        """Returns what ``environ`` says.

        Raises:
            RankEnvironmentError: A variable is missing or no number.
        """
        return cls(
            rank=_number(environ, "RANK"),
            world_size=_number(environ, "WORLD_SIZE"),
            local_rank=_number(environ, "LOCAL_RANK"),
            local_world_size=_number(environ, "LOCAL_WORLD_SIZE"),
            master_address=environ.get("MASTER_ADDR", "127.0.0.1"),
            master_port=_number(environ, "MASTER_PORT"),
            agent_has_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=_number(environ, _RESTART_COUNT) if _RESTART_COUNT in environ else 0,
            run_folder=Path(environ[RUN_FOLDER]) if RUN_FOLDER in environ else None,
            epoch=_number(environ, EPOCH) if EPOCH in environ else 0,
            chaos_folder=Path(environ[CHAOS_FOLDER]) if CHAOS_FOLDER in environ else None,
        )

    @property
    def epoch_of_run(self) -> int:
        """A number larger than that of every epoch before, those of earlier attempts among them."""
        return self.attempt << _EPOCH_BITS | self.epoch


def without_rank_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns ``environ`` without what torchrun set, for a child that is no rank."""
    ours = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE"}
    return {
        name: value
        for name, value in environ.items()
        if name not in ours and not name.startswith(("TORCHELASTIC_", "MASTER_", "GROUP_WORLD"))
    }


def with_import_path(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns ``environ`` with this project first on the import path, so that children find it from any folder."""
    root = str(Path(__file__).resolve().parent.parent)
    old = environ.get("PYTHONPATH", "")
    return {**environ, "PYTHONPATH": os.pathsep.join([root, old] if old else [root])}


def _number(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name)
    if value is None or not (value.isascii() and value.isdecimal()):
        raise RankEnvironmentError(f"{name} is {value!r}: a number is needed (start ranks with torchrun)")
    return int(value)
