"""Rows with a filter: decided by their candidates where these prove the support, else by the exact search."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from sampler.batch import SamplingBatchInfo
from sampler.exchange import SliceFacts
from sampler.group import SliceGroup
from sampler.search import Found, Goal, find_thresholds
from sampler.support import Decision, RowFilters, decide, pick, relative_weights

_NONE = float("-inf")


@dataclass(frozen=True)
class Step:
    """What every rank knows about a step after the exchange, and this rank's own logits.

    Attributes:
        batch: The rows' parameters.
        vocab_size: How many ids there are.
        logits: [B, Vs] float32, this rank's slice after the adjustments.
        groups: [B, Vs/32] float32, its largest value per run of 32 ids.
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
        filters: Their filters.
        decision: What the candidates say.
    """

    rows: torch.Tensor
    ids: torch.Tensor
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
    return Truncated(rows, ids, filters, decision)


def draw_settled(truncated: Truncated, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rows that the candidates settle and the ids drawn: [N] int64 each, the same on every rank.

    Args:
        truncated: From ``decide_truncated``.
        uniform: [B] float64 in [0, 1).
    """
    decision = truncated.decision
    settled = decision.settled
    ids = torch.where(decision.inside, truncated.ids, torch.iinfo(torch.int64).max)[settled]
    ascending = ids.sort(dim=1)
    weights = torch.where(decision.inside, decision.weights, 0.0)[settled].gather(1, ascending.indices)
    rows = truncated.rows[settled]
    index, _ = pick(weights, uniform[rows])
    return rows, ascending.values.gather(1, index.unsqueeze(1)).squeeze(1)


def search_unsettled(group: SliceGroup, step: Step, truncated: Truncated) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rows that the candidates do not settle and the smallest value in their support.

    Every rank of the group calls it; no collective is made when there is no such row.

    Returns:
        [N] int64 and [N] float32.
    """
    places = (~truncated.decision.settled).nonzero().squeeze(1)
    rows = truncated.rows[places]
    if not len(rows):
        return rows, step.logits.new_empty(0)
    filters = truncated.filters.take(places)
    goals = _goals(step, rows, filters)
    # top_p within S_k: first S_k alone, for its mass.
    renormalised = filters.renormalised.nonzero().squeeze(1).tolist()
    by_k = [replace(goals[place], top_p=float("inf"), floor=_NONE) for place in renormalised]
    for place, found in zip(renormalised, _find(group, step, rows[renormalised], by_k), strict=True):
        goals[place] = replace(goals[place], mass=found.mass)
    limited = [place for place, goal in enumerate(goals) if min(goal.top_k, goal.top_p) < float("inf")]
    floored = [_floored(goals[place], step.vocab_size) for place in limited]
    thresholds = _round_up(filters.lowest)
    for place, found in zip(limited, _find(group, step, rows[limited], floored), strict=True):
        thresholds[place] = thresholds[place].clamp_min(found.threshold)
    return rows, thresholds


def _goals(step: Step, rows: torch.Tensor, filters: RowFilters) -> list[Goal]:
    maxima, temperature, total = step.facts.maxima[rows], step.batch.temperature[rows], step.total_mass(rows)
    columns = (maxima, temperature, total, filters.top_k, filters.top_p, filters.lowest)
    return [
        Goal(maximum=maximum, temperature=row_t, total=mass, top_k=top_k, top_p=top_p, mass=mass, floor=lowest)
        for maximum, row_t, mass, top_k, top_p, lowest in zip(*(column.tolist() for column in columns), strict=True)
    ]


def _find(group: SliceGroup, step: Step, rows: torch.Tensor, goals: list[Goal]) -> list[Found]:
    slices = [step.logits[row] for row in rows.tolist()]
    return find_thresholds(group, slices, [step.groups[row] for row in rows.tolist()], goals)


def _floored(goal: Goal, vocab_size: int) -> Goal:
    """Returns the goal with the floor that its top_p implies.

    Were all ids of the vocabulary at that value, they would hold half of what top_p leaves out.
    """
    if goal.top_p >= 1:
        return goal
    left_out = (1.0 - goal.top_p) * goal.mass / 2.0
    return replace(goal, floor=max(goal.floor, goal.maximum + goal.temperature * math.log(left_out / vocab_size)))


def _round_up(values: torch.Tensor) -> torch.Tensor:
    """Returns the smallest float32 values that are not below float64 ones."""
    rounded = values.to(torch.float32)
    above = torch.nextafter(rounded, torch.full_like(rounded, float("inf")))
    return torch.where(rounded.to(torch.float64) < values, above, rounded)
