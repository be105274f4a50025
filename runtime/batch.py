"""The packed batch that one step runs through the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from runtime.kv_cache import Span


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of one sequence that a step runs.

    Attributes:
        sequence_id: Which sequence.
        token_ids: The tokens, in order.
        context_length: How many of the sequence's tokens came before.
        logit_rows: How many of them, from the last one back, need logits.
    """

    sequence_id: int
    token_ids: Sequence[int]
    context_length: int
    logit_rows: int


@dataclass(frozen=True)
class ForwardBatch:
    """Tokens of several sequences, packed in T rows; the same on every rank.

    Attributes:
        token_ids: [T] int64.
        positions: [T] int64, of each token in its sequence.
        max_position: The largest position.
        spans: Whose rows are whose, in row order.
        sample_rows: [S] int64, the rows that need logits, ascending.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    max_position: int
    spans: tuple[Span, ...]
    sample_rows: torch.Tensor


def pack(chunks: Sequence[Chunk], device: torch.device) -> ForwardBatch:
    """Returns ``chunks``, at least one token each, as one batch on ``device``."""
    token_ids: list[int] = []
    positions: list[int] = []
    spans: list[Span] = []
    sample_rows: list[int] = []
    for chunk in chunks:
        span = Span(chunk.sequence_id, len(token_ids), len(chunk.token_ids), chunk.context_length)
        spans.append(span)
        token_ids.extend(chunk.token_ids)
        positions.extend(range(span.context_length, span.total_length))
        sample_rows.extend(range(span.stop - chunk.logit_rows, span.stop))
    return ForwardBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        max_position=max(positions),
        spans=tuple(spans),
        sample_rows=torch.tensor(sample_rows, dtype=torch.int64, device=device),
    )
