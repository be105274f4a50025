"""Rows that cannot be drawn end alone; bans, bias and masks do what they say; padding is never drawn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from simulated_ranks import SimulatedRank, SlicedSampler, mask_of, run_simulated

from sampler.params import RowSampling, SamplingParams
from sampler.sampler import RowReason, Sampler, SamplerError
from sampler.supports import RowStatus

_VOCAB = 257
_FIELDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"top_k": 3},
    {"top_p": 0.9},
    {"min_p": 0.1, "top_k": 200},
]


def _rows(fields: dict[str, Any], count: int, **more: Any) -> list[RowSampling]:
    return [RowSampling(params=SamplingParams(**fields), seed=index, **more) for index in range(count)]


def _logits(count: int) -> torch.Tensor:
    return torch.randn(count, _VOCAB, generator=torch.Generator().manual_seed(4)) * 3


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("fields", _FIELDS)
def test_a_bad_row_ends_alone(fields: dict[str, Any], size: int, masked: bool) -> None:
    rows = _rows(fields, 6)
    clean, positions = _logits(6), list(range(6))
    mask = mask_of([list(range(0, _VOCAB, 2))] * 6, _VOCAB) if masked else None
    sampler = SlicedSampler(size, _VOCAB, candidates=4)
    expected = sampler.sample(clean, rows, positions, mask).token_ids
    logits = clean.clone()
    logits[1] = float("nan")
    # Banned by the mask or not: the model put out a NaN.
    logits[2, 101] = float("nan")
    logits[3, 101] = float("inf")
    logits[4] = float("-inf")
    output = sampler.sample(logits, rows, positions, mask)
    assert output.status.tolist() == [0, 2, 2, 2, 2, 0]
    assert output.reasons.tolist() == [0, *[RowReason.NON_FINITE] * 3, RowReason.EMPTY_SUPPORT, 0]
    assert output.token_ids.tolist() == [expected[0], -1, -1, -1, -1, expected[5]]
    supports = sampler.support(logits, rows, positions, mask)
    assert [len(support.ids) > 0 for support in supports] == [True, False, False, False, False, True]
    assert supports[1].status is RowStatus.INVALID


@pytest.mark.parametrize("size", [1, 2])
def test_sanitize_takes_nan_as_absent_and_infinity_as_large(size: int) -> None:
    logits = torch.zeros(3, _VOCAB)
    logits[0] = float("nan")
    logits[1, 5:] = float("nan")
    logits[2, [9, 200]] = float("inf")
    sampler = SlicedSampler(size, _VOCAB, nan_policy="sanitize")
    supports = sampler.support(logits, _rows({"temperature": 1.0}, 3), [0] * 3)
    assert [support.status for support in supports] == [RowStatus.INVALID, RowStatus.OK, RowStatus.OK]
    assert supports[1].ids.tolist() == [0, 1, 2, 3, 4]
    drawn = {
        sampler.sample(logits, _rows({"temperature": 1.0}, 3), [position] * 3).token_ids[2].item()
        for position in range(30)
    }
    assert drawn == {9, 200}


def test_bans_of_everything_end_the_row() -> None:
    logits = torch.zeros(2, _VOCAB)
    mask = mask_of([[], None], _VOCAB)
    for fields in _FIELDS:
        output = SlicedSampler(2, _VOCAB).sample(logits, _rows(fields, 2), [0, 0], mask)
        assert output.status.tolist() == [RowStatus.INVALID, RowStatus.OK]
        assert output.reasons.tolist() == [RowReason.EMPTY_SUPPORT, RowReason.NONE]


@pytest.mark.parametrize("size", [1, 4])
def test_min_tokens_bans_stop_ids_until_reached(size: int) -> None:
    logits = torch.zeros(4, _VOCAB)
    logits[:, 256] = 50.0
    logits[:, 3] = 49.0
    logits[:, 130] = 5.0
    rows = _rows({"temperature": 0.0, "min_tokens": 2}, 3, stop_ids=(3, 256)) + _rows({"temperature": 0.0}, 1)
    output = SlicedSampler(size, _VOCAB).sample(logits, rows, [0, 1, 2, 0])
    assert output.token_ids.tolist() == [130, 130, 256, 256]


@pytest.mark.parametrize("size", [1, 4])
def test_a_grammar_that_allows_only_stop_ids_wins_over_min_tokens(size: int) -> None:
    logits = torch.zeros(4, _VOCAB)
    mask = mask_of([[256], [3, 256], [3, 77], None], _VOCAB)
    for fields in _FIELDS:
        rows = _rows({**fields, "min_tokens": 64}, 4, stop_ids=(3, 256))
        output = SlicedSampler(size, _VOCAB).sample(logits, rows, [0] * 4, mask)
        assert output.status.tolist() == [0] * 4
        tokens = output.token_ids.tolist()
        assert tokens[0] == 256
        assert tokens[1] in (3, 256)
        assert tokens[2] == 77
        assert tokens[3] not in (3, 256)


def test_bits_of_padding_do_not_count_as_allowed() -> None:
    sampler_rows = _rows({"min_tokens": 1}, 1, stop_ids=(2,))
    mask = mask_of([[2]], 33)
    output = SlicedSampler(8, 33).sample(torch.zeros(1, 33), sampler_rows, [0], mask)
    assert output.token_ids.tolist() == [2]


def test_bias_moves_and_a_mask_has_the_last_word() -> None:
    logits = torch.zeros(2, _VOCAB)
    rows = _rows({"temperature": 0.0, "logit_bias": {10: 100.0, 200: 99.0}}, 2)
    mask = mask_of([None, [200, 7]], _VOCAB)
    for size in (1, 3):
        assert SlicedSampler(size, _VOCAB).sample(logits, rows, [0, 0], mask).token_ids.tolist() == [10, 200]


@pytest.mark.parametrize("temperature", [1e-6, 1e-3, 1.0, 1e9])
@pytest.mark.parametrize("vocab_size", [2, 5, 33])
def test_padding_and_extreme_temperatures(temperature: float, vocab_size: int) -> None:
    logits = torch.randn(64, vocab_size, generator=torch.Generator().manual_seed(1)) * 20
    rows = [
        RowSampling(params=SamplingParams(temperature=temperature, top_k=top_k), seed=seed)
        for seed in range(32)
        for top_k in (-1, 2)
    ]
    for size in (1, 8):
        output = SlicedSampler(size, vocab_size).sample(logits, rows, [0] * 64)
        assert output.status.tolist() == [RowStatus.OK] * 64
        assert bool(((output.token_ids >= 0) & (output.token_ids < vocab_size)).all())
        if temperature == 1e-6:
            assert torch.equal(output.token_ids, logits.argmax(dim=1))


def test_calls_that_do_not_fit_are_refused() -> None:
    def run(group: SimulatedRank) -> None:
        with pytest.raises(SamplerError, match="starts at id 0, not 32"):
            Sampler(group, vocab_size=64, slice_start=32, block_length=32)
        with pytest.raises(SamplerError, match="block_length 33"):
            Sampler(group, vocab_size=64, slice_start=0, block_length=33)
        sampler = SlicedSampler(1, 64)
        with pytest.raises(SamplerError, match=r"logits must be contiguous float32 \[1, 2048\]"):
            sampler.sample(torch.zeros(2, 64), _rows({}, 1), [0])
        with pytest.raises(SamplerError, match="1 rows need 1 positions, not 2"):
            sampler.sample(torch.zeros(1, 64), _rows({}, 1), [0, 0])
        with pytest.raises(SamplerError, match=r"mask_words must be int32 \[1, 64\]"):
            sampler.sample(torch.zeros(1, 64), _rows({}, 1), [0], torch.zeros(1, 3, dtype=torch.int32))

    run_simulated(1, run)
