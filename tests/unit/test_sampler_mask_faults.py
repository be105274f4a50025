"""A row whose mask one rank alone does not have ends on every rank, and no other row notices."""

from __future__ import annotations

import pytest
import torch
from simulated_ranks import SimulatedRank, assert_same_output, padded_logits, run_simulated

from sampler.batch import SamplingBatchInfo
from sampler.params import RowSampling, SamplingParams
from sampler.sampler import RowReason, SampleOutput, Sampler
from tp.partition import VocabularyBlocks

VOCAB = 300
BLOCKS = VocabularyBlocks(VOCAB)
ROWS = [
    RowSampling(params=SamplingParams(temperature=temperature, top_k=top_k, logprobs=logprobs), seed=7 + row)
    for row, (temperature, top_k, logprobs) in enumerate([(1.0, -1, None), (0.8, 5, 2), (0.0, -1, None), (1.3, -1, 1)])
]
LOGITS = padded_logits(torch.randn(len(ROWS), VOCAB, generator=torch.Generator().manual_seed(3)), VOCAB)


def sampled(size: int, faults: dict[int, list[int]], empty_rows: tuple[int, ...] = ()) -> list[SampleOutput]:
    """Returns each rank's output; ``faults`` are its rows' reasons, ``empty_rows`` have no mask bit on such a rank."""

    def run(group: SimulatedRank) -> SampleOutput:
        own = BLOCKS.slice_of(group.rank, size)
        sampler = Sampler(group, vocab_size=VOCAB, slice_start=own.start, block_length=own.block_length)
        words = torch.full((len(ROWS), own.words.stop - own.words.start), -1, dtype=torch.int32)
        mine = faults.get(group.rank)
        if mine is not None:
            words[list(empty_rows)] = 0
        return sampler.sample(
            LOGITS[:, own.start : own.stop].clone(),
            SamplingBatchInfo.from_rows(ROWS),
            [0] * len(ROWS),
            words,
            None if mine is None else torch.tensor(mine, dtype=torch.int32),
        )

    return run_simulated(size, run)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("row", range(4))
def test_one_rank_s_missing_mask_ends_the_row_everywhere(size: int, row: int) -> None:
    late = [0] * len(ROWS)
    late[row] = RowReason.MASK_LATE
    clean = sampled(size, {})
    outputs = sampled(size, {size - 1: late}, (row,))
    for output in outputs[1:]:
        assert_same_output(outputs[0], output)
    assert outputs[0].reasons.tolist() == [RowReason.MASK_LATE if index == row else 0 for index in range(len(ROWS))]
    assert outputs[0].fault_ranks.tolist() == [size - 1 if index == row else -1 for index in range(len(ROWS))]
    expected = clean[0].token_ids.clone()
    expected[row] = -1
    assert outputs[0].token_ids.tolist() == expected.tolist()


def test_the_gravest_reason_of_all_ranks_counts() -> None:
    refused, late = RowReason.MASK_REFUSED, RowReason.MASK_LATE
    outputs = sampled(3, {0: [refused, 0, refused, 0], 2: [late, 0, 0, 0]}, (0, 2))
    assert outputs[1].reasons.tolist() == [late, 0, refused, 0]
    assert outputs[1].fault_ranks.tolist() == [2, -1, 0, -1]
