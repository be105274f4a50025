"""The exact rounds for rows whose largest candidates do not prove the support.

Each round histograms the ids in question on every rank by value, sums the histograms, and keeps the one bin in which
the threshold lies. Weights are fixed-point numbers (integers held in float64, their sums below 2**53), so that every
sum is exact: no order of summation, hence no tp_size, can change a decision. Counts are exact anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from sampler.group import SliceGroup
from sampler.support import strictly_greater

_BINS = 64
_LISTED = 256
_LINEAR_ROUNDS = 4
_NONE = float("-inf")


@dataclass(frozen=True)
class Goal:
    """What one row looks for: its smallest value with fewer than ``top_k`` ids and less than ``top_p`` mass above it.

    Attributes:
        maximum: The row's largest value.
        temperature: The row's temperature.
        total: About what the row's mass is, relative to the maximum; sets the fixed-point scale.
        top_k: Excluded limit of the count; inf = none.
        top_p: Excluded limit of the mass, as a share of ``mass``; inf = none.
        mass: The mass that top_p refers to, in fixed point; None = of the whole row.
    """

    maximum: float
    temperature: float
    total: float
    top_k: float
    top_p: float
    mass: float | None = None

    @property
    def scale(self) -> float:
        """Fixed-point units of the weight 1: a power of two, so that the row's mass stays below 2**53 of them."""
        return 2.0 ** (51 - max(1, torch.tensor(self.total).frexp().exponent.item()))


@dataclass
class _Row:
    """One row under search: the ids in question on this rank, and what lies above them on all ranks."""

    goal: Goal
    values: torch.Tensor
    weights: torch.Tensor
    count_above: float = 0.0
    mass_above: float = 0.0
    remaining: float = float("inf")
    limit: float = float("inf")
    low: float = 0.0
    high: float = 0.0
    bins: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def is_listed(self) -> bool:
        return self.remaining <= _LISTED

    @property
    def is_open(self) -> bool:
        return self.high > self.low and not self.is_listed


@dataclass(frozen=True)
class Found:
    """Where a row's threshold lies.

    Attributes:
        threshold: The smallest value that the goal lets in.
        mass: The mass of the ids from there up, in fixed point.
    """

    threshold: float
    mass: float


def find_thresholds(group: SliceGroup, slices: Sequence[torch.Tensor], goals: Sequence[Goal]) -> list[Found]:
    """Returns each row's threshold, the same on every rank.

    Every rank of the group calls it with the same goals. A round costs one reduction of two numbers and one of
    2 · 64 numbers per row; three rounds settle ordinary rows, ten any row.

    Args:
        group: The ranks.
        slices: This rank's logits of each row, [Vs] float32.
        goals: What the rows look for; every row has a finite value somewhere.
    """
    rows = [_start(values, goal) for values, goal in zip(slices, goals, strict=True)]
    round_index = 0
    while rows:
        _agree_on_range(group, rows)
        open_rows = [row for row in rows if row.is_open]
        if not open_rows:
            break
        _narrow(group, open_rows, by_order=round_index >= _LINEAR_ROUNDS)
        round_index += 1
    return _finish(group, rows)


def _start(values: torch.Tensor, goal: Goal) -> _Row:
    finite = values[values > _NONE]
    return _Row(goal, finite, _fixed_point_weights(finite, goal))


def _fixed_point_weights(values: torch.Tensor, goal: Goal) -> torch.Tensor:
    """Returns the weights exp((z − maximum) / T) in fixed point, float64."""
    weights = (values - goal.maximum).mul_(1.0 / goal.temperature).exp_()
    return weights.to(torch.float64).mul_(goal.scale).floor_()


def _agree_on_range(group: SliceGroup, rows: Sequence[_Row]) -> None:
    """Sets each row's smallest and largest value in question, over all ranks."""
    ends = torch.full((len(rows), 2), _NONE, dtype=torch.float32, device=rows[0].values.device)
    for index, row in enumerate(rows):
        if row.values.numel():
            low, high = row.values.aminmax()
            ends[index, 0], ends[index, 1] = high, -low
    for row, (high_end, negated_low) in zip(rows, group.all_reduce_max_(ends).tolist(), strict=True):
        row.high, row.low = high_end, -negated_low


