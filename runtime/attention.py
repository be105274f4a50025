"""Causal attention of a packed batch over the KV cache: full or within a sliding window, grouped query heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from runtime.kv_cache import KVCache, Span


class Visible(NamedTuple):
    """What the queries of one span see: positions from ``first`` on, by ``mask`` [length, total_length − first].

    Without a mask a span of one query sees all of them, a longer one starts at ``first`` and sees them causally.
    """

    first: int
    mask: torch.Tensor | None


def visible(spans: Sequence[Span], window: int | None, device: torch.device) -> list[Visible]:
    """Returns what each span sees; the same for all layers of one window.

    Args:
        spans: The sequences of a batch.
        window: How many positions a token sees, its own included; None is all.
        device: Where masks are made.
    """
    return [_visible(span, window, device) for span in spans]


def _visible(span: Span, window: int | None, device: torch.device) -> Visible:
    first = 0 if window is None else max(span.context_length - window + 1, 0)
    if span.length == 1:
        return Visible(first, None)
    if span.context_length == 0 and (window is None or span.length <= window):
        return Visible(0, None)
    queries = torch.arange(span.context_length, span.total_length, device=device).unsqueeze(1)
    keys = torch.arange(first, span.total_length, device=device)
    mask = keys <= queries
    return Visible(first, mask if window is None else mask & (keys > queries - window))


def attend(
    queries: torch.Tensor, cache: KVCache, layer: int, spans: Sequence[Span], seen: Sequence[Visible]
) -> torch.Tensor:
    """Returns the attention output of each query over its own sequence, a fresh [T, heads, head_dim].

    Args:
        queries: [T, heads, head_dim], rotated; heads that share a KV head are neighbours.
        cache: Holds the spans' own keys and values already.
        layer: Which of the stage's layers, from 0.
        spans: The sequences of the batch; they cover all T rows.
        seen: What ``visible`` returned for these spans and this layer's window.
    """
    output = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    for span, (first, mask) in zip(spans, seen, strict=True):
        keys, values = cache.read(layer, span, first)
        rows = queries[span.start : span.stop]
        if span.length == 1:
            # The query heads of a KV head take the place of query positions: no key or value is repeated.
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
    return output
