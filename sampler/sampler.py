"""The tensor-parallel sampler: one token per row from vocabulary slices, exact, at any tp_size.

A step is one pass over the slice (adjust, find the largest values and block masses), one packed all_gather, and for
rows whose draw the gathered facts do not settle: exact search rounds and one small reduction. What is decided about a
row depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import torch

from sampler.batch import SamplingBatchInfo
from sampler.exchange import exchange, in_block_order
from sampler.group import SliceGroup
from sampler.philox import uniform_53
from sampler.reader import SliceReader
from sampler.slices import VOCABULARY_BLOCKS, SliceShape, block_masses, blocks_of, weights_in_block
from sampler.support import pick, relative_weights
from sampler.truncation import Step, decide_truncated, draw_settled, search_unsettled

DEFAULT_CANDIDATES = 128
_NONE = float("-inf")


class SamplerError(RuntimeError):
    """The sampler was called with what does not fit together: a fault of the program, not of a client."""


class RowStatus(IntEnum):
    """How a row's step went; the larger is the worse, and ranks agree on the largest."""

    OK = 0
    OVERFLOW = 1
    INVALID = 2


class RowReason(IntEnum):
    """Why a row is INVALID."""

    NONE = 0
    EMPTY_SUPPORT = 1
    NON_FINITE = 2


@dataclass(frozen=True)
class SampleOutput:
    """One step's tokens, the same on every rank.

    Attributes:
        token_ids: [B] int64; −1 for an INVALID row.
        status: [B] int64, a ``RowStatus`` each.
        reasons: [B] int64, a ``RowReason`` each.
    """

    token_ids: torch.Tensor
    status: torch.Tensor
    reasons: torch.Tensor


@dataclass(frozen=True)
class RowSupport:
    """What may be drawn in one row.

    Attributes:
        status: How the row went; an INVALID row has an empty support.
        ids: [S] int64, ascending.
        probabilities: [S] float64, renormalised over the support.
    """

    status: RowStatus
    ids: torch.Tensor
    probabilities: torch.Tensor