def _narrow(group: SliceGroup, rows: Sequence[_Row], *, by_order: bool) -> None:
    """Narrows each row to the one bin that holds its threshold."""
    histograms = torch.zeros((len(rows), 2, _BINS), dtype=torch.float64, device=rows[0].values.device)
    for index, row in enumerate(rows):
        row.bins = _bins(row, by_order=by_order)
        histograms[index, 0] = torch.bincount(row.bins, minlength=_BINS)
        histograms[index, 1] = torch.bincount(row.bins, weights=row.weights, minlength=_BINS)
    group.all_reduce_sum_(histograms)
    # From the largest bin down; sums of integers below 2**53, so exact in any order.
    cumulated = histograms.flip(-1).cumsum(dim=-1)
    for row, sums, exclusive in zip(rows, cumulated.tolist(), (cumulated - histograms.flip(-1)).tolist(), strict=True):
        if row.limit == float("inf"):
            mass = sums[1][-1] if row.goal.mass is None else row.goal.mass
            row.limit = row.goal.top_p * mass if row.goal.top_p < float("inf") else float("inf")
        chosen = 0
        for place in range(_BINS):
            is_empty = sums[0][place] == exclusive[0][place]
            count, mass = row.count_above + exclusive[0][place], row.mass_above + exclusive[1][place]
            if count >= row.goal.top_k or mass >= row.limit:
                break
            chosen = chosen if is_empty else place
        row.remaining = sums[0][chosen] - exclusive[0][chosen]
        row.count_above += exclusive[0][chosen]
        row.mass_above += exclusive[1][chosen]
        members = row.bins == _BINS - 1 - chosen
        row.values, row.weights = row.values[members], row.weights[members]


def _bins(row: _Row, *, by_order: bool) -> torch.Tensor:
    """Returns each value's bin, 0 to 63; a larger value is never in a smaller bin.

    The first rounds cut the range of values evenly. Values that crowd at many scales would take many such rounds, so
    later ones cut the order of float32 itself: 32 bits, six a round.
    """
    low, high = row.low, row.high
    values = row.values
    if by_order:
        values = _order(values)
        low, high = _order(torch.tensor([low, high], dtype=torch.float32)).tolist()
    scaled = (values.to(torch.float64) - low).mul_(_BINS / (high - low))
    return scaled.to(torch.int64).clamp_(max=_BINS - 1)


def _order(values: torch.Tensor) -> torch.Tensor:
    """Returns integers in the same order as float32 values (both zeros alike): int64."""
    bits = values.contiguous().view(torch.int32).to(torch.int64)
    return torch.where(bits >= 0, bits, -(bits & 0x7FFFFFFF))


def _finish(group: SliceGroup, rows: Sequence[_Row]) -> list[Found]:
    """Returns the thresholds: the one value left, or the right one in the short list that is left."""
    listed = [row for row in rows if row.is_listed and row.high > row.low]
    single = [row for row in rows if row.high == row.low]
    found = dict(zip(map(id, listed), _search_lists(group, listed), strict=True))
    found.update(zip(map(id, single), _count_single(group, single), strict=True))
    return [found[id(row)] for row in rows]


def _count_single(group: SliceGroup, rows: Sequence[_Row]) -> list[Found]:
    if not rows:
        return []
    masses = torch.stack([row.weights.sum() for row in rows])
    return [
        Found(row.high, row.mass_above + mass)
        for row, mass in zip(rows, group.all_reduce_sum_(masses).tolist(), strict=True)
    ]


def _search_lists(group: SliceGroup, rows: Sequence[_Row]) -> list[Found]:
    if not rows:
        return []
    device = rows[0].values.device
    lists = torch.full((len(rows), _LISTED), _NONE, dtype=torch.float32, device=device)
    for index, row in enumerate(rows):
        lists[index, : row.values.numel()] = row.values
    merged = group.all_gather(lists).transpose(0, 1).reshape(len(rows), -1)
    values = merged.sort(dim=1, descending=True).values[:, :_LISTED].contiguous()
    weights = torch.stack([_fixed_point_weights(listed, row.goal) for listed, row in zip(values, rows, strict=True)])
    count, mass = strictly_greater(values, weights)

    def column(numbers: list[float]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.float64, device=device).unsqueeze(1)

    mass += column([row.mass_above for row in rows])
    inside = count + column([row.count_above for row in rows]) < column([row.goal.top_k for row in rows])
    inside &= (mass < column([row.limit for row in rows])) & (values > _NONE)
    thresholds = torch.where(inside, values, float("inf")).amin(dim=1)
    masses = torch.where(inside, weights, 0.0).sum(dim=1) + column([row.mass_above for row in rows]).squeeze(1)
    return [Found(*pair) for pair in zip(thresholds.tolist(), masses.tolist(), strict=True)]
