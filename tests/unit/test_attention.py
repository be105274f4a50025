"""Attention over runs of slots: whatever the runs, and whoever shares them, each query sees its own tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.attention import attend, visible
from runtime.kv_cache import PagedKVCache, Runs, Span

CPU = torch.device("cpu")
KV_HEADS, HEADS, HEAD_DIM, SLOTS = 3, 6, 8, 4096
ATOL, BFLOAT16_ATOL = 1e-5, 0.03


def new_cache(dtype: torch.dtype = torch.float32) -> PagedKVCache:
    cache = PagedKVCache(1, KV_HEADS, HEAD_DIM, num_blocks=SLOTS, block_tokens=1, dtype=dtype, device=CPU)
    generator = torch.Generator().manual_seed(3)
    keys, values = torch.randn(2, SLOTS, KV_HEADS, HEAD_DIM, generator=generator).to(dtype)
    cache.write(0, torch.arange(SLOTS), keys, values)
    return cache


def expected(queries: torch.Tensor, cache: PagedKVCache, spans: list[Span], window: int | None) -> torch.Tensor:
    """Returns the output by the definition, in float64, token by token."""
    keys, values = (part[0].double() for part in cache.read(0, ((0, SLOTS),)))
    output = torch.zeros(queries.shape, dtype=torch.float64)
    for span in spans:
        slots = [slot for first, length in span.runs for slot in range(first, first + length)]
        for row in range(span.length):
            stop = span.context_length + row + 1
            seen = slots[0 if window is None else max(stop - window, 0) : stop]
            for head in range(HEADS):
                kv_head = head // (HEADS // KV_HEADS)
                scores = keys[kv_head, seen] @ queries[span.start + row, head].double() / HEAD_DIM**0.5
                output[span.start + row, head] = scores.softmax(0) @ values[kv_head, seen]
    return output


def largest_error(spans: list[Span], window: int | None = None, dtype: torch.dtype = torch.float32) -> float:
    """Returns by how much the output differs from that of the definition at most; NaN when it is none."""
    cache = new_cache(dtype)
    queries = torch.randn(spans[-1].stop, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(4)).to(dtype)
    got = attend(queries, cache, 0, visible(spans, window, cache, CPU))
    assert (got.dtype, got.shape) == (dtype, queries.shape)
    return float((got.double() - expected(queries, cache, spans, window)).abs().max())


def spans_of(parts: list[tuple[int, Runs]]) -> list[Span]:
    """Returns spans of so many rows each over these slots."""
    spans: list[Span] = []
    for rows, runs in parts:
        total = sum(length for _, length in runs)
        spans.append(Span(len(spans), spans[-1].stop if spans else 0, rows, total - rows, runs))
    return spans


_run = st.tuples(st.integers(0, 3000), st.integers(1, 90))


@given(
    own=st.lists(st.tuples(st.integers(1, 3), st.lists(_run, min_size=1, max_size=5)), min_size=1, max_size=4),
    shared=st.lists(st.lists(_run, max_size=4), max_size=3),
    prefix=st.integers(1, 300),
    window=st.sampled_from([None, None, 5]),
)
@settings(max_examples=40, deadline=None)
def test_each_query_sees_its_own_tokens(
    own: list[tuple[int, list[tuple[int, int]]]],
    shared: list[list[tuple[int, int]]],
    prefix: int,
    window: int | None,
) -> None:
    parts: list[tuple[int, Runs]] = [(1, ((100, prefix + extra), *rest)) for extra, rest in enumerate(shared)]
    parts += [(min(rows, sum(length for _, length in runs)), tuple(runs)) for rows, runs in own]
    assert largest_error(spans_of(parts), window) <= ATOL


@pytest.mark.parametrize("window", [None, 6])
def test_decodes_in_place_beside_others(window: int | None) -> None:
    alone = ((1, ((10, 40),)), (1, ((300, 9),)), (1, ((17, 1),)))
    assert largest_error(spans_of(list(alone)), window) <= ATOL
    mixed = [alone[0], (3, ((900, 12),)), alone[1], (1, ((500, 4), (600, 9))), alone[2]]
    assert largest_error(spans_of(mixed), window) <= ATOL
    seen = visible(spans_of(list(alone)), window, new_cache(), CPU)
    assert seen.alone == ()
    assert [decode.row for decode in seen.decodes] == [0, 1, 2]


def test_what_decodes_share_is_read_once() -> None:
    spans = spans_of([(1, ((64, 400 + at), (1000 + 50 * at, 20))) for at in range(4)])
    seen = visible(spans, None, new_cache(), CPU)
    assert seen.alone == ()
    assert [(part.start, part.stop, part.runs) for part in seen.parts if part.stop - part.start > 1] == [
        (0, 4, ((64, 400),))
    ]
    assert largest_error(spans) <= ATOL


@pytest.mark.parametrize("lengths", [(300, 300), (300, 2, 1), (200, 100, 50, 30, 20)])
def test_a_long_sequence_in_several_runs(lengths: tuple[int, ...]) -> None:
    runs = tuple((500 * at + 7, length) for at, length in enumerate(lengths))
    assert largest_error(spans_of([(1, runs), (1, ((9, 30),))])) <= ATOL
    assert largest_error(spans_of([(1, runs), (2, runs)]), dtype=torch.bfloat16) <= BFLOAT16_ATOL
