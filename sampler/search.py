"""The exact rounds for rows whose largest candidates do not prove the support.

Every rank takes what it holds of such a row from a floor up, sorted, and asks, round by round, how many ids and what
mass lie between 64 edges; the sums over the ranks say between which two the threshold lies, and the next round looks
there. The floor is a guess from a sample: exact counts prove it low enough, or a safe one replaces it. Weights are
fixed-point numbers (integers held in float64, their sums below 2**53), so that every sum is exact: no order of
summation, hence no tp_size and no guess, can change a decision. Counts are exact anyway.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from sampler.group import SliceGroup
from sampler.slices import GROUP_LENGTH, SliceShape, true_places
from sampler.support import strictly_greater

_BINS = 64
_LISTED = 256
_LINEAR_ROUNDS = 4
_SHORTENED = 64
_TILE_ROWS = 8
_MARGIN = 1.1
_MASS_MARGIN = 0.15
_NONE = float("-inf")
_OFF = float("inf")
_LOWEST = torch.finfo(torch.float32).min
_ALL = slice(None)


@dataclass(frozen=True)
class Goals:
    """What N rows look for: their smallest value with fewer than ``top_k`` ids and less than ``top_p`` mass above it.

    Attributes:
        maxima: [N] float32, the rows' largest values, finite.
        temperature: [N] float64.
        total: [N] float64, the rows' mass relative to the maximum, or a bound above it; sets the fixed-point scale.
        top_k: [N] float64, excluded limit of the count; inf = none.
        limit: [N] float64, excluded limit of the mass relative to the maximum; inf = none.
        floor: [N] float32, a value that the threshold is known not to lie below, or that makes no difference below.
    """

    maxima: torch.Tensor
    temperature: torch.Tensor
    total: torch.Tensor
    top_k: torch.Tensor
    limit: torch.Tensor
    floor: torch.Tensor

    @cached_property
    def scale(self) -> torch.Tensor:
        """[N] float64, fixed-point units of the weight 1: powers of two that keep a row's mass below 2**53 of them."""
        exponent = torch.frexp(self.total).exponent.clamp_min(1)
        return torch.ldexp(torch.ones_like(self.total), 51 - exponent)

    @cached_property
    def inverse_temperature(self) -> torch.Tensor:
        """[N] float32."""
        return (1.0 / self.temperature).to(torch.float32)

    @property
    def fixed_limit(self) -> torch.Tensor:
        """[N] float64, excluded limit of the mass in fixed point."""
        return self.limit * self.scale

    def weights(self, values: torch.Tensor, rows: slice = _ALL) -> torch.Tensor:
        """Returns exp((z − maximum) / T) in fixed point: [R, K] float64 from the rows' [R, K] float32."""
        weights = values - self.maxima[rows].unsqueeze(1)
        weights.mul_(self.inverse_temperature[rows].unsqueeze(1)).exp_()
        return weights.to(torch.float64).mul_(self.scale[rows].unsqueeze(1)).floor_()


@dataclass(frozen=True)
class HeldRow:
    """What this rank holds of one row from a floor up.

    Attributes:
        runs: [r] int64, the runs of 32 ids that were read, ascending.
        places: [n] int64, ascending, where in those runs the values are.
        values: [n] float32.
        ordered: [n] float32, the values ascending.
        mass_before: [n + 1] float64, fixed-point mass of the ordered values before each place.
    """

    runs: torch.Tensor
    places: torch.Tensor
    values: torch.Tensor
    ordered: torch.Tensor
    mass_before: torch.Tensor


