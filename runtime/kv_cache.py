"""Keys and values of the tokens already computed: the tensors of the KV pool, behind the interface attention uses.

A slot is the place of one token. Block b has the slots b · block_tokens and up. Which blocks a sequence has is the
replicated scheduler's to say; a pool knows no sequences.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

Runs = tuple[tuple[int, int], ...]
"""Slots in order, as runs of neighbours: (first slot, how many)."""


def cut_runs(runs: Runs, first: int) -> Runs:
    """Returns the slots of the tokens from position ``first`` on."""
    if first == 0:
        return runs
    rest = []
    for slot, length in runs:
        if length > first:
            rest.append((slot + first, length - first))
        first = max(first - length, 0)
    return tuple(rest)


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's tokens within a batch of T packed rows.

    Attributes:
        sequence_id: Which sequence.
        start: Its first row.
        length: How many rows it has.
        context_length: How many of its tokens came before; they are in the cache.
        runs: The slots of all its tokens, these included.
    """

    sequence_id: int
    start: int
    length: int
    context_length: int
    runs: Runs

    @property
    def stop(self) -> int:
        """The row after its last."""
        return self.start + self.length

    @property
    def total_length(self) -> int:
        """How many tokens the sequence has after this batch."""
        return self.context_length + self.length


class KVCache(Protocol):
    """Keys and values of a stage's layers, counted from 0 within the stage, for this rank's KV heads."""

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores a batch's keys and values, [T, kv_heads, head_dim] each, in ``slots``, [T] int64."""

    def read(self, layer: int, runs: Runs) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values, [1, kv_heads, slots of the runs, head_dim] each.

        They may be views that the next write changes.
        """

    def views(self, slot: int, length: int) -> tuple[torch.Tensor, ...]:
        """Returns what ``read`` would of one run, of all layers: keys of layer l at 2 l, its values behind them."""

    def pool(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns all keys and values of a layer, [slots, kv_heads, head_dim] each, contiguous; not to be written."""


class PagedKVCache:
    """The KV pool of one rank: for each layer a tensor of keys and one of values, which never move.

    Args:
        num_layers: Layers of this stage.
        num_kv_heads: KV heads of this rank.
        head_dim: Elements of a head.
        num_blocks: Blocks of the pool, the same on every rank.
        block_tokens: Tokens of a block.
        dtype: The model's dtype.
        device: The model's device.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        num_blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_tokens = block_tokens
        shape = (num_layers, 2, num_blocks * block_tokens, num_kv_heads, head_dim)
        pool = torch.empty(shape, dtype=dtype, device=device)
        self._blocks = pool.view(num_layers * 2, num_blocks, -1)
        self._all_by_head = pool.view(num_layers * 2, 1, -1, num_kv_heads, head_dim).transpose(2, 3)
        self._layers = [(keys, values) for keys, values in (layer.unbind(0) for layer in pool.unbind(0))]
        self._by_head = [
            (keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)) for keys, values in self._layers
        ]

    def views(self, slot: int, length: int) -> tuple[torch.Tensor, ...]:
        """Returns what ``read`` would of one run, of all layers: keys of layer l at 2 l, its values behind them."""
        return self._all_by_head.narrow(3, slot, length).unbind(0)

    def pool(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns all keys and values of a layer, [slots, kv_heads, head_dim] each, contiguous; not to be written."""
        return self._layers[layer]

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copies the contents of blocks, all layers of them, from the first to the second of each pair."""
        for source, target in pairs:
            self._blocks[:, target] = self._blocks[:, source]

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores a batch's keys and values, [T, kv_heads, head_dim] each, in ``slots``, [T] int64 on the device."""
        stored_keys, stored_values = self._layers[layer]
        stored_keys.index_copy_(0, slots, keys)
        stored_values.index_copy_(0, slots, values)

    def read(self, layer: int, runs: Runs) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values, [1, kv_heads, slots of the runs, head_dim] each: of one run views, else copies."""
        keys, values = self._by_head[layer]
        if len(runs) == 1:
            slot, length = runs[0]
            return keys.narrow(2, slot, length), values.narrow(2, slot, length)
        return (
            torch.cat([keys.narrow(2, slot, length) for slot, length in runs], dim=2),
            torch.cat([values.narrow(2, slot, length) for slot, length in runs], dim=2),
        )
