"""Logprobs, supports and logit processors over real ranks give what one rank alone gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from example_processors import Faulty, Normalised, TopNSigma
from ranks import run_ranks
from simulated_ranks import assert_same_logprobs, assert_same_output, padded_logits

from launch.rank.groups import build_groups
from sampler.batch import SamplingBatchInfo
from sampler.logprobs import LogprobRows
from sampler.params import ProcessorCall, RowSampling, SamplingParams
from sampler.processors import ProcessorRegistry
from sampler.sampler import RowReason, SampleOutput, Sampler
from sampler.supports import RowStatus
from tp.partition import VocabularyBlocks

_VOCAB = 3000
_FAILED = int(RowReason.PROCESSOR_FAILED)


def _rows() -> list[RowSampling]:
    def row(*calls: tuple[str, dict[str, Any]], **fields: Any) -> RowSampling:
        processors = tuple(ProcessorCall(name=name, args=args) for name, args in calls)
        return RowSampling(params=SamplingParams(logit_processors=processors, **fields), seed=7)

    return [
        row(logprobs=20),
        row(("sigma", {"margin": 2.0}), logprobs=3, logprobs_mode="processed", return_support=True),
        row(("faulty", {"how": "raise between", "at": 0})),
        row(("normalised", {}), top_p=0.9, return_support=True),
        row(temperature=0.0, logprob_token_ids=(5, 2999)),
        row(return_support=True, banned_token_ids=(1, 2)),
        row(top_k=2000, temperature=0.5, logprobs=0, return_support=True),
    ]


def _run(rank: int, world_size: int) -> tuple[SampleOutput, LogprobRows]:
    group = build_groups(world_size, 1, timeout_s=60).tensor_parallel
    own = VocabularyBlocks(_VOCAB).slice_of(rank, world_size)
    registry = ProcessorRegistry(
        {"sigma": TopNSigma(), "normalised": Normalised(), "faulty": Faulty(needs_row_values=True)}
    )
    sampler = Sampler(
        group,
        vocab_size=_VOCAB,
        slice_start=own.start,
        block_length=own.block_length,
        candidates=16,
        processors=registry,
    )
    rows = _rows()
    logits = torch.randn(len(rows), _VOCAB, generator=torch.Generator().manual_seed(2)) * 3
    part = padded_logits(logits, _VOCAB)[:, own.start : own.stop].contiguous()
    output = sampler.sample(part.clone(), SamplingBatchInfo.from_rows(rows), [0] * len(rows))
    return output, sampler.token_logprobs(part, torch.arange(len(rows)), top_n=4)


@pytest.mark.parametrize("size", [2, 3])
def test_real_ranks_report_what_one_rank_reports(size: int) -> None:
    ((alone, alone_scored),) = run_ranks(_run, 1)
    assert alone.reasons.tolist() == [0, 0, _FAILED, 0, 0, 0, 0]
    assert [support.status for support in alone.supports] == [RowStatus.OK] * 4
    for output, scored in run_ranks(_run, size):
        assert_same_output(alone, output)
        assert_same_logprobs(alone_scored, scored)
