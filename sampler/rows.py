"""Tensors with one row per row of a batch, in buffers that keep their addresses while rows come and go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import torch

_MIN_ROWS = 16


def to_device(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns host values (numbers, or equally long lists of them) as a tensor on ``device``.

    To a CUDA device the copy starts from pinned memory and nobody waits for it; work queued later on the same stream
    sees the values.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


class RowTable:
    """A buffer of rows; its address changes only when more rows or wider ones are needed than it ever held.

    Args:
        values: [B] or [B, K], the first rows.
        fill: What fills up rows that are narrower than the table.
    """

    def __init__(self, values: torch.Tensor, *, fill: float = 0) -> None:
        self._fill = fill
        self._rows = 0
        self._buffer = values.new_full((0, *values.shape[1:]), fill)
        self.extend(values)

    @property
    def view(self) -> torch.Tensor:
        """The rows: [B] or [B, K], a view of the buffer."""
        return self._buffer[: self._rows]

    def filter(self, index: torch.Tensor) -> None:
        """Keeps the rows at the indices ``index`` ([N] int64, distinct), in that order.

        Raises:
            IndexError: An index is not a row.
        """
        kept = self.view[index]
        self._rows = len(index)
        self._buffer[: self._rows] = kept

    def extend(self, values: torch.Tensor) -> None:
        """Appends rows; narrower ones are filled up, and for wider ones the table grows."""
        if values.dim() > 1:
            self.widen(values.shape[1])
        rows = self._rows + len(values)
        if rows > len(self._buffer):
            capacity = max(_MIN_ROWS, 1 << (rows - 1).bit_length())
            self._replace(self._buffer.new_full((capacity, *self._buffer.shape[1:]), self._fill))
        added = self._buffer[self._rows : rows]
        if values.dim() > 1:
            added.fill_(self._fill)
            added = added[:, : values.shape[1]]
        added.copy_(values, non_blocking=True)
        self._rows = rows

    def widen(self, width: int) -> None:
        """Makes the rows at least ``width`` long."""
        if width > self._buffer.shape[1]:
            self._replace(self._buffer.new_full((len(self._buffer), width), self._fill))

    def _replace(self, buffer: torch.Tensor) -> None:
        place = tuple(slice(size) for size in self._buffer.shape)
        buffer[place] = self._buffer
        self._buffer = buffer


class AlignedRows:
    """Row tables that move together, each of them an attribute: a view of its buffer.

    Args:
        tables: The tables by the names of their attributes, all with as many rows.
    """

    def __init__(self, tables: Mapping[str, RowTable]) -> None:
        self._tables = dict(tables)
        self._publish()

    def filter(self, index: torch.Tensor) -> None:
        """Keeps the rows at the indices ``index`` ([N] int64, distinct), in that order.

        Raises:
            IndexError: An index is not a row.
        """
        for table in self._tables.values():
            table.filter(index)
        self._publish()

    def merge(self, other: Self) -> None:
        """Appends the rows of ``other``."""
        self.extend({name: getattr(other, name) for name in self._tables})

    def extend(self, values: Mapping[str, torch.Tensor]) -> None:
        """Appends rows to every table: [N] or [N, K] each, by the names of their attributes."""
        for name, table in self._tables.items():
            table.extend(values[name])
        self._publish()

    def widen(self, names: Sequence[str], width: int) -> None:
        """Makes the rows of some tables at least ``width`` long."""
        for name in names:
            self._tables[name].widen(width)
        self._publish()

    def _publish(self) -> None:
        for name, table in self._tables.items():
            setattr(self, name, table.view)
