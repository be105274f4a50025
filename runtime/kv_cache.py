"""Keys and values of the tokens already computed, behind the interface that attention uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch


class KVCacheError(RuntimeError):
    """A sequence is not in the cache, is in it already, or outgrew what was set aside for it."""


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's tokens within a batch of T packed rows.

    Attributes:
        sequence_id: Which sequence.
        start: Its first row.
        length: How many rows it has.
        context_length: How many of its tokens came before; they are in the cache.
    """

    sequence_id: int
    start: int
    length: int
    context_length: int

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

    def write(self, layer: int, spans: Sequence[Span], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores a batch's keys and values, [T, kv_heads, head_dim] each, at each span's positions."""

    def read(self, layer: int, span: Span, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values, [kv_heads, total_length − first, head_dim] each, of positions ``first`` and later.

        They may be views that the next write changes.
        """


class SequenceKVCache:
    """A KV cache with one contiguous buffer a sequence, set aside when the sequence is admitted.

    Args:
        num_layers: Layers of this stage.
        num_kv_heads: KV heads of this rank.
        head_dim: Elements of a head.
        dtype: The model's dtype.
        device: The model's device.
    """

    def __init__(
        self, num_layers: int, num_kv_heads: int, head_dim: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._num_layers = num_layers
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        self._dtype = dtype
        self._device = device
        self._rooms: dict[int, _Room] = {}

    def add(self, sequence_id: int, capacity_tokens: int) -> None:
        """Sets aside room for a sequence.

        Raises:
            KVCacheError: The sequence has room already.
        """
        if sequence_id in self._rooms:
            raise KVCacheError(f"sequence {sequence_id} is in the KV cache already")
        shape = (self._num_layers, 2, self._num_kv_heads, capacity_tokens, self._head_dim)
        buffer = torch.empty(shape, dtype=self._dtype, device=self._device)
        layers = [(keys, values) for keys, values in (layer.unbind(0) for layer in buffer.unbind(0))]
        self._rooms[sequence_id] = _Room(capacity_tokens, layers)

    def copy(self, source_id: int, target_id: int, length: int) -> None:
        """Copies the first ``length`` positions of one sequence to another, which has room for them.

        Raises:
            KVCacheError: One of them is not in the cache, or its room is too small.
        """
        source, target = (self._room(Span(sequence_id, 0, length, 0)) for sequence_id in (source_id, target_id))
        for stored, copied in zip(source.layers, target.layers, strict=True):
            for kept, new in zip(stored, copied, strict=True):
                new.narrow(1, 0, length).copy_(kept.narrow(1, 0, length))

    def remove(self, sequence_id: int) -> None:
        """Frees a sequence's room.

        Raises:
            KVCacheError: The sequence has none.
        """
        if self._rooms.pop(sequence_id, None) is None:
            raise KVCacheError(f"sequence {sequence_id} is not in the KV cache")

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._rooms

    def __len__(self) -> int:
        return len(self._rooms)

    def write(self, layer: int, spans: Sequence[Span], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores a batch's keys and values, [T, kv_heads, head_dim] each, at each span's positions.

        Raises:
            KVCacheError: A sequence is not in the cache, or its room is too small.
        """
        keys, values = keys.transpose(0, 1), values.transpose(0, 1)
        for span in spans:
            stored_keys, stored_values = self._room(span).layers[layer]
            at, length = span.context_length, span.length
            stored_keys.narrow(1, at, length).copy_(keys.narrow(1, span.start, length))
            stored_values.narrow(1, at, length).copy_(values.narrow(1, span.start, length))

    def read(self, layer: int, span: Span, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns views of keys and values, [kv_heads, total_length − first, head_dim], of positions from ``first`` on.

        Raises:
            KVCacheError: The sequence is not in the cache, or its room is too small.
        """
        keys, values = self._room(span).layers[layer]
        length = span.total_length - first
        return keys.narrow(1, first, length), values.narrow(1, first, length)

    def _room(self, span: Span) -> _Room:
        room = self._rooms.get(span.sequence_id)
        if room is None:
            raise KVCacheError(f"sequence {span.sequence_id} is not in the KV cache")
        if span.total_length > room.capacity_tokens:
            raise KVCacheError(
                f"sequence {span.sequence_id} needs {span.total_length} positions, its room has {room.capacity_tokens}"
            )
        return room


class _Room(NamedTuple):
    """One sequence's buffers: keys and values by layer, [kv_heads, capacity_tokens, head_dim] each."""

    capacity_tokens: int
    layers: list[tuple[torch.Tensor, torch.Tensor]]