@dataclass(frozen=True)
class Held:
    """What this rank holds of N rows, and the number and the fixed-point mass of what all ranks hold: [N] float64."""

    rows: list[HeldRow]
    counts: torch.Tensor
    masses: torch.Tensor

    def block_masses(self, goals: Goals, thresholds: torch.Tensor, shape: SliceShape) -> torch.Tensor:
        """Returns the mass from the thresholds up of each of this rank's blocks, relative to the rows' maxima.

        Returns:
            [N, nb] float64; a sum of integers, scaled: the same in whatever order.
        """
        starts = torch.arange(shape.blocks + 1, device=thresholds.device) * (shape.block_length // GROUP_LENGTH)
        sums = []
        for index, row in enumerate(self.rows):
            weights = goals.weights(row.values.unsqueeze(0), slice(index, index + 1)).squeeze(0)
            weights.masked_fill_(row.values < thresholds[index], 0.0)
            cumulated = torch.nn.functional.pad(weights.cumsum(dim=0), (1, 0))
            first = torch.searchsorted(row.places, torch.searchsorted(row.runs, starts) * GROUP_LENGTH)
            sums.append(cumulated[first].diff())
        return torch.stack(sums) / goals.scale.unsqueeze(1)


@dataclass(frozen=True)
class Found:
    """Where the rows' thresholds lie.

    Attributes:
        threshold: [N] float32, the smallest value that the goal lets in.
        mass: [N] float64, the mass of the ids from there up, relative to the maximum.
    """

    threshold: torch.Tensor
    mass: torch.Tensor


@dataclass(frozen=True)
class Head:
    """The rows' largest values, which all ranks know.

    Attributes:
        count: How many there are.
        smallest: [N] float32, the smallest of them.
        mass: [N] float64, their mass relative to the maximum.
    """

    count: int
    smallest: torch.Tensor
    mass: torch.Tensor


def hold(
    group: SliceGroup,
    logits: torch.Tensor,
    groups: torch.Tensor,
    rows: torch.Tensor,
    goals: Goals,
    *,
    head: Head | None,
    extra_bins: int,
) -> tuple[Held, torch.Tensor]:
    """Returns what the ranks hold of the rows, and in which rows that is too little: [N] bool.

    Every rank of the group calls it with the same goals; up to three collectives of at most 128 numbers per row.

    Args:
        group: The ranks.
        logits: [B, Vs] float32, this rank's slice.
        groups: [B, Vs/32] float32, its largest values per run of 32 ids.
        rows: [N] int64.
        goals: What the rows look for; every row has a finite value somewhere.
        head: What a guess of the floors starts from; None takes safe floors, which are never too high.
        extra_bins: How much lower to guess than the sample says, in 64ths of the way down to the safe floor.
    """
    floors = safe = _safe_floors(group, groups, rows, goals)
    if head is not None:
        floors = _guess(group, logits, groups, rows, goals, safe=safe, head=head, extra_bins=extra_bins)
    held = _take(logits, groups, rows, goals, floors)
    lengths = torch.tensor([len(row.values) for row in held], dtype=torch.float64, device=rows.device)
    totals = torch.stack((lengths, torch.stack([row.mass_before[-1] for row in held])))
    counts, masses = group.all_reduce_sum_(totals)
    lacking = (counts < goals.top_k) & (masses < goals.fixed_limit) & (floors > safe)
    return Held(held, counts, masses), lacking


def find_thresholds(group: SliceGroup, held: Held, goals: Goals) -> Found:
    """Returns the rows' thresholds, the same on every rank.

    Every rank of the group calls it with the same goals. A round costs one reduction of two numbers and one of
    2 · 64 numbers per row; three rounds settle ordinary rows, ten any row.

    Args:
        group: The ranks.
        held: From ``hold``, with goals that are no narrower.
        goals: What the rows look for.
    """
    search = _Search(held, goals)
    for round_index in itertools.count():
        search.agree_on_range(group)
        if not bool(search.is_open.any()):
            break
        search.narrow(group, by_order=round_index >= _LINEAR_ROUNDS)
    return search.result(group)


def _safe_floors(group: SliceGroup, groups: torch.Tensor, rows: torch.Tensor, goals: Goals) -> torch.Tensor:
    """Returns values that no threshold is below: [N] float32, the same on every rank.

    With k runs of 32 ids whose maxima reach some value, at least k ids do.
    """
    floors = goals.floor.clone()
    narrow = (goals.top_k <= groups.shape[1]).nonzero().squeeze(1)
    if len(narrow):
        ordered = _ascending(groups[rows[narrow]])
        place = groups.shape[1] - goals.top_k[narrow].to(torch.int64).unsqueeze(1)
        floors[narrow] = torch.maximum(floors[narrow], ordered.gather(1, place).squeeze(1))
    return group.all_reduce_max_(floors)


def _guess(
    group: SliceGroup,
    logits: torch.Tensor,
    groups: torch.Tensor,
    rows: torch.Tensor,
    goals: Goals,
    *,
    safe: torch.Tensor,
    head: Head,
    extra_bins: int,
) -> torch.Tensor:
    """Returns floors a little below where a sample says that the thresholds lie: [N] float32, the same on every rank.

    Below the head, the sample of a run of 32 ids is its largest value, for itself, and its first, for the others.
    """
    width = (head.smallest - safe) / _BINS
    edges = head.smallest.unsqueeze(1) - width.unsqueeze(1) * torch.arange(1, _BINS + 1, device=rows.device)
    runs = logits.view(*groups.shape, GROUP_LENGTH)
    sampled = torch.zeros((2, len(rows), _BINS), dtype=torch.float64, device=rows.device)
    step = _TILE_ROWS if logits.device.type == "cpu" else len(rows)
    for start in range(0, len(rows), step):
        tile = slice(start, start + step)
        largest, first = groups[rows[tile]], runs[rows[tile], :, 0]
        top = head.smallest[tile].unsqueeze(1)
        for values, below, factor in ((largest, top, 1), (first, torch.minimum(largest, top), GROUP_LENGTH)):
            ordered = _ascending(torch.where(values < below, values, _NONE))
            # Shortened so that the sums are exact.
            masses = goals.weights(ordered, tile).div_(_SHORTENED).floor_().cumsum(dim=1)
            place = torch.searchsorted(ordered, edges[tile])
            sampled[0, tile] += factor * (groups.shape[1] - place)
            sampled[1, tile] += factor * (masses[:, -1:] - torch.nn.functional.pad(masses, (1, 0)).gather(1, place))
    group.all_reduce_sum_(sampled)
    scale = (goals.scale / _SHORTENED).unsqueeze(1)
    mass = sampled[1] + head.mass.unsqueeze(1) * scale
    limit = goals.limit.unsqueeze(1) * scale
    enough = sampled[0] + head.count >= _MARGIN * goals.top_k.unsqueeze(1)
    enough |= mass >= limit + _MASS_MARGIN * (goals.total.unsqueeze(1) * scale - limit).abs()
    place = torch.where(enough, torch.arange(_BINS, device=rows.device), _BINS).amin(dim=1) + 1 + extra_bins
    return torch.where(safe > _NONE, torch.maximum(head.smallest - width * place, safe), safe)


def _take(
    logits: torch.Tensor, groups: torch.Tensor, rows: torch.Tensor, goals: Goals, floors: torch.Tensor
) -> list[HeldRow]:
    """Returns this rank's finite values from the floors up. Runs of ids that have none are not read."""
    held = []
    # Row by row, so that a row stays in the cache.
    for index, (row, floor) in enumerate(zip(rows.tolist(), floors.clamp_min(_LOWEST).tolist(), strict=True)):
        runs = true_places(groups[row] >= floor)
        members = logits[row].view(-1, GROUP_LENGTH).index_select(0, runs).view(-1)
        places = true_places(members >= floor)
        values = members.index_select(0, places)
        ordered = _ascending(values)
        # Integers: the sums are exact.
        weights = goals.weights(ordered.unsqueeze(0), slice(index, index + 1)).squeeze(0)
        mass_before = torch.nn.functional.pad(weights.cumsum(dim=0), (1, 0))
        held.append(HeldRow(runs, places, values, ordered, mass_before))
    return held


def _ascending(values: torch.Tensor) -> torch.Tensor:
    """Returns the values sorted along the last dimension."""
    if values.device.type != "cpu":
        return values.sort(dim=-1).values
    # numpy sorts float32 several times faster than torch does on a CPU.
    return torch.from_numpy(np.sort(values.numpy(), axis=-1))


class _Search:
    """N rows under search: which of this rank's values are in question, and what lies above them on all ranks."""

    def __init__(self, held: Held, goals: Goals) -> None:
        self._held, self._goals, self._limit = held.rows, goals, goals.fixed_limit
        lengths = [len(row.values) for row in held.rows]
        self._start = torch.zeros(len(lengths), dtype=torch.int64, device=goals.maxima.device)
        self._stop = torch.tensor(lengths, dtype=torch.int64, device=goals.maxima.device)
        self._count_above, self._mass_above = torch.zeros_like(held.counts), torch.zeros_like(held.counts)
        self._remaining = held.counts.clone()
        self._low, self._high = torch.zeros_like(goals.maxima), torch.zeros_like(goals.maxima)
        self._longest = torch.zeros_like(goals.maxima)

    @property
    def is_open(self) -> torch.Tensor:
        """[N] bool, whether a row's values in question are too many to list."""
        return (self._high > self._low) & (self._remaining > _LISTED)

    def agree_on_range(self, group: SliceGroup) -> None:
        """Sets each row's smallest and largest value in question, and the most of them that one rank holds."""
        ends = torch.full((3, len(self._held)), _NONE, dtype=torch.float32, device=self._low.device)
        for index, (row, start, stop) in enumerate(self._in_question()):
            if start < stop:
                ends[0, index], ends[1, index] = row.ordered[stop - 1], -row.ordered[start]
        ends[2] = (self._stop - self._start).to(torch.float32)
        self._high, negated_low, self._longest = group.all_reduce_max_(ends)
        self._low = -negated_low

    def narrow(self, group: SliceGroup, *, by_order: bool) -> None:
        """Narrows each open row to the one bin that holds its threshold."""
        edges = self._edges(by_order=by_order)
        places = torch.stack(
            [torch.searchsorted(row.ordered, edge) for row, edge in zip(self._held, edges, strict=True)]
        )
        places = torch.maximum(torch.minimum(places, self._stop.unsqueeze(1)), self._start.unsqueeze(1))
        places = torch.cat((places, self._stop.unsqueeze(1)), dim=1)
        masses = torch.stack([row.mass_before[place] for row, place in zip(self._held, places, strict=True)]).diff(
            dim=1
        )
        rows = self.is_open.nonzero().squeeze(1)
        # From the largest bin down; sums of integers below 2**53, so exact in any order.
        own = torch.stack((places.diff(dim=1).to(torch.float64), masses), dim=1)[rows].flip(-1)
        own = group.all_reduce_sum_(own)
        above = own.cumsum(dim=-1) - own
        count = self._count_above[rows].unsqueeze(1) + above[:, 0]
        mass = self._mass_above[rows].unsqueeze(1) + above[:, 1]
        inside = (count < self._goals.top_k[rows].unsqueeze(1)) & (mass < self._limit[rows].unsqueeze(1))
        index = torch.arange(_BINS, device=rows.device)
        chosen = torch.where(inside & (own[:, 0] > 0), index, 0).amax(dim=1, keepdim=True)
        self._count_above[rows] = count.gather(1, chosen).squeeze(1)
        self._mass_above[rows] = mass.gather(1, chosen).squeeze(1)
        self._remaining[rows] = own[:, 0].gather(1, chosen).squeeze(1)
        self._start[rows] = places[rows].gather(1, _BINS - 1 - chosen).squeeze(1)
        self._stop[rows] = places[rows].gather(1, _BINS - chosen).squeeze(1)

    def _edges(self, *, by_order: bool) -> torch.Tensor:
        """Returns the lower edges of 64 bins over the values in question, ascending: [N, 64] float32.

        The first rounds cut the range of values evenly. Values that crowd at many scales would take many such rounds,
        so later ones cut the order of float32 itself: 32 bits, six a round.
        """
        share = torch.arange(_BINS, dtype=torch.float64, device=self._low.device) / _BINS
        if by_order:
            low, high = _order(self._low).unsqueeze(1), _order(self._high).unsqueeze(1)
            return _from_order(low + (share * (high - low)).ceil().to(torch.int64))
        low, high = self._low.to(torch.float64).unsqueeze(1), self._high.to(torch.float64).unsqueeze(1)
        return (low + share * (high - low)).to(torch.float32)

    def result(self, group: SliceGroup) -> Found:
        """Returns the thresholds: the one value left, or the right one in the short list that is left."""
        one = self._high == self._low
        width = max(1, int(torch.where(one, 0.0, self._longest).amax()))
        listed = torch.full((len(self._held), width), _NONE, dtype=torch.float32, device=one.device)
        tied = torch.zeros_like(self._mass_above)
        for index, ((row, start, stop), alike) in enumerate(zip(self._in_question(), one.tolist(), strict=True)):
            if alike:
                tied[index] = row.mass_before[stop] - row.mass_before[start]
            else:
                listed[index, : stop - start] = row.ordered[start:stop]
        merged = group.all_gather(listed).transpose(0, 1).reshape(len(one), -1)
        group.all_reduce_sum_(tied)
        values = _ascending(merged).flip(1)[:, :_LISTED].contiguous()
        weights = self._goals.weights(values)
        count, greater = strictly_greater(values, weights)
        inside = self._count_above.unsqueeze(1) + count < self._goals.top_k.unsqueeze(1)
        inside &= self._mass_above.unsqueeze(1) + greater < self._limit.unsqueeze(1)
        inside &= values > _NONE
        mass = torch.where(one, tied, torch.where(inside, weights, 0.0).sum(dim=1))
        smallest = torch.where(inside, values, float("inf")).amin(dim=1)
        return Found(torch.where(one, self._high, smallest), (self._mass_above + mass) / self._goals.scale)

    def _in_question(self) -> list[tuple[HeldRow, int, int]]:
        """Returns each row with the places, first and last excluded, of its values in question on this rank."""
        return list(zip(self._held, self._start.tolist(), self._stop.tolist(), strict=True))


def without_limit(goals: Goals, rows: torch.Tensor) -> Goals:
    """Returns the goals with no limit of the mass in the rows where ``rows`` is true."""
    return replace(goals, limit=torch.where(rows, _OFF, goals.limit))


def _order(values: torch.Tensor) -> torch.Tensor:
    """Returns integers in the same order as float32 values, both zeros alike: int64."""
    bits = (values + 0.0).view(torch.int32).to(torch.int64)
    return torch.where(bits >= 0, bits, -(bits & 0x7FFFFFFF))


def _from_order(order: torch.Tensor) -> torch.Tensor:
    """Returns the float32 values that ``_order`` maps to these integers."""
    magnitude = order.abs().to(torch.int32).view(torch.float32)
    return torch.where(order < 0, -magnitude, magnitude)
