"""Causal attention of a packed batch over the KV pool: full or within a sliding window, grouped query heads.

A sequence whose slots are neighbours is read in place. Decoding sequences that begin with the same blocks read those
once, all their queries together, and each reads its own after that; the parts are weighed by their log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch.nn import functional

from runtime.kv_cache import KVCache, Runs, Span, cut_runs

_LEAST_SAVED_TOKENS = 512
_MOST_OWN_PARTS = 3
_LEAST_PART_TOKENS = 256


class AloneSpan(NamedTuple):
    """A span that is attended by itself: it sees ``runs`` by ``mask`` [length, tokens of the runs].

    Without a mask a span of one query sees all of them, a longer one sees them causally.
    """

    span: Span
    runs: Runs
    mask: torch.Tensor | None


class DecodeSpan(NamedTuple):
    """A span of one query that sees all of one run, in place: ``views`` has keys and values as ``KVCache.views``."""

    row: int
    views: tuple[torch.Tensor, ...]


class Part(NamedTuple):
    """What some decoding sequences see all of: ``runs``; they are ``start`` to ``stop`` among the split ones.

    ``depth`` counts the parts of a sequence.
    """

    runs: Runs
    start: int
    stop: int
    depth: int


class Seen(Protocol):
    """What the queries of a batch see in the layers of one window."""

    def attend(self, queries: torch.Tensor, cache: KVCache, layer: int) -> torch.Tensor:
        """Returns the attention output of each query over its own sequence, a fresh [T, heads, head_dim].

        Args:
            queries: [T, heads, head_dim], rotated; heads that share a KV head are neighbours.
            cache: Holds the spans' own keys and values already.
            layer: Which of the stage's layers, from 0.
        """


@dataclass(frozen=True)
class Visible:
    """What the queries of a batch see in the layers of one window.

    Attributes:
        alone: The spans that are attended one by one.
        decodes: Those of one query that read their keys and values in place.
        split_rows: [P] int64, the rows of decoding sequences that are attended in parts; None when there is none.
        parts: The parts.
        depth: The most parts of a sequence.
    """

    alone: tuple[AloneSpan, ...]
    decodes: tuple[DecodeSpan, ...] = ()
    split_rows: torch.Tensor | None = None
    parts: tuple[Part, ...] = ()
    depth: int = 0

    def attend(self, queries: torch.Tensor, cache: KVCache, layer: int) -> torch.Tensor:
        """Returns the attention output of each query."""
        return attend(queries, cache, layer, self)


def visible(spans: Sequence[Span], window: int | None, cache: KVCache, device: torch.device) -> Visible:
    """Returns what the spans of a batch see; the same for all layers of one window.

    Args:
        spans: The sequences of a batch.
        window: How many positions a token sees, its own included; None is all.
        cache: Where their keys and values are.
        device: Where masks are made.
    """
    groups = _groups(spans) if window is None and device.type == "cpu" else []
    grouped = {span.start for group, _ in groups for span in group}
    alone: list[AloneSpan] = []
    decodes: list[DecodeSpan] = []
    for span in spans:
        if span.start in grouped:
            continue
        one = _alone(span, window, device)
        if span.length == 1 and len(one.runs) == 1:
            decodes.append(DecodeSpan(span.start, cache.views(*one.runs[0])))
        else:
            alone.append(one)
    if not groups:
        return Visible(tuple(alone), tuple(decodes))
    rows: list[int] = []
    parts: list[Part] = []
    depth = 0
    for group, shared in groups:
        first = len(rows)
        rows += [span.start for span in group]
        if shared:
            parts.append(Part(((group[0].runs[0][0], shared),), first, first + len(group), 0))
        for at, span in enumerate(group, first):
            own = _own_parts(cut_runs(span.runs, shared))
            parts += [Part(runs, at, at + 1, index) for index, runs in enumerate(own, int(shared > 0))]
            depth = max(depth, len(own) + int(shared > 0))
    split_rows = torch.tensor(rows, dtype=torch.int64, device=device)
    return Visible(tuple(alone), tuple(decodes), split_rows, tuple(parts), depth)


def _groups(spans: Sequence[Span]) -> list[tuple[list[Span], int]]:
    """Returns the decoding sequences that are attended in parts, by what they share, with how many tokens that is."""
    by_slot: dict[int, list[Span]] = {}
    for span in spans:
        if span.length == 1:
            by_slot.setdefault(span.runs[0][0], []).append(span)
    groups: list[tuple[list[Span], int]] = []
    for members in by_slot.values():
        shared = min(span.runs[0][1] for span in members)
        if (len(members) - 1) * shared >= _LEAST_SAVED_TOKENS:
            groups.append((members, shared))
        else:
            groups += [([span], 0) for span in members if len(_own_parts(span.runs)) > 1]
    return groups


def _own_parts(runs: Runs) -> list[Runs]:
    """Returns the runs of a sequence one by one, or together where copying them costs less than so many parts."""
    if not runs:
        return []
    if len(runs) > _MOST_OWN_PARTS or sum(length for _, length in runs) < _LEAST_PART_TOKENS:
        return [runs]
    return [(run,) for run in runs]


def _alone(span: Span, window: int | None, device: torch.device) -> AloneSpan:
    first = 0 if window is None else max(span.context_length - window + 1, 0)
    runs = cut_runs(span.runs, first)
    if span.length == 1 or (span.context_length == 0 and (window is None or span.length <= window)):
        return AloneSpan(span, runs, None)
    queries = torch.arange(span.context_length, span.total_length, device=device).unsqueeze(1)
    keys = torch.arange(first, span.total_length, device=device)
    mask = keys <= queries
    return AloneSpan(span, runs, mask if window is None else mask & (keys > queries - window))


def attend(queries: torch.Tensor, cache: KVCache, layer: int, seen: Visible) -> torch.Tensor:
    """Returns the attention output of each query over its own sequence, a fresh [T, heads, head_dim].

    Args:
        queries: [T, heads, head_dim], rotated; heads that share a KV head are neighbours.
        cache: Holds the spans' own keys and values already.
        layer: Which of the stage's layers, from 0.
        seen: What ``visible`` returned for the batch and this layer's window.
    """
    if len(seen.decodes) == queries.shape[0]:
        return _attend_decodes(queries, layer, seen.decodes)
    output = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    if seen.decodes:
        decode_rows = [decode.row for decode in seen.decodes]
        output[decode_rows] = _attend_decodes(queries[decode_rows], layer, seen.decodes)
    for span, runs, mask in seen.alone:
        keys, values = cache.read(layer, runs)
        rows = queries[span.start : span.stop]
        if span.length == 1:
            grouped = rows.view(1, keys.shape[1], -1, rows.shape[2])
            one = functional.scaled_dot_product_attention(grouped, keys, values)
            output[span.start] = one.view(rows.shape[1:])
            continue
        many = functional.scaled_dot_product_attention(
            rows.transpose(0, 1).unsqueeze(0),
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=True,
        )
        output[span.start : span.stop] = many[0].transpose(0, 1)
    if seen.split_rows is not None:
        output[seen.split_rows] = _attend_parts(queries[seen.split_rows], cache, layer, seen).to(output.dtype)
    return output


def _attend_decodes(queries: torch.Tensor, layer: int, decodes: Sequence[DecodeSpan]) -> torch.Tensor:
    """Returns the attention output of queries [P, heads, head_dim], one of each span."""
    kv_heads, head_dim = decodes[0].views[0].shape[1], queries.shape[2]
    # The query heads of a KV head take the place of query positions: no key or value is repeated.
    rows = queries.view(len(decodes), 1, kv_heads, -1, head_dim).unbind(0)
    attended = [
        functional.scaled_dot_product_attention(row, decode.views[2 * layer], decode.views[2 * layer + 1])
        for row, decode in zip(rows, decodes, strict=True)
    ]
    return torch.cat(attended).view(queries.shape)


def _attend_parts(queries: torch.Tensor, cache: KVCache, layer: int, seen: Visible) -> torch.Tensor:
    """Returns the attention output of queries [P, heads, head_dim] over the parts that each sees, in float32."""
    count, heads, head_dim = queries.shape
    outputs = torch.zeros(seen.depth, count, heads, head_dim, device=queries.device)
    weights = torch.full((seen.depth, count, heads), float("-inf"), device=queries.device)
    for runs, start, stop, depth in seen.parts:
        keys, values = cache.read(layer, runs)
        shape = (stop - start, keys.shape[1], heads // keys.shape[1], head_dim)
        rows = queries[start:stop].view(shape).transpose(0, 1).reshape(1, keys.shape[1], -1, head_dim)
        output, log_sum_exp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(rows, keys, values)  # noqa: SLF001 - the one kernel that tells log-sum-exps
        shape = (shape[1], shape[0], *shape[2:])
        outputs[depth, start:stop] = output.view(shape).transpose(0, 1).reshape(-1, heads, head_dim)
        weights[depth, start:stop] = log_sum_exp.view(shape[:-1]).transpose(0, 1).reshape(-1, heads)
    return outputs.mul_(weights.softmax(dim=0).unsqueeze(-1)).sum(dim=0)
