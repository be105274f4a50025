"""The packed batch that one step runs through the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from runtime.kv_blocks import BlockTable, KVCacheError
from runtime.kv_cache import Runs, Span, cut_runs


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of one sequence that a step runs.

    Attributes:
        sequence_id: Which sequence.
        token_ids: The tokens, in order.
        context_length: How many of the sequence's tokens came before.
        logit_rows: How many of them, from the last one back, need logits.
        table: The sequence's KV blocks, with room for these tokens.
    """

    sequence_id: int
    token_ids: Sequence[int]
    context_length: int
    logit_rows: int
    table: BlockTable


@dataclass(frozen=True)
class ForwardBatch:
    """Tokens of several sequences, packed in T rows; the same on every rank.

    Attributes:
        token_ids: [T] int64.
        positions: [T] int64, of each token in its sequence.
        slots: [T] int64, where each token's keys and values go.
        max_position: The largest position.
        spans: Whose rows are whose, in row order.
        sample_rows: [S] int64, the rows that need logits, ascending.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    max_position: int
    spans: tuple[Span, ...]
    sample_rows: torch.Tensor


def pack(chunks: Sequence[Chunk], block_tokens: int, device: torch.device) -> ForwardBatch:
    """Returns ``chunks``, at least one token each, as one batch on ``device``; a KV block has ``block_tokens``."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    spans: list[Span] = []
    sample_rows: list[int] = []
    for chunk in chunks:
        first, stop = chunk.context_length, chunk.context_length + len(chunk.token_ids)
        runs = _runs(chunk.table, stop, block_tokens)
        span = Span(chunk.sequence_id, len(token_ids), len(chunk.token_ids), first, runs)
        spans.append(span)
        token_ids.extend(chunk.token_ids)
        positions.extend(range(first, stop))
        for slot, length in cut_runs(runs, first):
            slots.extend(range(slot, slot + length))
        sample_rows.extend(range(span.stop - chunk.logit_rows, span.stop))
    return ForwardBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        slots=torch.tensor(slots, dtype=torch.int64, device=device),
        max_position=max(positions),
        spans=tuple(spans),
        sample_rows=torch.tensor(sample_rows, dtype=torch.int64, device=device),
    )


def _runs(table: BlockTable, tokens: int, block_tokens: int) -> Runs:
    """Returns the slots of a sequence's first ``tokens`` tokens.

    Raises:
        KVCacheError: Its blocks have no room for so many.
    """
    if tokens > len(table) * block_tokens:
        raise KVCacheError(
            f"sequence {table.owner} needs {tokens} positions, its {len(table)} blocks have {len(table) * block_tokens}"
        )
    runs = []
    for first, count in table.runs:
        if tokens <= 0:
            break
        runs.append((first * block_tokens, min(count * block_tokens, tokens)))
        tokens -= count * block_tokens
    return tuple(runs)
