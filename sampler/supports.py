"""The ids that rows may draw, put together from the slices, for rows that want to know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from sampler.group import SliceGroup
from sampler.support import relative_weights
from sampler.truncation import Step

_NONE = float("-inf")


class RowStatus(IntEnum):
    """How a row's step went; the larger is the worse, and ranks agree on the largest."""

    OK = 0
    OVERFLOW = 1
    INVALID = 2


@dataclass(frozen=True)
class RowSupport:
    """What may be drawn in one row.

    Attributes:
        status: How the row went; a row that is INVALID or whose support is too large to report has no ids.
        ids: [S] int64, ascending.
        probabilities: [S] float64, renormalised over the support.
        logprobs: [S] float64, their logarithms.
    """

    status: RowStatus
    ids: torch.Tensor
    probabilities: torch.Tensor
    logprobs: torch.Tensor


def report_supports(
    group: SliceGroup, slice_start: int, step: Step, rows: Sequence[int], floors: torch.Tensor, *, limit: int
) -> list[RowSupport]:
    """Returns the supports of some rows; every rank of the group calls it.

    Args:
        group: The ranks.
        slice_start: The id of the slice's first column.
        step: The step.
        rows: The rows.
        floors: [B] float32, the smallest value in the support; any for greedy rows.
        limit: Most ids to report of a row; with more its status is OVERFLOW.
    """
    index = torch.tensor(list(rows), dtype=torch.int64, device=floors.device)
    # A greedy row's support is known: nothing is gathered for it, nor for one that cannot be drawn.
    floors = torch.where(step.sampled, floors, float("inf"))[index]
    gathered = _gather_above(group, slice_start, step.logits[index], floors, limit)
    none = floors.new_empty(0, dtype=torch.float64)
    supports = []
    for row, found in zip(rows, gathered, strict=True):
        one = slice(row, row + 1)
        if int(step.reasons[row]) or found is None:
            status = RowStatus.INVALID if int(step.reasons[row]) else RowStatus.OVERFLOW
            supports.append(RowSupport(status, none.to(torch.int64), none, none))
            continue
        ids, values = (step.facts.largest_ids[one], step.facts.maxima[one]) if step.batch.greedy[row] else found
        maximum, temperature = step.facts.maxima[one], step.batch.temperature[one]
        weights = relative_weights(values.unsqueeze(0), maximum, temperature).squeeze(0)
        # Summed one after the other: a plain sum of one long row is split over threads.
        total = weights.cumsum(dim=0)[-1:]
        logprobs = (values.to(torch.float64) - maximum) / temperature - total.log()
        supports.append(RowSupport(RowStatus.OK, ids, weights / total, logprobs))
    return supports


def _gather_above(
    group: SliceGroup, slice_start: int, logits: torch.Tensor, floors: torch.Tensor, limit: int
) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
    """Returns each row's ids and values from its floor up, of all ranks; None where there are more than ``limit``.

    Two all_gathers, of the counts and of what was found: [S] int64, ascending, and [S] float32 a row.
    """
    above = (logits >= floors.unsqueeze(1)) & (logits > _NONE)
    counts = group.all_gather(above.sum(dim=1))
    fits = counts.sum(dim=0) <= limit
    row, column = (above & fits.unsqueeze(1)).nonzero(as_tuple=True)
    counts = torch.where(fits, counts, 0)
    padded = torch.zeros((2, int(counts.sum(dim=1).max())), dtype=torch.int32, device=logits.device)
    padded[0, : len(row)] = (column + slice_start).to(torch.int32)
    padded[1, : len(row)] = logits[row, column].view(torch.int32)
    by_rank = [
        table[:, : int(own.sum())].split(own.tolist(), dim=1)
        for table, own in zip(group.all_gather(padded), counts, strict=True)
    ]
    merged = [torch.cat(parts, dim=1) for parts in zip(*by_rank, strict=True)]
    return [
        (table[0].to(torch.int64), table[1].contiguous().view(torch.float32)) if fit else None
        for table, fit in zip(merged, fits.tolist(), strict=True)
    ]
