"""The exact rounds for rows whose largest candidates do not prove the support.

Every rank sorts what it holds of such a row and asks, round by round, how many ids and how much mass lie between 64
edges; the sums over the ranks say between which two the threshold lies, and the next round looks there. Weights are
fixed-point numbers (integers held in float64, their sums below 2**53), so that every sum is exact: no order of
summation, hence no tp_size, can change a decision. Counts are exact anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sampler.group import SliceGroup
from sampler.slices import GROUP_LENGTH
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
        total: The row's mass relative to the maximum, or a bound above it; sets the fixed-point scale.
        top_k: Excluded limit of the count; inf = none.
        top_p: Excluded limit of the mass, as a share of ``mass``; inf = none.
        mass: The mass that top_p refers to, relative to the maximum.
        floor: A value that the threshold is known not to lie below, or that makes no difference below.
    """

    maximum: float
    temperature: float
    total: float
    top_k: float
    top_p: float
    mass: float
    floor: float

    @property
    def scale(self) -> float:
        """Fixed-point units of the weight 1: a power of two, so that the row's mass stays below 2**53 of them."""
        return float(2.0 ** (51 - max(1, int(np.frexp(self.total)[1]))))

    @property
    def limit(self) -> float:
        """Excluded limit of the mass in fixed point."""
        return self.top_p * self.mass * self.scale


@dataclass(frozen=True)
class Found:
    """Where a row's threshold lies.

    Attributes:
        threshold: The smallest value that the goal lets in.
        mass: The mass of the ids from there up, relative to the maximum.
    """

    threshold: float
    mass: float


class _Row:
    """One row under search: this rank's part of it, sorted, and what lies above the part in question on all ranks."""

    def __init__(self, logits: torch.Tensor, groups: torch.Tensor, goal: Goal) -> None:
        self.goal, self.limit = goal, goal.limit
        self.values = _sorted_above(logits, groups, goal)
        weights = fixed_point_weights(self.values, goal)
        # Integers: the sums are exact.
        self.mass_before = torch.nn.functional.pad(weights.cumsum(dim=0), (1, 0))
        self.start, self.stop = 0, len(self.values)
        self.count_above, self.mass_above = 0.0, 0.0
        self.remaining = float("inf")
        self.low, self.high = 0.0, 0.0

    @property
    def is_open(self) -> bool:
        return self.high > self.low and self.remaining > _LISTED

    def ends(self) -> tuple[float, float]:
        """Returns the largest value in question on this rank and the negative of the smallest."""
        if self.start == self.stop:
            return _NONE, _NONE
        return float(self.values[self.stop - 1]), -float(self.values[self.start])

    def edges(self, *, by_order: bool) -> torch.Tensor:
        """Returns the lower edges of 64 bins over the values in question, ascending: [64] float32.

        The first rounds cut the range of values evenly. Values that crowd at many scales would take many such rounds,
        so later ones cut the order of float32 itself: 32 bits, six a round.
        """
        share = np.arange(_BINS, dtype=np.float64) / _BINS
        if not by_order:
            edges = (self.low + share * (self.high - self.low)).astype(np.float32)
        else:
            low, high = _order(np.float32(self.low)), _order(np.float32(self.high))
            edges = _from_order(low + np.ceil(share * (high - low)).astype(np.int64))
        return torch.from_numpy(edges)

    def places(self, edges: torch.Tensor) -> torch.Tensor:
        """Returns where the bins begin in this rank's sorted values, and where the last ends: [65] int64."""
        inside = self.values[self.start : self.stop]
        places = torch.searchsorted(inside, edges.to(inside.device)) + self.start
        return torch.nn.functional.pad(places, (0, 1), value=self.stop)


def find_thresholds(
    group: SliceGroup, slices: Sequence[torch.Tensor], groups: Sequence[torch.Tensor], goals: Sequence[Goal]
) -> list[Found]:
    """Returns each row's threshold, the same on every rank.

    Every rank of the group calls it with the same goals. A round costs one reduction of two numbers and one of
    2 · 64 numbers per row; three rounds settle ordinary rows, ten any row.

    Args:
        group: The ranks.
        slices: This rank's logits of each row, [Vs] float32.
        groups: Their largest values per run of 32 ids, [Vs/32] float32.
        goals: What the rows look for; every row has a finite value somewhere.
    """
    rows = [_Row(*parts) for parts in zip(slices, groups, goals, strict=True)]
    round_index = 0
    while rows:
        _agree_on_range(group, rows)
        open_rows = [row for row in rows if row.is_open]
        if not open_rows:
            break
        _narrow(group, open_rows, by_order=round_index >= _LINEAR_ROUNDS)
        round_index += 1
    return _search_lists(group, rows) if rows else []


def fixed_point_weights(values: torch.Tensor, goal: Goal) -> torch.Tensor:
    """Returns the weights exp((z − maximum) / T) in fixed point, float64."""
    weights = (values - goal.maximum).mul_(1.0 / goal.temperature).exp_()
    return weights.to(torch.float64).mul_(goal.scale).floor_()


