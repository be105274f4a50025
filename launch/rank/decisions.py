"""What the first ranks of a run decided by measuring: it holds for those of later epochs, whatever they would measure.

A stream that goes on after a recovery must be computed as it began, and what fitted into memory must fit again.
"""

from __future__ import annotations

import msgspec
import torch
from torch.distributed import Store

from launch.environment import RankEnvironment
from launch.rank.compute_choice import ComputeChoice
from launch.rank.start_barrier import StartError
from tp.products import ProductMode

_KEY = "decisions"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Decisions(msgspec.Struct, frozen=True):
    """What depends on a measurement.

    Args:
        dtype: Of weights, hidden states and KV cache, without ``torch.``.
        products: How products with weights are computed.
        why: Half a line on both for a person.
        kv_blocks: Blocks of the KV pool of every rank.
    """

    dtype: str
    products: str
    why: str
    kv_blocks: int

    @classmethod
    def of(cls, compute: ComputeChoice, kv_blocks: int) -> Decisions:
        """Returns what was decided in a form that can be stored."""
        return cls(str(compute.dtype).removeprefix("torch."), compute.products, compute.why, kv_blocks)

    def compute(self) -> ComputeChoice:
        """Returns how the run computes."""
        return ComputeChoice(_DTYPES[self.dtype], ProductMode(self.products), self.why)


def recall_decisions(store: Store, environment: RankEnvironment) -> Decisions | None:
    """Returns what epoch 0 decided; None in epoch 0, which is to decide.

    Args:
        store: Shared by all epochs of the attempt.
        environment: What torchrun says.

    Raises:
        StartError: Epoch 0 decided nothing, so that it never came up.
    """
    if environment.epoch == 0:
        return None
    if not store.check([_KEY]):
        raise StartError(f"epoch {environment.epoch} finds nothing that epoch 0 decided")
    return msgspec.json.decode(store.get(_KEY), type=Decisions)


def keep_decisions(store: Store, environment: RankEnvironment, decisions: Decisions) -> None:
    """Leaves what epoch 0 decided to later ones; every rank may call it, before the ranks meet for the last time."""
    if environment.rank == 0 and environment.epoch == 0:
        store.set(_KEY, msgspec.json.encode(decisions).decode())
