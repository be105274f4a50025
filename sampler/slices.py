"""What a rank finds out about its own vocabulary slice: block maxima, block masses, largest values.

A vocabulary has 64 canonical blocks, whatever the number of ranks. Every figure of a block is computed from that block
alone in one fixed order, so its bits do not depend on tp_size, batch size, row or thread count. Maxima are exact, and
masses are relative to their own block's maximum, so no figure depends on what another rank holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

VOCABULARY_BLOCKS = 64
GROUP_LENGTH = 32
_NONE = float("-inf")
_SMALLEST_EXPONENT = -87.0
_LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class BlockParts:
    """The largest value of each part of the blocks of N rows.

    Attributes:
        maxima: [N, nb, P] float32.
        lanes: Whether a part is every 32nd id of its block, from ``lane_maxima``, or a run of 32, from
            ``group_maxima``.
    """

    maxima: torch.Tensor
    lanes: bool

    def take(self, index: torch.Tensor) -> BlockParts:
        """Returns the parts of some rows."""
        return BlockParts(self.maxima[index], self.lanes)

    def in_blocks(self, block: torch.Tensor) -> torch.Tensor:
        """Returns the largest values of the parts of some blocks of each row: [N, K · P] float32 from [N, K] int64."""
        rows, blocks, count = self.maxima.shape
        place = block + torch.arange(rows, device=block.device).unsqueeze(1) * blocks
        return self.maxima.view(-1, count).index_select(0, place.view(-1)).view(rows, -1)

    def columns(self, block: torch.Tensor, part: torch.Tensor, block_length: int) -> torch.Tensor:
        """Returns the columns of some parts of each row: [N, K · ids of a part] int64 from [N, K] int64 each."""
        count = self.maxima.shape[2]
        length = block_length // count
        between_parts, between_ids = (1, count) if self.lanes else (length, 1)
        first = block * block_length + part * between_parts
        ids = torch.arange(length, device=block.device) * between_ids
        return (first.unsqueeze(-1) + ids).view(len(block), -1)


@dataclass(frozen=True)
class SliceShape:
    """Where a rank's slice lies.

    Attributes:
        start: Id of the first column.
        first_block: Index of the first of its canonical blocks.
        blocks: How many blocks it has.
        block_length: Ids of a block, a multiple of 32.
        valid_size: How many columns are no padding.
    """

    start: int
    first_block: int
    blocks: int
    block_length: int
    valid_size: int

    @property
    def width(self) -> int:
        """How many columns the slice has."""
        return self.blocks * self.block_length

    def holds(self, block: torch.Tensor) -> torch.Tensor:
        """Returns which of the canonical block indices lie in this slice."""
        return (block >= self.first_block) & (block < self.first_block + self.blocks)


def blocks_of(rank: int, size: int) -> range:
    """Returns the canonical blocks of ``rank``: contiguous runs, as even as possible, the longer ones first."""
    base, extra = divmod(VOCABULARY_BLOCKS, size)
    start = rank * base + min(rank, extra)
    return range(start, start + base + (rank < extra))


def lane_maxima(logits: torch.Tensor, blocks: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the largest of every 32nd value of each block, NaN where there is one: [R, Vs] → [R, blocks, 32] float32.

    Args:
        logits: [R, Vs] float32.
        blocks: How many blocks there are.
        out: [R, blocks, 32] float32, where to write them; None = into a new tensor.
    """
    runs = logits.shape[1] // (blocks * GROUP_LENGTH)
    return torch.amax(logits.view(logits.shape[0], blocks, runs, GROUP_LENGTH), dim=2, out=out)


def largest_in_blocks(logits: torch.Tensor, blocks: int) -> torch.Tensor:
    """Returns the largest value of each block, NaN where there is one: [R, Vs] → [R, blocks] float32.

    By way of the lanes: maxima of neighbouring memory, taken lane by lane, are several times faster on a CPU.
    """
    return lane_maxima(logits, blocks).amax(dim=-1)


