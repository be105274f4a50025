"""The sampler over real ranks draws for every line of the case file what one rank alone draws."""

from __future__ import annotations

import random

import pytest
from ranks import run_ranks
from sampling_cases import batch_of, by_vocabulary, sampling_cases
from simulated_ranks import padded_logits

from launch.rank.groups import build_groups
from sampler.batch import SamplingBatchInfo
from sampler.sampler import Sampler
from sampler.supports import RowStatus
from tp.partition import VocabularyBlocks

Drawn = dict[int, tuple[int, list[int]]]


def _draw_all(rank: int, world_size: int, order_seed: int, candidates: int) -> Drawn:
    """Returns token and support of each case, drawn in shuffled batches."""
    group = build_groups(world_size, 1, timeout_s=60).tensor_parallel
    cases = sampling_cases()
    random.Random(order_seed).shuffle(cases)
    drawn: Drawn = {}
    for step, (vocab_size, batch_cases) in enumerate(by_vocabulary(cases).items()):
        group.begin_step(step)
        own = VocabularyBlocks(vocab_size).slice_of(rank, world_size)
        sampler = Sampler(
            group,
            vocab_size=vocab_size,
            slice_start=own.start,
            block_length=own.block_length,
            nan_policy="sanitize",
            candidates=candidates,
        )
        logits, rows, positions, mask = batch_of(batch_cases)
        part = padded_logits(logits, vocab_size)[:, own.start : own.stop]
        batch = SamplingBatchInfo.from_rows(rows)
        words = mask[:, own.words]
        output = sampler.sample(part.clone(), batch, positions, words)
        assert output.status.tolist() == [RowStatus.OK] * len(rows)
        supports = sampler.support(part.clone(), batch, positions, words)
        for case, token, support in zip(batch_cases, output.token_ids.tolist(), supports, strict=True):
            drawn[case.case_id] = (token, support.ids.tolist())
    return drawn


@pytest.fixture(scope="module")
def alone() -> Drawn:
    (drawn,) = run_ranks(_draw_all, 1, 0, 128)
    return drawn


@pytest.mark.parametrize(("size", "candidates"), [(2, 128), (3, 128), (4, 128), (8, 128), (3, 2)])
def test_every_case_is_drawn_alike_over_real_ranks(size: int, candidates: int, alone: Drawn) -> None:
    expected = {case.case_id: case.support for case in sampling_cases()}
    assert len(alone) == len(expected) == 400
    for drawn in run_ranks(_draw_all, size, size, candidates):
        assert drawn == alone
    for case_id, (token, support) in alone.items():
        assert support == expected[case_id]
        assert token in support
