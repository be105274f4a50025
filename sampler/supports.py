"""The ids that rows may draw, put together from the slices."""

from __future__ import annotations

import torch

from sampler.group import SliceGroup

_NONE = float("-inf")


def gather_supports(
    group: SliceGroup,
    slice_start: int,
    logits: torch.Tensor,
    floors: torch.Tensor,
    *,
    limit: int,
) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
    """Returns each row's ids and values from its floor up, of all ranks; None where there are more than ``limit``.

    Every rank of the group calls it. Two all_gathers, of the counts and of what was found.

    Args:
        group: The ranks.
        slice_start: The id of the first column.
        logits: [N, Vs] float32, after all changes.
        floors: [N] float32, the smallest value in the support.
        limit: Most ids of a row.

    Returns:
        [S] int64, ascending, and [S] float32 a row.
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
