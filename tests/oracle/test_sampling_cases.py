"""Every line of the case file: support and probabilities, at several tp sizes, alone and in shuffled mixed batches."""

from __future__ import annotations

import random

import pytest
import torch
from sampling_cases import SamplingCase, batch_of, by_vocabulary, sampling_cases
from simulated_ranks import SlicedSampler

from sampler.supports import RowStatus, RowSupport

pytestmark = pytest.mark.long(30)


def agrees(case: SamplingCase, support: RowSupport) -> bool:
    """Returns whether a row has the support of its case, and its probabilities to 1e-5."""
    if support.status is not RowStatus.OK or support.ids.tolist() != case.support:
        return False
    expected = torch.tensor(case.probabilities, dtype=torch.float64)
    return torch.allclose(support.probabilities, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("candidates", [128, 4, 1])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_support_and_probabilities_agree_in_mixed_batches(size: int, candidates: int) -> None:
    cases = sampling_cases()
    random.Random(size).shuffle(cases)
    for vocab_size, group in by_vocabulary(cases).items():
        logits, rows, positions, mask = batch_of(group)
        sampler = SlicedSampler(size, vocab_size, nan_policy="sanitize", candidates=candidates)
        supports = sampler.support(logits, rows, positions, mask)
        assert [case.case_id for case, support in zip(group, supports, strict=True) if not agrees(case, support)] == []


@pytest.mark.parametrize("size", [1, 3])
def test_a_row_alone_has_the_same_bits_as_in_a_batch(size: int) -> None:
    for vocab_size, group in by_vocabulary(sampling_cases()).items():
        sampler = SlicedSampler(size, vocab_size, nan_policy="sanitize")
        together = sampler.support(*batch_of(group))
        tokens = sampler.sample(*batch_of(group)).token_ids.tolist()
        # Threads make the larger sizes slow; every row is tried at size 1.
        for index, case in list(enumerate(group))[:: 1 if size == 1 else 7]:
            (alone,) = sampler.support(*batch_of([case]))
            assert torch.equal(alone.ids, together[index].ids)
            assert torch.equal(alone.probabilities, together[index].probabilities)
            assert sampler.sample(*batch_of([case])).token_ids.tolist() == [tokens[index]]


@pytest.mark.parametrize("candidates", [128, 2])
def test_the_drawn_token_is_in_the_support_and_the_same_at_every_size(candidates: int) -> None:
    for vocab_size, group in by_vocabulary(sampling_cases()).items():
        drawn = {}
        for size in (1, 2, 3, 4, 8):
            sampler = SlicedSampler(size, vocab_size, nan_policy="sanitize", candidates=candidates)
            output = sampler.sample(*batch_of(group))
            assert output.status.tolist() == [RowStatus.OK] * len(group)
            drawn[size] = output.token_ids.tolist()
            assert drawn[size] == drawn[1]
        for case, token in zip(group, drawn[1], strict=True):
            assert token in case.support
            assert case.token is None or token == case.token
