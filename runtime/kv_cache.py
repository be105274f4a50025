"""Keys and values of the tokens already computed, behind the interface that attention uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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
        self._shape = (num_layers, 2, num_kv_heads)
        self._head_dim = head_dim
        self._dtype = dtype
        self._device = device
        self._buffers: dict[int, torch.Tensor] = {}

    def add(self, sequence_id: int, capacity_tokens: int) -> None:
        """Sets aside room for a sequence.

        Raises:
            KVCacheError: The sequence has room already.
        """
        if sequence_id in self._buffers:
            raise KVCacheError(f"sequence {sequence_id} is in the KV cache already")
        shape = (*self._shape, capacity_tokens, self._head_dim)
        self._buffers[sequence_id] = torch.empty(shape, dtype=self._dtype, device=self._device)

    def remove(self, sequence_id: int) -> None:
        """Frees a sequence's room.

        Raises:
            KVCacheError: The sequence has none.
        """
        if self._buffers.pop(sequence_id, None) is None:
            raise KVCacheError(f"sequence {sequence_id} is not in the KV cache")

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._buffers

    def __len__(self) -> int:
        return len(self._buffers)

    def write(self, layer: int, spans: Sequence[Span], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores a batch's keys and values, [T, kv_heads, head_dim] each, at each span's positions.

        Raises:
            KVCacheError: A sequence is not in the cache, or its room is too small.
        """
        for span in spans:
            buffer = self._buffer(span)[layer]
            rows = slice(span.context_length, span.total_length)
            buffer[0, :, rows] = keys[span.start : span.stop].transpose(0, 1)
            buffer[1, :, rows] = values[span.start : span.stop].transpose(0, 1)

    def read(self, layer: int, span: Span, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns views of keys and values, [kv_heads, total_length − first, head_dim], of positions from ``first`` on.

        Raises:
            KVCacheError: The sequence is not in the cache, or its room is too small.
        """
        buffer = self._buffer(span)[layer]
        return buffer[0, :, first : span.total_length], buffer[1, :, first : span.total_length]

    def _buffer(self, span: Span) -> torch.Tensor:
        buffer = self._buffers.get(span.sequence_id)
        if buffer is None:
            raise KVCacheError(f"sequence {span.sequence_id} is not in the KV cache")
        if span.total_length > buffer.shape[3]:
            raise KVCacheError(
                f"sequence {span.sequence_id} needs {span.total_length} positions, its room has {buffer.shape[3]}"
            )
        return buffer
