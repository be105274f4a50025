"""Where ranks meet before they communicate: a rank that does not come is named, not waited for without end."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from launch.environment import RankEnvironment

_POLL_S = 0.05


class StartError(RuntimeError):
    """The ranks did not come up."""


def connect_store(environment: RankEnvironment, timeout_s: float) -> Store:
    """Returns the store that all ranks of this attempt and epoch share.

    Each uses a prefix of its own: the agent's store survives a restart with the old ranks' addresses.

    Raises:
        StartError: The store cannot be reached.
    """
    is_master = environment.rank == 0 and not environment.agent_has_store
    try:
        store = TCPStore(
            environment.master_address,
            environment.master_port,
            is_master=is_master,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )
    except dist.DistError as error:
        where = f"{environment.master_address}:{environment.master_port}"
        raise StartError(f"rank {environment.rank} cannot reach the store at {where}: {error}") from error
    return PrefixStore(f"lockstep/attempt-{environment.attempt}/epoch-{environment.epoch}", store)


def meet(store: Store, name: str, environment: RankEnvironment, timeout_s: float) -> None:
    """Returns when every rank has called this with the same ``name``.

    Raises:
        StartError: Some did not in ``timeout_s``; they are named.
    """
    keys = {rank: f"{name}/{rank}" for rank in range(environment.world_size)}
    missing = set(keys)
    deadline_s = time.monotonic() + timeout_s
    try:
        store.set(keys[environment.rank], "1")
        while missing := {rank for rank in missing if not store.check([keys[rank]])}:
            if time.monotonic() > deadline_s:
                raise StartError(f"ranks {sorted(missing)} did not reach '{name}' in {timeout_s:g} s")
            time.sleep(_POLL_S)
    except dist.DistError as error:
        raise StartError(
            f"rank {environment.rank} lost the store while waiting for ranks {sorted(missing)} at '{name}': {error}"
        ) from error
