"""Which ids may be drawn: every filter is a threshold, so the support is {z ≥ the highest threshold}.

S_k, S_p and S_m are all upper sets of the row's order (ties all in or all out), hence nested; their intersection is the
smallest of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowFilters:
    """The filters of N rows as limits on an id with value z, of which the support is the conjunction.

    Attributes:
        top_k: [N] float64, most ids that may be strictly greater, excluded; inf = off.
        top_p: [N] float64, most mass that may be strictly greater, excluded, as a share; inf = off.
        lowest: [N] float64, the smallest value that min_p lets in; −inf = off.
        renormalised: [N] bool, whether top_p's share is of the mass in S_k instead of the whole mass.
    """

    top_k: torch.Tensor
    top_p: torch.Tensor
    lowest: torch.Tensor
    renormalised: torch.Tensor

    @classmethod
    def of(
        cls,
        *,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        top_k_first: torch.Tensor,
        maxima: torch.Tensor,
        temperature: torch.Tensor,
    ) -> RowFilters:
        """Returns the limits from the parameters and the rows' largest values, [N] each."""
        infinity = torch.full_like(top_p, float("inf"))
        limit_k = torch.where(top_k > 0, top_k.to(torch.float64), infinity)
        limit_p = torch.where(top_p < 1, top_p, infinity)
        # min_p = 0 gives −inf; min_p = 1 the maximum itself, exactly.
        lowest = maxima.to(torch.float64) + temperature * min_p.log()
        return cls(limit_k, limit_p, lowest, top_k_first & (top_k > 0) & (top_p < 1))

    def take(self, index: torch.Tensor) -> RowFilters:
        """Returns the filters of some of the rows."""
        return RowFilters(self.top_k[index], self.top_p[index], self.lowest[index], self.renormalised[index])


@dataclass(frozen=True)
class Decision:
    """What the merged candidates say about N rows.

    Attributes:
        settled: [N] bool, whether they prove the support; the rest holds for such rows only.
        inside: [N, C] bool, which candidates are in the support.
        threshold: [N] float32, the smallest value in the support.
        weights: [N, C] float64, exp((z − maximum) / T).
        kept_by_k: [N] bool, whether the candidates prove S_k.
    """

    settled: torch.Tensor
    inside: torch.Tensor
    threshold: torch.Tensor
    weights: torch.Tensor
    kept_by_k: torch.Tensor


def decide(
    values: torch.Tensor,
    filters: RowFilters,
    *,
    maxima: torch.Tensor,
    temperature: torch.Tensor,
    total: torch.Tensor,
) -> Decision:
    """Returns the supports that the candidates prove.

    Everything here depends on the row alone. Of a row's largest values only those above the smallest candidate are
    known to be complete, so a support is proven when that smallest one is outside it.

    Args:
        values: [N, C] float32, the C largest values, descending; −inf fills up.
        filters: The rows' filters.
        maxima: [N] float32, finite.
        temperature: [N] float64.
        total: [N] float64, the mass of all ids relative to the maximum; any number for rows whose top_p is off or
            renormalised.
    """
    weights = relative_weights(values, maxima, temperature)
    greater_count, greater_mass = strictly_greater(values, weights)
    in_k = greater_count < filters.top_k.unsqueeze(1)
    exhausted = values[:, -1] == float("-inf")
    kept_by_k = ~in_k[:, -1] | exhausted
    mass = torch.where(filters.renormalised, (weights * in_k).cumsum(dim=1)[:, -1], total)
    in_p = greater_mass < (filters.top_p * mass).unsqueeze(1)
    in_m = values >= filters.lowest.unsqueeze(1)
    inside = in_k & in_p & in_m & (values > float("-inf"))
    settled = ~inside[:, -1] & (kept_by_k | ~filters.renormalised)
    threshold = torch.where(inside, values, float("inf")).amin(dim=1)
    return Decision(settled, inside, threshold, weights, kept_by_k)


def relative_weights(values: torch.Tensor, maxima: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Returns exp((z − maximum) / T) in float64: [N, K] from [N, K], [N], [N]."""
    shifted = values.to(torch.float64) - maxima.to(torch.float64).unsqueeze(1)
    return (shifted / temperature.unsqueeze(1)).exp()


def strictly_greater(values: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns how many of a row's values are strictly greater than each, and their weight: [N, K] int64 and float64.

    Args:
        values: [N, K], descending.
        weights: [N, K] float64.
    """
    position = torch.arange(values.shape[1], device=values.device).expand_as(values)
    starts = torch.ones_like(values, dtype=torch.bool)
    starts[:, 1:] = values[:, 1:] != values[:, :-1]
    first = torch.where(starts, position, 0).cummax(dim=1).values
    before = torch.nn.functional.pad(weights.cumsum(dim=1), (1, 0))
    return first, before.gather(1, first)


def pick(weights: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the index drawn by inverse CDF from each row's weights, and where in its interval the number fell.

    An index of weight 0 is never drawn.

    Args:
        weights: [N, K] float64, non-negative, not all 0.
        uniform: [N] float64 in [0, 1).

    Returns:
        [N] int64, and [N] float64 in [0, 1).
    """
    index, fraction = pick_many(weights, uniform.unsqueeze(1))
    return index.squeeze(1), fraction.squeeze(1)


def pick_many(weights: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what ``pick`` does for M numbers a row: [N, M] int64 and float64 from [N, K] and [N, M] float64."""
    cumulated = weights.cumsum(dim=1)
    total = cumulated[:, -1:].contiguous()
    target = uniform * total
    # The product may round up to the total; the last index with any weight is the first to reach it.
    index = torch.minimum(
        torch.searchsorted(cumulated, target, right=True), torch.searchsorted(cumulated, total, right=False)
    )
    before = torch.nn.functional.pad(cumulated, (1, 0)).gather(1, index)
    fraction = (target - before) / weights.gather(1, index)
    return index, fraction.clamp(0.0, 1.0 - 2.0**-53)
