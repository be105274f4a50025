"""Penalties change a slice's logits exactly as defined, whatever the values, strengths and number of ids."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sampler.adjust import PenaltyState
from sampler.params import RowSampling, SamplingParams

_SPECIAL = (math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38, 1e30)
_CPU = torch.device("cpu")


def _row(prompt: list[int], output: list[int], **params: Any) -> RowSampling:
    return RowSampling(params=SamplingParams(**params), seed=0, prompt_ids=prompt, output_ids=output)


def _by_definition(row: RowSampling, logits: torch.Tensor) -> torch.Tensor:
    """Returns one row's logits of the whole vocabulary after its penalties: [V] float32."""
    params, penalised = row.params, logits.clone()
    counts = torch.bincount(torch.tensor(row.output_ids, dtype=torch.int64), minlength=len(logits)).to(torch.float32)
    taken_off = torch.tensor(params.frequency_penalty) * counts + torch.tensor(params.presence_penalty) * (counts > 0)
    seen = torch.zeros(len(logits), dtype=torch.bool)
    seen[[*row.prompt_ids, *row.output_ids]] = True
    penalised[seen] -= taken_off[seen]
    raised = penalised > 0
    penalised[seen & raised] /= params.repetition_penalty
    penalised[seen & ~raised] *= params.repetition_penalty
    return penalised


def _same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether values are the same, of whatever sign their zeros are."""
    same = (first == second) | (first.isnan() & second.isnan())
    return bool(same.all())


@pytest.mark.parametrize("slice_start", [0, 40])
def test_every_value_meets_every_strength(slice_start: int) -> None:
    generator = torch.Generator().manual_seed(0)
    strengths = [0.001, 0.5, 1.0, 1.2, 1000.0]
    rows = [
        _row(
            torch.randint(80, (30,), generator=generator).tolist(),
            torch.randint(80, (50,), generator=generator).tolist(),
            repetition_penalty=strength,
            frequency_penalty=frequency,
            presence_penalty=-frequency / 2,
        )
        for strength in strengths
        for frequency in (0.0, 0.3, -2.0)
    ]
    rows.append(_row([1, 2], [3]))
    whole = 3 * torch.randn(len(rows), 80, generator=generator)
    special = torch.tensor(_SPECIAL)[torch.randint(len(_SPECIAL), whole.shape, generator=generator)]
    whole = torch.where(torch.rand(whole.shape, generator=generator) < 0.5, special, whole)
    expected = torch.stack([_by_definition(row, logits) for row, logits in zip(rows, whole, strict=True)])
    logits = whole[:, slice_start:].contiguous()
    PenaltyState.from_rows(rows, device=_CPU).apply_(logits, slice_start)
    assert _same_bits(logits, expected[:, slice_start:])


def test_many_ids_that_come_one_by_one() -> None:
    vocab, prompt = 30_000, list(range(0, 30_000, 3))
    generator = torch.Generator().manual_seed(1)
    strengths = (0.8, 1.0, 1.3)
    outputs: list[list[int]] = [[] for _ in strengths]

    def rows() -> list[RowSampling]:
        return [
            _row(prompt, output, repetition_penalty=strength, frequency_penalty=0.4, presence_penalty=0.1)
            for output, strength in zip(outputs, strengths, strict=True)
        ]

    state = PenaltyState.from_rows(rows(), device=_CPU)
    for token_ids in torch.randint(60, (20, len(strengths)), generator=generator):
        logits = torch.randn(len(strengths), vocab, generator=generator)
        expected = torch.stack([_by_definition(row, one) for row, one in zip(rows(), logits, strict=True)])
        state.apply_(logits, 0)
        assert _same_bits(logits, expected)
        state.append(token_ids)
        for output, token_id in zip(outputs, token_ids.tolist(), strict=True):
            output.append(token_id)
