"""The largest allowed logit of rows with a mask, without applying the mask to the whole slice."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sampler.adjust import apply_mask_
from sampler.slices import GROUP_LENGTH, largest_places

_RUNS = 64
_NONE = float("-inf")


@dataclass(frozen=True)
class MaskedLargest:
    """The largest allowed value of each row, where the runs that were looked at prove it.

    Attributes:
        maxima: [B] float32.
        columns: [B] int64, the smallest column among the largest; 0 when there is none.
        proven: [B] bool, whether no other run can hold such a value; the rest holds for such rows only.
    """

    maxima: torch.Tensor
    columns: torch.Tensor
    proven: torch.Tensor


def masked_largest(
    logits: torch.Tensor, groups: torch.Tensor, mask_words: torch.Tensor, table: torch.Tensor
) -> MaskedLargest:
    """Looks for it in the runs of 32 ids with the largest values, allowed or not, among those that allow any id.

    Args:
        logits: [B, Vs] float32, without NaN, the mask not applied.
        groups: [B, Vs/32] float32, the largest value of each run of 32 ids, allowed or not.
        mask_words: [B, Vs/32] int32.
        table: From ``mask_table``.
    """
    rows = torch.arange(len(logits), device=logits.device).unsqueeze(1)
    bounds = groups.masked_fill(mask_words == 0, _NONE)
    chosen = largest_places(bounds, min(_RUNS, groups.shape[1]))
    members = logits.view(*groups.shape, GROUP_LENGTH)[rows, chosen].view(len(logits), -1)
    apply_mask_(members, mask_words.gather(1, chosen), table)
    maxima = members.amax(dim=1)
    columns = (chosen.unsqueeze(2) * GROUP_LENGTH + torch.arange(GROUP_LENGTH, device=logits.device)).flatten(1)
    is_largest = members == maxima.unsqueeze(1)
    column = torch.where(is_largest, columns, logits.shape[1]).amin(dim=1)
    others = bounds.gather(1, chosen).amin(dim=1)
    proven = (maxima > others) | (others == _NONE) | (chosen.shape[1] == groups.shape[1])
    return MaskedLargest(maxima, torch.where(maxima > _NONE, column, 0), proven)
