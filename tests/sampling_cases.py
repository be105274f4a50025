"""The case file of sampling steps, as rows of the sampler."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated_ranks import mask_of

from sampler.params import RowSampling, SamplingParams

_FILE = Path(__file__).resolve().parents[1] / ".." / "shared" / "cases" / "sampling.jsonl"


@dataclass(frozen=True)
class SamplingCase:
    """One line of the file."""

    case_id: int
    logits: list[float]
    row: RowSampling
    position: int
    allowed: list[int] | None
    support: list[int]
    probabilities: list[float]
    token: int | None

    @property
    def vocab_size(self) -> int:
        return len(self.logits)


def sampling_cases() -> list[SamplingCase]:
    """Returns all lines; skips the test where the file is absent."""
    if not _FILE.exists():
        pytest.skip(f"no case file at {_FILE}")
    return [_case(json.loads(line)) for line in _FILE.read_text().splitlines()]


def by_vocabulary(cases: list[SamplingCase]) -> dict[int, list[SamplingCase]]:
    """Returns the cases of each vocabulary size: what can be one batch."""
    groups: dict[int, list[SamplingCase]] = {}
    for case in cases:
        groups.setdefault(case.vocab_size, []).append(case)
    return groups


def batch_of(cases: list[SamplingCase]) -> tuple[torch.Tensor, list[RowSampling], list[int], torch.Tensor]:
    """Returns logits [B, V], rows, positions and mask words of cases of one vocabulary size."""
    logits = torch.tensor([case.logits for case in cases], dtype=torch.float32)
    mask = mask_of([case.allowed for case in cases], cases[0].vocab_size)
    return logits, [case.row for case in cases], [case.position for case in cases], mask


def _case(line: dict[str, Any]) -> SamplingCase:
    fields, expect = line["params"], line["expect"]
    logits = [float(value) for value in line["logits"]]
    bias = fields.get("logit_bias")
    params = SamplingParams(
        temperature=fields["temperature"],
        top_k=fields.get("top_k", -1),
        top_p=fields.get("top_p", 1.0),
        min_p=fields.get("min_p", 0.0),
        filter_order=fields.get("filter_order", "joint"),
        frequency_penalty=fields.get("frequency", 0.0),
        presence_penalty=fields.get("presence", 0.0),
        repetition_penalty=fields.get("repetition", 1.0),
        min_tokens=fields.get("min_new_tokens", 0),
        logit_bias=None if bias is None else {int(key): float(value) for key, value in bias.items()},
    )
    output = fields.get("output", [])
    row = RowSampling(
        params=params,
        seed=line["id"],
        stop_ids=tuple(fields.get("stop_ids", [])),
        prompt_ids=fields.get("prompt", []),
        output_ids=output,
    )
    assert expect["status"] == "OK"
    return SamplingCase(
        line["id"],
        logits,
        row,
        len(output),
        fields.get("allowed"),
        expect["support"],
        expect["probs"],
        expect.get("token"),
    )
