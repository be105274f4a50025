"""Ids a request wants never or only: allowed ids, banned ids, bad words. Hard limits, applied right before the mask."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sampler.adjust import SparseRows
from sampler.params import RowSampling

_BAN = float("-inf")


def static_bans(row: RowSampling) -> dict[int, float]:
    """Returns −inf for the ids that a row never draws: banned ids and bad words of one token."""
    words = [word[0] for word in row.bad_words_token_ids if len(word) == 1]
    return dict.fromkeys((*row.params.banned_token_ids, *words), _BAN)


def long_bad_words(row: RowSampling) -> tuple[tuple[int, ...], ...]:
    """Returns a row's bad words of several tokens, whose bans depend on the output."""
    return tuple(word for word in row.bad_words_token_ids if len(word) > 1)


def completing_ids(words: Sequence[tuple[int, ...]], output_ids: Sequence[int]) -> dict[int, float]:
    """Returns −inf for the last id of each word whose ids before it end the output."""
    return {
        word[-1]: _BAN
        for word in words
        if len(output_ids) >= len(word) - 1 and tuple(output_ids[1 - len(word) :]) == word[:-1]
    }


def restrict_(logits: torch.Tensor, allowed: SparseRows, rows: Sequence[int], slice_start: int) -> None:
    """Bans all ids but the allowed ones in some rows.

    Args:
        logits: [B, Vs] float32, contiguous.
        allowed: The allowed ids; the values are not read.
        rows: The rows with allowed ids.
        slice_start: The id of the slice's first column.
    """
    width = logits.shape[1]
    for row in rows:
        columns = allowed.ids[row] - slice_start
        columns = columns[(allowed.ids[row] >= 0) & (columns >= 0) & (columns < width)]
        kept = logits[row, columns]
        # Not a fill: a NaN stays one, and a banned +inf becomes one.
        logits[row].add_(_BAN)
        logits[row, columns] = kept
