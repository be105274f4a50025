"""The one packed gather of a step: what each rank found in its slice, merged alike on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sampler.group import SliceGroup
from sampler.slices import BlockParts, blocks_of

NON_FINITE = 1
PROCESSOR_FAILED = 2
_SHORT_RANGE = 1 << 16


@dataclass(frozen=True)
class SliceFacts:
    """What one rank found in its slice.

    Attributes:
        maxima: [B] float32, −inf where the row is bad here or all banned.
        largest_ids: [B] int64, the smallest id among the largest.
        faults: [B] int32, why the row cannot be drawn: 0, ``NON_FINITE``, ``PROCESSOR_FAILED``, or beyond these the
            mask's fault.
        block_maxima: [B, nb] float32, or None when every row is greedy.
        block_masses: [B, nb] float32, or None when no row needs its whole mass.
        values: [T, C] float32, the largest values of the truncated rows; None when there are none.
        ids: [T, C] int64, their ids.
        raw_masses: [B, nb] float32, block masses at temperature 1 for raw logprobs, or None; stays on its rank.
        parts: The largest values of the blocks' parts, for logprobs; None when no row asks. Stays on its rank.
    """

    maxima: torch.Tensor
    largest_ids: torch.Tensor
    faults: torch.Tensor
    block_maxima: torch.Tensor | None
    block_masses: torch.Tensor | None
    values: torch.Tensor | None
    ids: torch.Tensor | None
    raw_masses: torch.Tensor | None = None
    parts: BlockParts | None = None


@dataclass(frozen=True)
class Exchanged:
    """What every rank knows after the exchange.

    Attributes:
        facts: Of the whole vocabulary: 64 blocks, values descending, each row's gravest fault.
        fault_ranks: [B] int64, the lowest rank with that fault; −1 for a row without one.
        rider: [size, …] int32, what the ranks sent along; None when they sent nothing.
    """

    facts: SliceFacts
    fault_ranks: torch.Tensor
    rider: torch.Tensor | None


def exchange(
    group: SliceGroup, facts: SliceFacts, rider: torch.Tensor | None = None, *, block_length: int
) -> Exchanged:
    """Returns the facts of the whole vocabulary, the same bits at any tp_size.

    Every rank of the group calls it once a step. One all_gather; its size does not depend on the vocabulary.

    Args:
        group: The ranks.
        facts: Of this rank's slice.
        rider: An int32 table, of one shape on all ranks, to be gathered along.
        block_length: Ids of a canonical block.
    """
    pieces = [blocks_of(rank, group.size) for rank in range(group.size)]
    blocks = max(map(len, pieces))
    starts = torch.tensor([piece.start * block_length for piece in pieces], device=facts.maxima.device)
    narrow = blocks * block_length <= _SHORT_RANGE
    tables = [
        facts.maxima.view(torch.int32).unsqueeze(1),
        facts.largest_ids.to(torch.int32).unsqueeze(1),
        facts.faults.unsqueeze(1),
    ]
    for per_block in (facts.block_maxima, facts.block_masses):
        if per_block is not None:
            padded = torch.nn.functional.pad(per_block, (0, blocks - per_block.shape[1]))
            tables.append(padded.contiguous().view(torch.int32))
    if facts.values is not None and facts.ids is not None:
        columns = facts.ids - starts[group.rank]
        tables += [facts.values.contiguous().view(torch.int32), _packed(columns, narrow=narrow)]
    if rider is not None:
        tables.append(rider)
    gathered = group.all_gather(torch.cat([table.reshape(-1) for table in tables]))
    merged = _Reader(gathered, [table.shape for table in tables])
    maxima_by_rank = merged.floats().squeeze(-1)
    maxima = maxima_by_rank.amax(dim=0)
    # Ids ascend with the rank: the first rank with the largest value has the smallest id.
    holders = torch.where(maxima_by_rank == maxima, merged.integers().squeeze(-1), torch.iinfo(torch.int32).max)
    faults_by_rank = merged.integers().squeeze(-1)
    faults = faults_by_rank.amax(dim=0)
    whole = SliceFacts(
        maxima,
        holders.amin(dim=0).to(torch.int64),
        faults,
        in_block_order(merged.floats()) if facts.block_maxima is not None else None,
        in_block_order(merged.floats()) if facts.block_masses is not None else None,
        *(_largest(merged, starts, narrow=narrow) if facts.values is not None else (None, None)),
    )
    ranks = torch.arange(group.size, device=faults.device).unsqueeze(1)
    first = torch.where(faults_by_rank == faults, ranks, group.size).amin(dim=0)
    return Exchanged(whole, torch.where(faults > 0, first, -1), merged.integers() if rider is not None else None)


def in_block_order(gathered: torch.Tensor) -> torch.Tensor:
    """Returns the ranks' block figures in canonical order: [size, N, blocks of the largest slice] → [N, 64]."""
    size = gathered.shape[0]
    return torch.cat([gathered[rank, :, : len(blocks_of(rank, size))] for rank in range(size)], dim=1)


def _packed(columns: torch.Tensor, *, narrow: bool) -> torch.Tensor:
    """Returns columns of a slice as a table of int32, two to an element where they are ``narrow``: [T, C] int64."""
    if not narrow:
        return columns.to(torch.int32)
    even = torch.nn.functional.pad(columns, (0, columns.shape[1] % 2))
    return (even - _SHORT_RANGE // 2).to(torch.int16).view(torch.int32)


def _unpacked(packed: torch.Tensor, count: int, *, narrow: bool) -> torch.Tensor:
    """Returns the C columns that ``_packed`` made such tables of: [size, T, C] int64."""
    if not narrow:
        return packed.to(torch.int64)
    return packed.contiguous().view(torch.int16)[..., :count].to(torch.int64) + _SHORT_RANGE // 2


def _largest(merged: _Reader, starts: torch.Tensor, *, narrow: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the C largest of all ranks' candidates, descending, and their ids: [T, C] each.

    Args:
        merged: Where the values are next, and then the ids.
        starts: [size] int64, where the ranks' slices start.
        narrow: Whether 16 bits hold a column of a slice.
    """
    values = merged.floats()
    size, rows, count = values.shape
    ids = _unpacked(merged.integers(), count, narrow=narrow) + starts.view(size, 1, 1)
    top = values.transpose(0, 1).reshape(rows, size * count).topk(count, dim=1, sorted=True)
    return top.values, ids.transpose(0, 1).reshape(rows, size * count).gather(1, top.indices)


class _Reader:
    """Reads the tables of a packed gather in the order they were packed."""

    def __init__(self, gathered: torch.Tensor, shapes: list[torch.Size]) -> None:
        self._gathered = gathered
        self._shapes = iter(shapes)
        self._offset = 0

    def integers(self) -> torch.Tensor:
        """Returns the next table of all ranks: [size, *shape] int32."""
        shape = next(self._shapes)
        table = self._gathered[:, self._offset : self._offset + shape.numel()]
        self._offset += shape.numel()
        return table.reshape(self._gathered.shape[0], *shape)

    def floats(self) -> torch.Tensor:
        """Returns the next table of all ranks: [size, *shape] float32."""
        return self.integers().contiguous().view(torch.float32)