class Sampler:
    """Draws tokens from this rank's vocabulary slice, together with the ranks that hold the others.

    Args:
        group: The ranks; all of them make the same calls in the same order.
        vocab_size: How many ids the model's LM head has; ids from there on are padding and never drawn.
        slice_start: Id of this rank's first column: whole canonical blocks, as even a run as possible.
        block_length: Ids of one of the 64 canonical blocks, a multiple of 32.
        nan_policy: ``error`` ends a row with a NaN or +inf; ``sanitize`` takes NaN as absent and +inf as 1e30.
        candidates: How many of a truncated row's largest values are gathered. The distribution does not depend on it.

    Raises:
        SamplerError: ``slice_start`` is not where this rank's blocks begin, or a size makes no sense.
    """

    def __init__(
        self,
        group: SliceGroup,
        *,
        vocab_size: int,
        slice_start: int,
        block_length: int,
        nan_policy: Literal["error", "sanitize"] = "error",
        candidates: int = DEFAULT_CANDIDATES,
    ) -> None:
        if not 1 <= group.size <= VOCABULARY_BLOCKS:
            raise SamplerError(f"a vocabulary of {VOCABULARY_BLOCKS} blocks cannot be cut over {group.size} ranks")
        if block_length % 32 or not 0 < vocab_size <= VOCABULARY_BLOCKS * block_length or candidates < 1:
            raise SamplerError(f"vocab_size {vocab_size}, block_length {block_length}, candidates {candidates}")
        blocks = blocks_of(group.rank, group.size)
        if slice_start != blocks.start * block_length:
            raise SamplerError(
                f"the slice of rank {group.rank} of {group.size} starts at id {blocks.start * block_length}, "
                f"not {slice_start}"
            )
        width = len(blocks) * block_length
        valid_size = min(max(vocab_size - slice_start, 0), width)
        self._group = group
        self._shape = SliceShape(slice_start, blocks.start, len(blocks), block_length, valid_size)
        self._vocab_size = vocab_size
        self._reader = SliceReader(group, self._shape, sanitize=nan_policy == "sanitize", candidates=candidates)

    def sample(
        self,
        logits: torch.Tensor,
        batch: SamplingBatchInfo,
        positions: Sequence[int],
        mask_words: torch.Tensor | None = None,
    ) -> SampleOutput:
        """Returns one token per row; every rank of the group calls it with its own slice.

        Args:
            logits: [B, Vs] float32, this rank's slice of the model's output, padding −inf. Modified in place.
            batch: The rows' parameters.
            positions: For each row, how many tokens its choice has generated so far, which is the index of the token
                drawn now. A restart, another chunking or another batch does not change it.
            mask_words: [B, Vs/32] int32, this rank's words of every row's grammar mask, −1 throughout for a row
                without one; None when no row has one (on all ranks alike).

        Raises:
            SamplerError: A shape or dtype does not fit the batch.
        """
        step = self._begin(logits, batch, positions, mask_words)
        token_ids = torch.where(batch.greedy & (step.reasons == 0), step.facts.largest_ids, -1)
        if bool(step.sampled.any()):
            index = torch.as_tensor(positions, dtype=torch.int64, device=logits.device)
            uniform = uniform_53(batch.seeds, batch.choices, index)
            truncated = decide_truncated(step)
            settled, drawn = draw_settled(truncated, uniform)
            token_ids[settled] = drawn
            searched, thresholds = search_unsettled(self._group, step, truncated)
            unfiltered = (step.sampled & ~batch.truncated).nonzero().squeeze(1)
            wide = torch.cat((unfiltered, searched))
            floors = torch.cat((torch.full_like(unfiltered, _NONE, dtype=torch.float32), thresholds))
            if len(wide):
                token_ids[wide] = self._draw_wide(step, wide, floors, uniform[wide])
        return SampleOutput(token_ids, _status(step.reasons), step.reasons)

    def support(
        self,
        logits: torch.Tensor,
        batch: SamplingBatchInfo,
        positions: Sequence[int],
        mask_words: torch.Tensor | None = None,
    ) -> list[RowSupport]:
        """Returns what ``sample`` would draw from, row by row, assembled from the slices; arguments as for ``sample``.

        For tests and for replaying a row: it gathers whole supports.
        """
        step = self._begin(logits, batch, positions, mask_words)
        floors = torch.full_like(step.facts.maxima, _NONE)
        truncated = decide_truncated(step)
        settled = truncated.decision.settled
        floors[truncated.rows[settled]] = truncated.decision.threshold[settled]
        searched, thresholds = search_unsettled(self._group, step, truncated)
        floors[searched] = thresholds
        supports = []
        for row, above in enumerate(self._gather_above(step, floors)):
            reason, one = int(step.reasons[row]), slice(row, row + 1)
            ids, values = (step.facts.largest_ids[one], step.facts.maxima[one]) if batch.greedy[row] else above
            if reason:
                supports.append(RowSupport(RowStatus.INVALID, ids[:0], values[:0].to(torch.float64)))
                continue
            weights = relative_weights(values.unsqueeze(0), step.facts.maxima[one], batch.temperature[one]).squeeze(0)
            # Summed one after the other: a plain sum of one long row is split over threads.
            supports.append(RowSupport(RowStatus.OK, ids, weights / weights.cumsum(dim=0)[-1:]))
        return supports

    def _begin(
        self,
        logits: torch.Tensor,
        batch: SamplingBatchInfo,
        positions: Sequence[int],
        mask_words: torch.Tensor | None,
    ) -> Step:
        """Adjusts the slice, reads it and exchanges what was found."""
        self._check(logits, batch, positions, mask_words)
        bans = self._reader.active_bans(batch, positions, mask_words)
        groups, own = self._reader.read_(logits, batch, bans, mask_words)
        facts = exchange(self._group, own)
        empty = torch.where(facts.maxima == _NONE, int(RowReason.EMPTY_SUPPORT), int(RowReason.NONE))
        reasons = torch.where(facts.bad, int(RowReason.NON_FINITE), empty)
        return Step(batch, self._vocab_size, logits, groups, facts, reasons, (reasons == 0) & ~batch.greedy)

    def _check(
        self,
        logits: torch.Tensor,
        batch: SamplingBatchInfo,
        positions: Sequence[int],
        mask_words: torch.Tensor | None,
    ) -> None:
        rows, width = batch.row_count, self._shape.width
        if logits.shape != (rows, width) or logits.dtype != torch.float32 or not logits.is_contiguous():
            raise SamplerError(
                f"logits must be contiguous float32 [{rows}, {width}], not {logits.dtype} {list(logits.shape)}"
            )
        if len(positions) != rows:
            raise SamplerError(f"{rows} rows need {rows} positions, not {len(positions)}")
        if mask_words is not None and (mask_words.shape != (rows, width // 32) or mask_words.dtype != torch.int32):
            raise SamplerError(
                f"mask_words must be int32 [{rows}, {width // 32}], not {mask_words.dtype} {list(mask_words.shape)}"
            )

    def _draw_wide(self, step: Step, rows: torch.Tensor, floors: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        """Draws rows whose support no rank holds: first the block, then the id, which the block's owner resolves.

        Args:
            step: The step.
            rows: [N] int64.
            floors: [N] float32, the smallest value in the support; −inf for rows without a filter.
            uniform: [N] float64.

        Returns:
            The ids, [N] int64, on every rank.
        """
        masses = step.logits.new_zeros((len(rows), VOCABULARY_BLOCKS))
        if step.facts.block_masses is not None:
            masses = step.facts.block_masses[rows]
        floored = (floors > _NONE).nonzero().squeeze(1)
        if len(floored):
            masses[floored] = self._masses_above(step, rows[floored], floors[floored])
        block, fraction = pick(step.block_weights(rows, masses), uniform)
        ids = torch.full_like(rows, -1)
        own = self._shape.holds(block).nonzero().squeeze(1)
        if len(own):
            local = block[own] - self._shape.first_block
            values = step.logits.view(step.batch.row_count, self._shape.blocks, -1)[rows[own], local]
            maxima = step.block_maxima[rows[own], block[own]].unsqueeze(1)
            inverse = (1.0 / step.batch.temperature[rows[own]]).to(torch.float32).unsqueeze(1)
            weights = weights_in_block(values, maxima, inverse).masked_fill_(values < floors[own].unsqueeze(1), 0.0)
            index, _ = pick(weights.to(torch.float64), fraction[own])
            ids[own] = self._shape.start + local * self._shape.block_length + index
        return self._group.all_reduce_max_(ids)

    def _masses_above(self, step: Step, rows: torch.Tensor, floors: torch.Tensor) -> torch.Tensor:
        """Returns the block masses of the ids from the floors up, of all ranks: [N, 64] float32."""
        first, count = self._shape.first_block, self._shape.blocks
        largest = len(blocks_of(0, self._group.size))
        maxima = step.block_maxima[:, first : first + count]
        inverse = (1.0 / step.batch.temperature).to(torch.float32)
        masses = step.logits.new_zeros((len(rows), largest))
        for place, row in enumerate(rows.tolist()):
            one, floor = slice(row, row + 1), floors[place : place + 1]
            masses[place, :count] = block_masses(step.logits[one], maxima[one], inverse[one], floor=floor)
        return in_block_order(self._group.all_gather(masses))

    def _gather_above(self, step: Step, floors: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns ids and values from the floor up of each row, of all ranks: [S] int64 and float32, ids ascending."""
        logits = step.logits
        row, column = ((logits >= floors.unsqueeze(1)) & (logits > _NONE)).nonzero(as_tuple=True)
        counts = self._group.all_gather(row.bincount(minlength=logits.shape[0]))
        longest = int(counts.sum(dim=1).max())
        padded = torch.zeros((2, longest), dtype=torch.float64, device=logits.device)
        padded[0, : len(row)], padded[1, : len(row)] = column + self._shape.start, logits[row, column]
        by_rank = [
            table[:, : int(own.sum())].split(own.tolist(), dim=1)
            for table, own in zip(self._group.all_gather(padded), counts, strict=True)
        ]
        merged = [torch.cat(parts, dim=1) for parts in zip(*by_rank, strict=True)]
        return [(table[0].to(torch.int64), table[1].to(torch.float32)) for table in merged]


def _status(reasons: torch.Tensor) -> torch.Tensor:
    return torch.where(reasons > 0, int(RowStatus.INVALID), int(RowStatus.OK))
