"""The largest allowed logit of rows with a mask, without applying the mask to the whole slice."""

from __future__ import annotations

import torch

from sampler.adjust import apply_mask_
from sampler.slices import GROUP_LENGTH, first_largest, largest_in_blocks, true_places

_BLOCKS = 4
_NONE = float("-inf")


def masked_largest(
    logits: torch.Tensor, block_maxima: torch.Tensor, mask_words: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns each row's largest allowed value and the smallest column that has it: [B] float32 and int64.

    Only the blocks with the largest values, allowed or not, among those that allow any id are read. A row in which
    another block may hold as large an allowed value is looked at again. −inf and column 0 where no id is allowed.

    Args:
        logits: [B, Vs] float32, the mask not applied.
        block_maxima: [B, nb] float32, the largest value of each block, allowed or not; −inf throughout a row whose
            result does not matter.
        mask_words: [B, Vs/32] int32.
        table: From ``mask_table``.
    """
    rows, blocks = block_maxima.shape
    mask_words = mask_words.contiguous()
    words = mask_words.view(rows, blocks, -1)
    bounds = block_maxima.masked_fill(~words.any(dim=-1), _NONE)
    largest = bounds.topk(min(_BLOCKS + 1, blocks), dim=1)
    # Ascending, so that the first of the largest values has the smallest column.
    chosen = largest.indices[:, :_BLOCKS].sort(dim=1).values
    looked = chosen.shape[1]
    place = (chosen + torch.arange(rows, device=logits.device).unsqueeze(1) * blocks).view(-1)
    members = logits.view(rows * blocks, -1).index_select(0, place).view(rows, -1)
    apply_mask_(members, mask_words.view(rows * blocks, -1).index_select(0, place), table)
    member_maxima = largest_in_blocks(members, looked)
    maxima, offset = member_maxima.amax(dim=1), first_largest(members, member_maxima)
    length = members.shape[1] // looked
    columns = chosen.gather(1, (offset // length).unsqueeze(1)).squeeze(1) * length + offset % length
    if looked < blocks:
        others = largest.values[:, looked]
        for row in ((maxima <= others) & (others > _NONE)).nonzero().squeeze(1).tolist():
            able = (words[row] != 0) & (bounds[row] >= maxima[row]).unsqueeze(1)
            maxima[row], columns[row] = _largest_in_runs(logits[row], mask_words[row], able.view(-1), table)
    return maxima, columns.masked_fill(maxima == _NONE, 0)


def _largest_in_runs(
    logits: torch.Tensor, mask_words: torch.Tensor, able: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns one row's largest allowed value in some runs of 32 ids and its smallest column there.

    Args:
        logits: [Vs] float32.
        mask_words: [Vs/32] int32.
        able: [Vs/32] bool, the runs; at least one.
        table: From ``mask_table``.
    """
    runs = true_places(able)
    members = logits.view(-1, GROUP_LENGTH).index_select(0, runs)
    apply_mask_(members, mask_words.index_select(0, runs), table)
    largest = members.amax()
    first = (members.view(-1) == largest).nonzero()[0, 0]
    return largest, runs[first // GROUP_LENGTH] * GROUP_LENGTH + first % GROUP_LENGTH