def group_maxima(logits: torch.Tensor) -> torch.Tensor:
    """Returns the largest value of each run of 32 ids, NaN where there is one: [R, Vs] → [R, Vs/32] float32."""
    return logits.view(logits.shape[0], logits.shape[1] // GROUP_LENGTH, GROUP_LENGTH).amax(dim=-1)


def block_masses(
    logits: torch.Tensor,
    block_maxima: torch.Tensor,
    inverse_temperature: torch.Tensor,
    *,
    floor: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns Σ exp((z − block maximum) / T) of each block: [R, nb] float32, 0 for a block of −inf.

    Args:
        logits: [R, Vs] float32.
        block_maxima: [R, nb] float32.
        inverse_temperature: [R] float32.
        floor: [R] float32, values below it count nothing; all count when left out.
    """
    blocks = logits.view(*block_maxima.shape, -1)
    # exp is many times slower where its result is denormal or 0; what the bound adds vanishes beside the maximum's 1.
    shifted = torch.sub(blocks, block_maxima.clamp_min(_LOWEST).unsqueeze(-1))
    weights = shifted.mul_(inverse_temperature.view(-1, 1, 1)).clamp_min_(_SMALLEST_EXPONENT).exp_()
    if floor is not None:
        weights = torch.where(blocks >= floor.view(-1, 1, 1), weights, 0.0)
    return _sum_last(weights).masked_fill_(block_maxima == _NONE, 0.0)


def weights_in_block(
    values: torch.Tensor, block_maximum: torch.Tensor, inverse_temperature: torch.Tensor
) -> torch.Tensor:
    """Returns exp((z − block maximum) / T), elementwise float32; arguments broadcast."""
    # −inf − −inf would be NaN.
    shifted = torch.sub(values, block_maximum.clamp_min(_LOWEST))
    return shifted.mul_(inverse_temperature).exp_()


def _sum_last(weights: torch.Tensor) -> torch.Tensor:
    """Returns the sums over the last dimension in an order that depends on its length alone."""
    if weights.device.type == "cpu":
        # Each output of the CPU kernel is one thread's work, in an order given by the length (a test holds it to that).
        return weights.sum(dim=-1)
    return folded_sum(weights)


def folded_sum(weights: torch.Tensor) -> torch.Tensor:
    """Returns the sums over the last dimension by halving it again and again: elementwise adds only."""
    while (length := weights.shape[-1]) > 1:
        half = length // 2
        folded = weights[..., :half] + weights[..., half : 2 * half]
        weights = folded if length % 2 == 0 else torch.cat((folded, weights[..., -1:]), dim=-1)
    return weights.squeeze(-1)


def first_largest(logits: torch.Tensor, block_maxima: torch.Tensor) -> torch.Tensor:
    """Returns the smallest column among those with the largest value: [R, Vs], [R, nb] → [R] int64."""
    rows = torch.arange(logits.shape[0], device=logits.device)
    block = _first_true(block_maxima == block_maxima.amax(dim=1, keepdim=True))
    values = logits.view(*block_maxima.shape, -1)[rows, block]
    length = logits.shape[1] // block_maxima.shape[1]
    return block * length + _first_true(values == block_maxima[rows, block].unsqueeze(1))


def _first_true(flags: torch.Tensor) -> torch.Tensor:
    """Returns the first true index of each row; 0 when there is none."""
    if flags.device.type == "cpu":
        # numpy stops at the first one it meets.
        return torch.from_numpy(flags.numpy().argmax(axis=1))
    length = flags.shape[1]
    index = torch.where(flags, torch.arange(length, device=flags.device), length).amin(dim=1)
    return torch.where(index < length, index, 0)


def largest_values(
    logits: torch.Tensor, groups: torch.Tensor, rows: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the ``count`` largest values of some rows and their columns: [N, count] float32 and int64, unordered.

    Which of several equal values at the cut come is left open: whoever uses them may rely on every value above the
    smallest one returned, and on nothing else. −inf fills up.

    Only the ``count`` groups with the largest maxima are read: a value above all of the rest's maxima lies in them.

    Args:
        logits: [B, Vs] float32.
        groups: [N, Vs/32] float32, of these rows, from ``group_maxima``.
        rows: [N] int64.
        count: How many.
    """
    if groups.shape[1] <= count:
        own = logits[rows]
        places = largest_places(own, min(count, logits.shape[1]))
        missing = count - places.shape[1]
        values = torch.nn.functional.pad(own.gather(1, places), (0, missing), value=_NONE)
        return values, torch.nn.functional.pad(places, (0, missing))
    chosen = largest_places(groups, count)
    members = logits.view(len(logits), -1, GROUP_LENGTH)[rows.unsqueeze(1), chosen].view(len(rows), -1)
    places = largest_places(members, count)
    group = chosen.gather(1, places // GROUP_LENGTH)
    return members.gather(1, places), group * GROUP_LENGTH + places % GROUP_LENGTH


def largest_places(values: torch.Tensor, count: int) -> torch.Tensor:
    """Returns where each row's ``count`` largest values are, unordered: [N, count] int64 from [N, K]."""
    # numpy's partition is several times faster than torch's on a CPU, but not where most values are alike.
    if values.device.type != "cpu" or np.count_nonzero(values.numpy() == _NONE) > values.numel() // 2:
        return values.topk(count, dim=1, sorted=False).indices
    return torch.from_numpy(np.argpartition(values.numpy(), values.shape[1] - count, axis=1)[:, -count:]).contiguous()


def true_places(flags: torch.Tensor) -> torch.Tensor:
    """Returns the indices of the true ones of [n] bool, ascending."""
    if flags.device.type != "cpu":
        return flags.nonzero().squeeze(1)
    # numpy is faster at this on a CPU.
    return torch.from_numpy(np.flatnonzero(flags.numpy()))
