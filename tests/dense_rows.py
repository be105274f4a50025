"""One row's logits by definition, on the whole vocabulary: what slices are judged by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from sampler.params import RowSampling


def processed_logits(
    logits: torch.Tensor, row: RowSampling, position: int, allowed: Sequence[int] | None = None
) -> torch.Tensor:
    """Returns what is drawn from before the filters, [V] float64, from the model's output [V]: DESIGN 4.1, 3 to 7."""
    params, values = row.params, logits.to(torch.float64)
    counts = Counter(row.output_ids)
    for token_id, count in counts.items():
        values[token_id] -= params.frequency_penalty * count + params.presence_penalty
    if position < params.min_tokens:
        values[list(row.stop_ids)] = float("-inf")
    for token_id in {*row.prompt_ids, *row.output_ids} if params.repetition_penalty != 1 else set():
        value = values[token_id]
        values[token_id] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token_id, bias in (params.logit_bias or {}).items():
        values[token_id] += bias
    kept = set(range(len(values))) - set(params.banned_token_ids)
    if params.allowed_token_ids is not None:
        kept &= set(params.allowed_token_ids)
    for word in row.bad_words_token_ids:
        if tuple(row.output_ids[len(row.output_ids) - len(word) + 1 :]) == word[:-1]:
            kept.discard(word[-1])
    if allowed is not None:
        kept &= set(allowed)
    banned = torch.ones(len(values), dtype=torch.bool)
    banned[sorted(kept)] = False
    values[banned] = float("-inf")
    return values if params.is_greedy else values / params.temperature
