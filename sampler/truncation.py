"""Rows with a filter: decided by their candidates where these prove the support, else by the exact search."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sampler.batch import SamplingBatchInfo
from sampler.exchange import SliceFacts
from sampler.group import SliceGroup
from sampler.search import Goals, Head, find_thresholds, hold, without_limit
from sampler.slices import SliceShape
from sampler.support import Decision, RowFilters, decide, relative_weights

_NONE = float("-inf")
_ROWS_AT_ONCE = 64
# How far below what a sample says the search looks, first and then; None: as far as can matter.
_GUESSES = (2, 12, None)


@dataclass(frozen=True)
class Step:
    """What every rank knows about a step after the exchange, and this rank's own logits.

    Attributes:
        batch: The rows' parameters.
        vocab_size: How many ids there are.
        logits: [B, Vs] float32, this rank's slice after the adjustments.
        groups: [B, Vs/32] float32, its largest value per run of 32 ids; [B, 0] when no row truncates.
        facts: Of the whole vocabulary.
        reasons: [B] int64, why a row is INVALID; 0 = it is not.
        sampled: [B] bool, rows that are drawn, neither INVALID nor greedy.
    """

    batch: SamplingBatchInfo
    vocab_size: int
    logits: torch.Tensor
    groups: torch.Tensor
    facts: SliceFacts
    reasons: torch.Tensor
    sampled: torch.Tensor

    @property
    def block_maxima(self) -> torch.Tensor:
        """[B, 64] float32; no row is drawn where they are missing."""
        if self.facts.block_maxima is None:
            return self.logits.new_full((self.batch.row_count, 1), _NONE)
        return self.facts.block_maxima

    def block_weights(self, rows: torch.Tensor, masses: torch.Tensor) -> torch.Tensor:
        """Returns block masses relative to the rows' maxima instead of the blocks': [N, 64] float64."""
        maxima, temperature = self.facts.maxima[rows], self.batch.temperature[rows]
        return masses.to(torch.float64) * relative_weights(self.block_maxima[rows], maxima, temperature)

    def total_mass(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the whole mass relative to the maximum, or a bound of it where no row asked for it: [N] float64."""
        bound = torch.full((len(rows),), float(self.vocab_size), dtype=torch.float64, device=rows.device)
        if self.facts.block_masses is None:
            return bound
        asked = torch.tensor(self.batch.flags.needs_mass, device=rows.device)[rows]
        return torch.where(asked, self.block_weights(rows, self.facts.block_masses[rows]).sum(dim=1), bound)


@dataclass(frozen=True)
class Truncated:
    """The truncated rows that are drawn.

    Attributes:
        rows: [N] int64.
        ids: [N, C] int64, their candidates.
        values: [N, C] float32, the candidates' values, descending.
        filters: Their filters.
        decision: What the candidates say.
    """

    rows: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor
    filters: RowFilters
    decision: Decision


def decide_truncated(step: Step) -> Truncated:
    """Returns what the candidates say about the truncated rows; the same on every rank, without a collective."""
    batch, facts = step.batch, step.facts
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
    decision = decide(values, filters, maxima=maxima, temperature=temperature, total=step.total_mass(rows))
    return Truncated(rows, ids, values, filters, decision)


@dataclass(frozen=True)
class Searched:
    """The truncated rows that the candidates do not settle, after the search.

    Attributes:
        rows: [N] int64.
        thresholds: [N] float32, the smallest value in the support, the same on every rank.
        masses: [N, nb] float64, the support's mass in each of this rank's blocks, relative to the row's maximum.
    """

    rows: torch.Tensor
    thresholds: torch.Tensor
    masses: torch.Tensor


@dataclass(frozen=True)
class Supports:
    """What a step's sampled rows are drawn from.

    Attributes:
        truncated: The rows with a filter, and which of them their candidates settle.
        searched: The rest of these, after the search.
        wide: [N] int64, rows whose support no rank holds: those without a filter, and the searched ones.
        floors: [N] float32, the smallest value in their support; −inf without a filter.
        masses: [N, 64] float64, the mass of their support in each block.
    """

    truncated: Truncated
    searched: Searched
    wide: torch.Tensor
    floors: torch.Tensor
    masses: torch.Tensor


def search_unsettled(group: SliceGroup, step: Step, truncated: Truncated, shape: SliceShape) -> Searched:
    """Returns the supports of the rows that the candidates do not settle.

    Every rank of the group calls it; no collective is made when there is no such row.
    """
    places = (~truncated.decision.settled).nonzero().squeeze(1)
    thresholds = step.logits.new_empty(len(places))
    masses = step.logits.new_empty((len(places), shape.blocks), dtype=torch.float64)
    for first in range(0, len(places), _ROWS_AT_ONCE):
        open_places = torch.arange(first, min(first + _ROWS_AT_ONCE, len(places)), device=places.device)
        for extra_bins in _GUESSES:
            found = _search(group, step, truncated, places[open_places], shape=shape, extra_bins=extra_bins)
            thresholds[open_places], masses[open_places], lacking = found
            open_places = open_places[lacking]
            if not len(open_places):
                break
    return Searched(truncated.rows[places], thresholds, masses)


def _search(
    group: SliceGroup,
    step: Step,
    truncated: Truncated,
    places: torch.Tensor,
    *,
    shape: SliceShape,
    extra_bins: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns thresholds and block masses, as in ``Searched``, and in which rows a wrong guess made them useless."""
    rows, filters, decision = truncated.rows[places], truncated.filters.take(places), truncated.decision
    goals = _goals(step, rows, filters)
    # top_p within S_k: first S_k alone, for its mass.
    by_k = without_limit(goals, filters.renormalised)
    head = None
    if extra_bins is not None:
        values, weights = truncated.values[places], decision.weights[places]
        head = Head(values.shape[1], values[:, -1].contiguous(), weights.cumsum(dim=1)[:, -1])
    held, lacking = hold(group, step.logits, step.groups, rows, by_k, head=head, extra_bins=extra_bins or 0)
    if bool(filters.renormalised.any()):
        mass = find_thresholds(group, held, by_k).mass
        goals = replace(goals, limit=torch.where(filters.renormalised, filters.top_p * mass, goals.limit))
    found = find_thresholds(group, held, goals).threshold
    thresholds = torch.maximum(found, _round_up(filters.lowest))
    return thresholds, held.block_masses(goals, thresholds, shape), lacking


def _goals(step: Step, rows: torch.Tensor, filters: RowFilters) -> Goals:
    """Returns what the rows look for; where top_p refers to S_k, that mass is yet to be put in."""
    maxima, temperature, total = step.facts.maxima[rows], step.batch.temperature[rows], step.total_mass(rows)
    # Were all ids of the vocabulary at this value, they would hold half of what top_p leaves out.
    left_out = (1.0 - filters.top_p).clamp_min(0.0) * total / 2.0
    floor = (maxima + temperature * (left_out / step.vocab_size).log()).to(torch.float32)
    floor = torch.where(filters.renormalised, _NONE, torch.maximum(floor, _round_up(filters.lowest)))
    return Goals(maxima, temperature, total, filters.top_k, filters.top_p * total, floor)


def _round_up(values: torch.Tensor) -> torch.Tensor:
    """Returns the smallest float32 values that are not below float64 ones."""
    rounded = values.to(torch.float32)
    above = torch.nextafter(rounded, torch.full_like(rounded, float("inf")))
    return torch.where(rounded.to(torch.float64) < values, above, rounded)
