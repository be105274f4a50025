"""Logprobs from slices against a float64 log_softmax; the same bits at any tp_size, batch and row."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_ranks import SimulatedRank, assert_same_logprobs, padded_logits, run_simulated

from sampler.logprobs import LOGPROB_FLOOR, LogprobRows, SliceLogprobs, finite_logprob
from sampler.slices import SliceShape, blocks_of
from tp.partition import VocabularyBlocks

_SIZES = (1, 2, 3, 4, 8)


def _score(
    size: int,
    logits: torch.Tensor,
    token_ids: list[int],
    top_n: int = 0,
    named: list[list[int]] | None = None,
) -> LogprobRows:
    """Returns rank 0's logprobs after checking that all ranks have the same."""
    vocab_size = logits.shape[1]
    blocks = VocabularyBlocks(vocab_size)
    whole = padded_logits(logits, vocab_size)
    named_ids = None if named is None else torch.tensor(named, dtype=torch.int64).view(len(token_ids), -1)

    def run(group: SimulatedRank) -> LogprobRows:
        own = blocks.slice_of(group.rank, group.size)
        run_of_blocks = blocks_of(group.rank, group.size)
        valid = min(max(vocab_size - own.start, 0), own.stop - own.start)
        shape = SliceShape(own.start, run_of_blocks.start, len(run_of_blocks), own.block_length, valid)
        part = whole[:, own.start : own.stop].contiguous()
        before = part.clone()
        reader = SliceLogprobs(group, shape)
        scored = reader.token_logprobs(
            part, torch.tensor(token_ids, dtype=torch.int64), top_n=top_n, named_ids=named_ids
        )
        assert torch.equal(part, before)
        return scored

    first, *others = run_simulated(size, run)
    for other in others:
        assert_same_logprobs(first, other)
    return first


def _expected_top(logits: torch.Tensor, count: int) -> list[list[int]]:
    ordered = [sorted((-value, index) for index, value in enumerate(row)) for row in logits.tolist()]
    return [[index for _, index in row[:count]] for row in ordered]


@pytest.mark.parametrize("size", _SIZES)
@pytest.mark.parametrize("spread", [0.5, 3.0, 30.0])
def test_equal_to_log_softmax_in_float64(size: int, spread: float) -> None:
    logits = torch.randn(9, 1000, generator=torch.Generator().manual_seed(3)) * spread
    logits[3, 500:] = float("-inf")
    logits[4] = (logits[4] / 2).round()
    tokens = [7, 999, 0, 10, 31, 32, 512, 33, 64]
    named = [[5, 900, 999], [0, -1, -1]] * 4 + [[1, 2, 3]]
    scored = _score(size, logits, tokens, 20, named)
    expected = logits.to(torch.float64).log_softmax(dim=1)
    assert scored.token_ids.tolist() == tokens
    rows = torch.arange(9)
    torch.testing.assert_close(scored.logprobs, expected[rows, tokens], rtol=0, atol=1e-5)
    assert scored.top_ids.tolist() == _expected_top(logits, 20)
    torch.testing.assert_close(scored.top_logprobs, expected.gather(1, scored.top_ids), rtol=0, atol=1e-5)
    for row, ids in enumerate(named):
        for place, token_id in enumerate(ids):
            got = float(scored.named_logprobs[row, place])
            wanted = float(expected[row, token_id]) if token_id >= 0 else float("-inf")
            assert got == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("size", _SIZES)
def test_equal_values_come_by_ascending_id(size: int) -> None:
    logits = torch.zeros(4, 257)
    logits[1, [200, 3, 100, 256, 40]] = 2.0
    logits[2, :] = float("-inf")
    logits[2, [256, 30]] = 1.0
    logits[3, 250:] = 1.0
    scored = _score(size, logits, [0, 200, 30, 5], 6)
    assert scored.top_ids.tolist() == [
        [0, 1, 2, 3, 4, 5],
        [3, 40, 100, 200, 256, 0],
        [30, 256, 0, 1, 2, 3],
        [250, 251, 252, 253, 254, 255],
    ]
    assert scored.top_logprobs[2, 2:].tolist() == [float("-inf")] * 4
    assert scored.logprobs[2].item() == pytest.approx(-0.6931471805599453, abs=1e-12)


def test_a_vocabulary_smaller_than_the_count_ends_with_no_id() -> None:
    for size in _SIZES:
        scored = _score(size, torch.tensor([[1.0, 3.0, 2.0]]), [1], 5)
        assert scored.top_ids.tolist() == [[1, 2, 0, -1, -1]]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([40, 257, 1000, 3001]), st.sampled_from([0, 1, 5, 20]))
def test_bits_do_not_depend_on_tp_size_batch_or_row(seed: int, vocab_size: int, top_n: int) -> None:
    source = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    rows = source.randrange(1, 12)
    logits = torch.randn(rows, vocab_size, generator=generator) * source.choice([0.3, 2.0, 15.0])
    if source.random() < 0.5:
        logits = logits.bfloat16().float()
    tokens = [source.randrange(vocab_size) for _ in range(rows)]
    named = [[source.randrange(vocab_size), -1] for _ in range(rows)]
    together = _score(1, logits, tokens, top_n, named)
    assert bool((together.logprobs <= 0).all())
    assert_same_logprobs(together, _score(source.choice(_SIZES[1:]), logits, tokens, top_n, named))
    chosen = source.sample(range(rows), source.randrange(1, rows + 1))
    part = _score(
        source.choice(_SIZES), logits[chosen], [tokens[row] for row in chosen], top_n, [named[row] for row in chosen]
    )
    assert_same_logprobs(together, part, chosen)


def test_bits_do_not_depend_on_the_thread_count() -> None:
    logits = torch.randn(6, 40_000, generator=torch.Generator().manual_seed(1)) * 3
    before = torch.get_num_threads()
    try:
        scored = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            scored.append(_score(1, logits, [5] * 6, 20))
    finally:
        torch.set_num_threads(before)
    assert_same_logprobs(scored[0], scored[1])
    assert_same_logprobs(scored[0], scored[2])


def test_no_positions_no_logprobs() -> None:
    scored = _score(2, torch.zeros(0, 64), [], 3)
    assert scored.top_ids.shape == (0, 3)


def test_what_leaves_for_json_is_finite() -> None:
    values = [0.0, -1.5, -9998.9, -9999.5, float("-inf"), float("nan")]
    assert [finite_logprob(value) for value in values] == [0.0, -1.5, -9998.9, *[LOGPROB_FLOOR] * 3]
