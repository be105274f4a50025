"""How ranks that share no memory tell each other their digests when one fails: through the store that they met at."""

from __future__ import annotations

import msgspec
from torch.distributed import Store

from launch.node.digests import RankDigests
from launch.node.progress_record import DigestKind


def leave_digests(store: Store, rank: int, digests: RankDigests) -> None:
    """Leaves a rank's digests for whoever looks for the one that is out of step.

    Raises:
        torch.distributed.DistError: The store is gone.
    """
    store.set(_key(rank), msgspec.json.encode(digests).decode())


def left_digests(store: Store, world_size: int) -> dict[int, RankDigests]:
    """Returns what ranks have left so far, by rank; it waits for none.

    Raises:
        torch.distributed.DistError: The store is gone.
    """
    present = [rank for rank in range(world_size) if store.check([_key(rank)])]
    decoder = msgspec.json.Decoder(dict[DigestKind, dict[int, int]])
    return {rank: decoder.decode(store.get(_key(rank))) for rank in present}


def _key(rank: int) -> str:
    return f"digests/{rank}"