def _sorted_above(logits: torch.Tensor, groups: torch.Tensor, goal: Goal) -> torch.Tensor:
    """Returns this rank's values that can matter, ascending: those from the goal's floor up, [n] float32.

    With k ids of its own from some value up, a rank knows that no smaller one is in S_k. Groups whose maximum is below
    the floor are not read.
    """
    floor = goal.floor
    if goal.top_k <= len(groups):
        floor = max(floor, float(groups.topk(int(goal.top_k)).values[-1]))
    chosen = (groups >= floor).nonzero().squeeze(1)
    values = logits if len(chosen) == len(groups) else logits.view(-1, GROUP_LENGTH)[chosen].flatten()
    # numpy sorts float32 several times faster than torch does on a CPU.
    ascending = torch.from_numpy(np.sort(values.numpy())) if values.device.type == "cpu" else values.sort().values
    finite = torch.searchsorted(ascending, _NONE, right=True)
    return ascending[max(int(finite), int(torch.searchsorted(ascending, floor))) :]


def _agree_on_range(group: SliceGroup, rows: Sequence[_Row]) -> None:
    """Sets each row's smallest and largest value in question, over all ranks."""
    ends = torch.tensor([row.ends() for row in rows], dtype=torch.float32, device=rows[0].values.device)
    for row, (high, negated_low) in zip(rows, group.all_reduce_max_(ends).tolist(), strict=True):
        row.high, row.low = high, -negated_low


def _narrow(group: SliceGroup, rows: Sequence[_Row], *, by_order: bool) -> None:
    """Narrows each row to the one bin that holds its threshold."""
    places = torch.stack([row.places(row.edges(by_order=by_order)) for row in rows])
    masses = torch.stack([row.mass_before[place].diff() for row, place in zip(rows, places, strict=True)])
    histograms = torch.stack((places.diff(dim=1).to(torch.float64), masses), dim=1).flip(-1)
    group.all_reduce_sum_(histograms)
    # From the largest bin down; sums of integers below 2**53, so exact in any order.
    above = histograms.cumsum(dim=-1) - histograms
    for row, place, own, before in zip(rows, places.tolist(), histograms.tolist(), above.tolist(), strict=True):
        chosen = 0
        for index in range(_BINS):
            count, mass = row.count_above + before[0][index], row.mass_above + before[1][index]
            if count >= row.goal.top_k or mass >= row.limit:
                break
            if own[0][index]:
                chosen = index
        row.count_above += before[0][chosen]
        row.mass_above += before[1][chosen]
        row.remaining = own[0][chosen]
        row.start, row.stop = place[_BINS - 1 - chosen], place[_BINS - chosen]


def _order(value: np.float32) -> int:
    """Returns an integer in the same order as float32 values, both zeros alike."""
    bits = int((value + np.float32(0)).view(np.int32))
    return bits if bits >= 0 else -(bits & 0x7FFFFFFF)


def _from_order(order: np.ndarray[tuple[int], np.dtype[np.int64]]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Returns the float32 values that ``_order`` maps to these integers."""
    magnitude = np.abs(order).astype(np.int32).view(np.float32)
    return np.where(order < 0, -magnitude, magnitude).astype(np.float32)


def _search_lists(group: SliceGroup, rows: Sequence[_Row]) -> list[Found]:
    """Returns the thresholds: the one value left, or the right one in the short list that is left."""
    device = rows[0].values.device
    lists = torch.full((len(rows), _LISTED), _NONE, dtype=torch.float32, device=device)
    masses = torch.zeros(len(rows), dtype=torch.float64, device=device)
    for index, row in enumerate(rows):
        if row.high > row.low:
            lists[index, : row.stop - row.start] = row.values[row.start : row.stop]
        else:
            lists[index, 0] = row.high
            masses[index] = row.mass_before[row.stop] - row.mass_before[row.start]
    merged = group.all_gather(lists).transpose(0, 1).reshape(len(rows), -1)
    group.all_reduce_sum_(masses)
    values = merged.sort(dim=1, descending=True).values[:, :_LISTED].contiguous()
    found = []
    for row, listed, mass in zip(rows, values, masses.tolist(), strict=True):
        if row.high == row.low:
            found.append(Found(row.high, (row.mass_above + mass) / row.goal.scale))
            continue
        weights = fixed_point_weights(listed, row.goal)
        count, greater = (part.squeeze(0) for part in strictly_greater(listed.unsqueeze(0), weights.unsqueeze(0)))
        inside = (row.count_above + count < row.goal.top_k) & (row.mass_above + greater < row.limit)
        inside &= listed > _NONE
        inside_mass = row.mass_above + float(weights[inside].sum())
        found.append(Found(float(listed[inside].min()), inside_mass / row.goal.scale))
    return found
