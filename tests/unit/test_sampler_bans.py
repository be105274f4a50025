"""Allowed ids, banned ids and bad words: hard limits at any tp_size, alone or in a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from simulated_ranks import SlicedSampler, mask_of

from sampler.adjust import SparseRows
from sampler.bans import completing_ids, restrict_
from sampler.batch import SamplingBatchInfo
from sampler.params import RowSampling, SamplingParams
from sampler.sampler import RowReason
from sampler.supports import RowStatus

_VOCAB = 257


def _row(words: tuple[tuple[int, ...], ...] = (), output: tuple[int, ...] = (), **fields: Any) -> RowSampling:
    return RowSampling(params=SamplingParams(**fields), seed=1, bad_words_token_ids=words, output_ids=output)


def _logits(count: int) -> torch.Tensor:
    return torch.randn(count, _VOCAB, generator=torch.Generator().manual_seed(4)) * 3


@pytest.mark.parametrize("size", [1, 3])
def test_supports_hold_allowed_ids_and_no_banned_ones(size: int) -> None:
    rows = [
        _row(allowed_token_ids=(3, 100, 256)),
        _row(),
        _row(allowed_token_ids=(3, 100), banned_token_ids=(3, 7)),
        _row(banned_token_ids=tuple(range(250))),
        _row(allowed_token_ids=(5, 6, 7), logit_bias={5: 100.0}),
    ]
    mask = mask_of([None, None, None, None, [4, 6, 7]], _VOCAB)
    supports = SlicedSampler(size, _VOCAB).support(_logits(5), rows, [0] * 5, mask)
    ids = [support.ids.tolist() for support in supports]
    assert ids == [[3, 100, 256], list(range(_VOCAB)), [100], list(range(250, _VOCAB)), [6, 7]]


@pytest.mark.parametrize("size", [1, 4])
def test_nothing_left_ends_that_row_alone(size: int) -> None:
    rows = [
        _row(allowed_token_ids=(3,), banned_token_ids=(3,)),
        _row(),
        _row(allowed_token_ids=(3, 4)),
        _row(banned_token_ids=tuple(range(_VOCAB)), temperature=0.0),
    ]
    mask = mask_of([None, None, [9], None], _VOCAB)
    sampler, logits = SlicedSampler(size, _VOCAB), _logits(4)
    output = sampler.sample(logits, rows, [0] * 4, mask)
    assert output.status.tolist() == [RowStatus.INVALID, RowStatus.OK, RowStatus.INVALID, RowStatus.INVALID]
    assert output.reasons.tolist() == [RowReason.EMPTY_SUPPORT, 0, RowReason.EMPTY_SUPPORT, RowReason.EMPTY_SUPPORT]
    alone = sampler.sample(logits[1:2], rows[1:2], [0])
    assert output.token_ids[1] == alone.token_ids[0]


def test_a_bad_word_never_becomes_complete() -> None:
    words = ((7,), (1, 2), (1, 2, 3), (5, 5))
    banned: list[dict[int, float]] = [completing_ids(words[1:], output) for output in ([], [1], [1, 2], [9, 5], [2, 1])]
    assert [sorted(one) for one in banned] == [[], [2], [3], [5], [2]]
    row = _row(words, output=(1,), allowed_token_ids=(1, 2, 3, 5, 7))
    batch = SamplingBatchInfo.from_rows([row])
    output = [1]
    for token in (1, 3, 1, 5, 3):
        logits = torch.zeros(1, 16)
        batch.ban_(logits, 0)
        expected = {1, 2, 3, 5} - set(completing_ids(words[1:], output))
        assert {index for index, value in enumerate(logits[0].tolist()) if value == 0} == expected
        assert token in expected
        batch.append_tokens(torch.tensor([token]))
        output.append(token)
    assert batch.output_ids == [output]


@pytest.mark.parametrize("size", [1, 3])
def test_output_is_free_of_bad_words_after_any_history(size: int) -> None:
    words = ((256, 256), (256, 9, 130), (4,))
    logits = torch.full((2, _VOCAB), -9.0)
    logits[:, [256, 9, 130, 4]] = torch.tensor([5.0, 4.0, 4.5, 6.0])
    outputs: list[list[int]] = [[], []]
    for position in range(12):
        rows = [_row(words, output=tuple(outputs[0]), temperature=0.0), _row(temperature=0.0)]
        tokens = SlicedSampler(size, _VOCAB).sample(logits, rows, [position] * 2).token_ids.tolist()
        for output, token in zip(outputs, tokens, strict=True):
            output.append(token)
    assert outputs[1] == [4] * 12
    assert outputs[0] == [256, 130] * 6
    assert (256, 9, 130) not in list(zip(outputs[0], outputs[0][1:], outputs[0][2:], strict=False))


def test_bans_hide_no_bad_logit() -> None:
    logits = torch.zeros(3, 8)
    logits[0, 5] = float("nan")
    logits[1, 5] = float("inf")
    logits[2, 1] = float("nan")
    allowed = SparseRows.from_rows([{1: 0.0}] * 3, device=torch.device("cpu"))
    restrict_(logits, allowed, (0, 1, 2), 0)
    assert logits.isnan().sum(dim=1).tolist() == [1, 1, 1]
    assert logits[0, 1] == 0
    rows = [_row(allowed_token_ids=(1, 2)), _row(banned_token_ids=(5,)), _row()]
    whole = torch.zeros(3, _VOCAB)
    whole[0, 5], whole[1, 5] = float("nan"), float("inf")
    reasons = SlicedSampler(2, _VOCAB).sample(whole, rows, [0] * 3).reasons.tolist()
    assert reasons == [RowReason.NON_FINITE, RowReason.NON_FINITE, 0]
