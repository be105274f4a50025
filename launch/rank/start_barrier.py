"""Where ranks meet before they communicate: a rank that does not come is named, not waited for without end."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from launch.environment import RankEnvironment

# The store's own wait would write to the terminal of a rank that does not come. A pause is a fifth of the wait so far.
_FIRST_PAUSE_S = 0.001
_PAUSE_GROWTH = 1.2
_LAST_PAUSE_S = 0.05


class StartError(RuntimeError):
    """The ranks did not come up."""


def connect_store(environment: RankEnvironment, timeout_s: float) -> Store:
    """Returns the store that all ranks of this attempt share, those of later epochs too.

    Each attempt uses a prefix of its own: the agent's store survives a restart with the old ranks' addresses.

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
    return PrefixStore(f"lockstep/attempt-{environment.attempt}", store)


def epoch_store(store: Store, environment: RankEnvironment) -> Store:
    """Returns the part of the attempt's store that only the ranks of this epoch share."""
    return PrefixStore(f"epoch-{environment.epoch}", store)


def meet(
    store: Store, name: str, environment: RankEnvironment, timeout_s: float, beat: Callable[[], None] | None = None
) -> None:
    """Returns when every rank has called this with the same ``name``.

    Args:
        store: Shared by them.
        name: Of the place.
        environment: What torchrun says.
        timeout_s: How long others may take.
        beat: Called again and again meanwhile, by a rank that must show that it is alive.

    Raises:
        StartError: Some did not in ``timeout_s``; they are named.
    """
    keys = {rank: f"{name}/{rank}" for rank in range(environment.world_size)}
    missing = list(keys)
    deadline_s = time.monotonic() + timeout_s
    pause_s = _FIRST_PAUSE_S
    try:
        store.set(keys[environment.rank], "1")
        while missing:
            if store.check([keys[missing[0]]]):
                del missing[0]
            elif time.monotonic() > deadline_s:
                missing = [rank for rank in missing if not store.check([keys[rank]])]
                raise StartError(f"ranks {missing} did not reach '{name}' in {timeout_s:g} s")
            else:
                if beat is not None:
                    beat()
                time.sleep(pause_s)
                pause_s = min(pause_s * _PAUSE_GROWTH, _LAST_PAUSE_S)
    except dist.DistError as error:
        raise StartError(
            f"rank {environment.rank} lost the store while waiting for ranks {missing} at '{name}': {error}"
        ) from error
