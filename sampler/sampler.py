"""The tensor-parallel sampler: one token per row from vocabulary slices, exact, at any tp_size.

A step is one pass over the slice (adjust, find the largest values and block masses), one packed all_gather, and for
rows whose draw the gathered facts do not settle: exact search rounds and one small reduction. What is decided about a
row depends on that row alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Literal

import torch

from sampler.batch import SamplingBatchInfo
from sampler.exchange import SliceFacts, exchange, in_block_order
from sampler.group import SliceGroup
from sampler.philox import uniform_53
from sampler.reader import SliceReader
from sampler.search import Found, Goal, find_thresholds
from sampler.slices import VOCABULARY_BLOCKS, SliceShape, block_masses, blocks_of, weights_in_block
from sampler.support import Decision, RowFilters, decide, pick, relative_weights

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


@dataclass(frozen=True)
class _Step:
    """What every rank knows about a step after the exchange, and this rank's own logits.

    Attributes:
        logits: [B, Vs] float32, this rank's slice after the adjustments.
        groups: [B, Vs/32] float32, its largest value per run of 32 ids.
        facts: Of the whole vocabulary.
        reasons: [B] int64.
        sampled: [B] bool, rows that are drawn, neither INVALID nor greedy.
    """

    logits: torch.Tensor
    groups: torch.Tensor
    facts: SliceFacts
    reasons: torch.Tensor
    sampled: torch.Tensor


@dataclass(frozen=True)
class _Truncated:
    """The truncated rows that are drawn: their candidates, and what these say."""

    rows: torch.Tensor
    ids: torch.Tensor
    filters: RowFilters
    decision: Decision


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
            truncated = self._decide(step, batch)
            self._draw_settled_(token_ids, truncated, uniform)
            searched, thresholds = self._search(step, batch, truncated)
            unfiltered = (step.sampled & ~batch.truncated).nonzero().squeeze(1)
            wide = torch.cat((unfiltered, searched))
            floors = torch.cat((torch.full_like(unfiltered, _NONE, dtype=torch.float32), thresholds))
            if len(wide):
                token_ids[wide] = self._draw_wide(step, batch, wide, floors, uniform[wide])
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
        truncated = self._decide(step, batch)
        settled = truncated.decision.settled
        floors[truncated.rows[settled]] = truncated.decision.threshold[settled]
        searched, thresholds = self._search(step, batch, truncated)
        floors[searched] = thresholds
        supports = []
        for row, reason in enumerate(step.reasons.tolist()):
            ids, values = self._gather_row(step.logits[row], floors[row : row + 1])
            if reason:
                ids, values = ids[:0], values[:0]
            elif batch.greedy[row]:
                ids, values = step.facts.largest_ids[row : row + 1], step.facts.maxima[row : row + 1]
            weights = relative_weights(
                values.unsqueeze(0), step.facts.maxima[row : row + 1], batch.temperature[row : row + 1]
            ).squeeze(0)
            # Summed one after the other: a plain sum of one long row is split over threads.
            total = weights.cumsum(dim=0)[-1:]
            supports.append(RowSupport(RowStatus.INVALID if reason else RowStatus.OK, ids, weights / total))
        return supports

    def _begin(
        self,
        logits: torch.Tensor,
        batch: SamplingBatchInfo,
        positions: Sequence[int],
        mask_words: torch.Tensor | None,
    ) -> _Step:
        """Adjusts the slice, reads it and exchanges what was found."""
        self._check(logits, batch, positions, mask_words)
        bans = self._reader.active_bans(batch, positions, mask_words)
        groups, own = self._reader.read_(logits, batch, bans, mask_words)
        facts = exchange(self._group, own)
        empty = torch.where(facts.maxima == _NONE, int(RowReason.EMPTY_SUPPORT), int(RowReason.NONE))
        reasons = torch.where(facts.bad, int(RowReason.NON_FINITE), empty)
        return _Step(logits, groups, facts, reasons, (reasons == 0) & ~batch.greedy)

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

    def _decide(self, step: _Step, batch: SamplingBatchInfo) -> _Truncated:
        """Decides the truncated rows by their candidates."""
        facts = step.facts
        exchanged = batch.truncated.nonzero().squeeze(1)
        live = step.sampled[exchanged]
        rows = exchanged[live]
        empty = step.logits.new_empty((0, 1))
        values = empty if facts.values is None else facts.values[live]
        ids = empty.to(torch.int64) if facts.ids is None else facts.ids[live]
        maxima, temperature = facts.maxima[rows], batch.temperature[rows]
        filters = RowFilters.of(
            top_k=batch.top_k[rows],
            top_p=batch.top_p[rows],
            min_p=batch.min_p[rows],
            top_k_first=batch.top_k_first[rows],
            maxima=maxima,
            temperature=temperature,
        )
        total = self._total_mass(step, batch, rows)
        decision = decide(values, filters, maxima=maxima, temperature=temperature, total=total)
        return _Truncated(rows, ids, filters, decision)

    def _total_mass(self, step: _Step, batch: SamplingBatchInfo, rows: torch.Tensor) -> torch.Tensor:
        """Returns the whole mass relative to the maximum, or a bound of it where no row asked for it: [N] float64."""
        bound = torch.full((len(rows),), float(self._vocab_size), dtype=torch.float64, device=rows.device)
        if step.facts.block_masses is None:
            return bound
        asked = torch.tensor(batch.flags.needs_mass, device=rows.device)[rows]
        return torch.where(asked, _block_weights(step, batch, rows, step.facts.block_masses[rows]).sum(dim=1), bound)

    def _draw_settled_(self, token_ids: torch.Tensor, truncated: _Truncated, uniform: torch.Tensor) -> None:
        """Draws the rows that the candidates settle, alike on every rank."""
        decision = truncated.decision
        settled = decision.settled
        ids = torch.where(decision.inside, truncated.ids, torch.iinfo(torch.int64).max)[settled]
        ascending = ids.sort(dim=1)
        weights = torch.where(decision.inside, decision.weights, 0.0)[settled].gather(1, ascending.indices)
        rows = truncated.rows[settled]
        index, _ = pick(weights, uniform[rows])
        token_ids[rows] = ascending.values.gather(1, index.unsqueeze(1)).squeeze(1)

    def _search(
        self, step: _Step, batch: SamplingBatchInfo, truncated: _Truncated
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the rows that the candidates do not settle and their thresholds: [N] int64 and [N] float32."""
        places = (~truncated.decision.settled).nonzero().squeeze(1)
        rows = truncated.rows[places]
        if not len(rows):
            return rows, step.logits.new_empty(0)
        filters = truncated.filters.take(places)
        total = self._total_mass(step, batch, rows)
        columns = (
            step.facts.maxima[rows],
            batch.temperature[rows],
            total,
            filters.top_k,
            filters.top_p,
            filters.lowest,
        )
        goals = [
            Goal(maximum=maximum, temperature=temperature, total=mass, top_k=top_k, top_p=top_p, mass=mass, floor=low)
            for maximum, temperature, mass, top_k, top_p, low in zip(*(c.tolist() for c in columns), strict=True)
        ]
        # top_p within S_k: first S_k alone, for its mass.
        renormalised = filters.renormalised.nonzero().squeeze(1).tolist()
        by_k = [replace(goals[place], top_p=float("inf"), floor=_NONE) for place in renormalised]
        for place, found in zip(renormalised, self._find(step, rows[renormalised], by_k), strict=True):
            goals[place] = replace(goals[place], mass=found.mass)
        limited = [place for place, goal in enumerate(goals) if min(goal.top_k, goal.top_p) < float("inf")]
        thresholds = _round_up(filters.lowest)
        results = self._find(step, rows[limited], [self._floored(goals[place]) for place in limited])
        for place, found in zip(limited, results, strict=True):
            thresholds[place] = thresholds[place].clamp_min(found.threshold)
        return rows, thresholds

    def _find(self, step: _Step, rows: torch.Tensor, goals: list[Goal]) -> list[Found]:
        slices = [step.logits[row] for row in rows.tolist()]
        groups = [step.groups[row] for row in rows.tolist()]
        return find_thresholds(self._group, slices, groups, goals)

    def _floored(self, goal: Goal) -> Goal:
        """Returns the goal with the floor that its top_p implies.

        Were all ids of the vocabulary at that value, they would hold half of what top_p leaves out.
        """
        if goal.top_p >= 1:
            return goal
        left_out = (1.0 - goal.top_p) * goal.mass / 2.0
        return replace(
            goal, floor=max(goal.floor, goal.maximum + goal.temperature * math.log(left_out / self._vocab_size))
        )

    def _draw_wide(
        self, step: _Step, batch: SamplingBatchInfo, rows: torch.Tensor, floors: torch.Tensor, uniform: torch.Tensor
    ) -> torch.Tensor:
        """Draws rows whose support no rank holds: first the block, then the id, which the block's owner resolves.

        Args:
            step: The step.
            batch: The rows' parameters.
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
            masses[floored] = self._masses_above(step, batch, rows[floored], floors[floored])
        block, fraction = pick(_block_weights(step, batch, rows, masses), uniform)
        ids = torch.full_like(rows, -1)
        own = self._shape.holds(block).nonzero().squeeze(1)
        if len(own):
            local = block[own] - self._shape.first_block
            values = step.logits.view(batch.row_count, self._shape.blocks, -1)[rows[own], local]
            maxima = _block_maxima(step)[rows[own], block[own]].unsqueeze(1)
            inverse = (1.0 / batch.temperature[rows[own]]).to(torch.float32).unsqueeze(1)
            weights = weights_in_block(values, maxima, inverse).masked_fill_(values < floors[own].unsqueeze(1), 0.0)
            index, _ = pick(weights.to(torch.float64), fraction[own])
            ids[own] = self._shape.start + local * self._shape.block_length + index
        return self._group.all_reduce_max_(ids)

    def _masses_above(
        self, step: _Step, batch: SamplingBatchInfo, rows: torch.Tensor, floors: torch.Tensor
    ) -> torch.Tensor:
        """Returns the block masses of the ids from the floors up, of all ranks: [N, 64] float32."""
        first, count = self._shape.first_block, self._shape.blocks
        largest = len(blocks_of(0, self._group.size))
        maxima = _block_maxima(step)[:, first : first + count]
        inverse = (1.0 / batch.temperature).to(torch.float32)
        masses = step.logits.new_zeros((len(rows), largest))
        for place, row in enumerate(rows.tolist()):
            one, floor = slice(row, row + 1), floors[place : place + 1]
            masses[place, :count] = block_masses(step.logits[one], maxima[one], inverse[one], floor=floor)
        return in_block_order(self._group.all_gather(masses))

    def _gather_row(self, logits: torch.Tensor, floor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ids and values of one row's support, of all ranks."""
        ids = ((logits >= floor) & (logits > _NONE)).nonzero().squeeze(1)
        counts = self._group.all_gather(torch.tensor([len(ids)], device=logits.device)).flatten().tolist()
        padded = torch.zeros((2, max(counts)), dtype=torch.float64, device=logits.device)
        padded[0, : len(ids)], padded[1, : len(ids)] = (ids + self._shape.start).to(torch.float64), logits[ids]
        gathered = self._group.all_gather(padded)
        whole = torch.cat([gathered[rank, :, :count] for rank, count in enumerate(counts)], dim=1)
        return whole[0].to(torch.int64), whole[1].to(torch.float32)


def _status(reasons: torch.Tensor) -> torch.Tensor:
    return torch.where(reasons > 0, int(RowStatus.INVALID), int(RowStatus.OK))


def _block_maxima(step: _Step) -> torch.Tensor:
    if step.facts.block_maxima is None:
        raise SamplerError("a batch of greedy rows has no block maxima")
    return step.facts.block_maxima


def _block_weights(step: _Step, batch: SamplingBatchInfo, rows: torch.Tensor, masses: torch.Tensor) -> torch.Tensor:
    """Returns block masses relative to the rows' maxima instead of the blocks': [N, 64] float64."""
    relative = relative_weights(_block_maxima(step)[rows], step.facts.maxima[rows], batch.temperature[rows])
    return masses.to(torch.float64) * relative


def _round_up(values: torch.Tensor) -> torch.Tensor:
    """Returns the smallest float32 values that are not below float64 ones."""
    rounded = values.to(torch.float32)
    above = torch.nextafter(rounded, torch.full_like(rounded, float("inf")))
    return torch.where(rounded.to(torch.float64) < values, above, rounded)
