"""No collective and no message of a decode step grows with the vocabulary, and all are far below a full gather."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from engine_ranks import Case, Job, grammar, run_engine
from ranks import run_ranks
from simulated_ranks import SlicedSampler
from tiny_checkpoints import write_tiny_checkpoint

from launch.bench.cases import CASES, BenchCase
from launch.bench.sampler_report import Traffic
from sampler.params import RowSampling, SamplingParams

pytestmark = pytest.mark.long(25)

SMALL, LARGE = 320, 128 * 320
PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=1.0),
    "top_k": SamplingParams(top_k=5),
    "top_p": SamplingParams(top_p=0.5),
    "min_p": SamplingParams(min_p=0.2),
    "all": SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, filter_order="top_k_first"),
    "penalties": SamplingParams(frequency_penalty=0.5, presence_penalty=0.5, repetition_penalty=1.2),
    "wide nucleus": SamplingParams(temperature=5.0, top_p=0.999),
}
VOCABULARY_WIDE = frozenset({"send:mask"})
"""Masks are the one message that must grow with the vocabulary: a bit an id, point to point, no collective."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    return {
        size: write_tiny_checkpoint(tmp_path_factory.mktemp(str(size)), "qwen3", vocab_size=size, num_hidden_layers=2)
        for size in (SMALL, LARGE)
    }


def largest_bytes(model: Path, jobs: tuple[Job, ...]) -> Counter[tuple[int, str, str]]:
    """Returns the largest payload of each (rank, operation, group) over a run."""
    largest: Counter[tuple[int, str, str]] = Counter()
    for rank, record in enumerate(run_ranks(run_engine, 4, Case(model, jobs, tp=2, pp=2))):
        assert record.observed
        for operation, group, payload_bytes in record.observed:
            key = (rank, operation, group)
            largest[key] = max(largest[key], payload_bytes)
    return largest


@pytest.mark.parametrize("name", PARAMS)
def test_no_collective_grows_with_the_vocabulary(models: dict[int, Path], name: str) -> None:
    jobs = tuple(Job((5, 6, 7), 6, PARAMS[name], seed=seed) for seed in range(3))
    small, large = (largest_bytes(models[size], jobs) for size in (SMALL, LARGE))
    # The vocabulary is 128 times as large. Search rounds may take other rows, or not run at all, with other logits, so
    # a payload may differ by the rows it has; one that follows the vocabulary would be 128 times as large.
    grown = {key: (small[key], large[key]) for key in large if small[key] and large[key] > 2 * small[key]}
    assert not grown, f"grown with the vocabulary: {grown}"
    row_bytes = 4 * LARGE
    heavy = {key: payload_bytes for key, payload_bytes in large.items() if payload_bytes > row_bytes / 4}
    assert not heavy, f"near a whole row of logits ({row_bytes} bytes): {heavy}"


def test_only_masks_grow_and_they_are_no_collective(models: dict[int, Path]) -> None:
    jobs = (Job((5, 6, 7), 6, PARAMS["top_p"], grammar=grammar(choice=["yes", "no"])), Job((5, 6), 6))
    small, large = (largest_bytes(models[size], jobs) for size in (SMALL, LARGE))
    grown = {key for key in small.keys() & large.keys() if large[key] > small[key]}
    assert {operation for _, operation, _ in grown} == VOCABULARY_WIDE
    whole_row_bytes = LARGE // 8
    assert all(large[key] <= whole_row_bytes for key in grown), "each rank sends the words of its own slice only"


BATCH, VOCAB, TP = 64, 151_936, 8
# The case whose rows all need the exact search.
FALLBACK = "top_p_flat"


@pytest.fixture(scope="module")
def whole_logits() -> dict[str, torch.Tensor]:
    """Returns logits whose nuclei hold tens to thousands of ids, as a language model's, and flat ones."""
    generator = torch.Generator().manual_seed(1)
    steepness = torch.linspace(1.28, 1.7, BATCH).unsqueeze(1)
    ordered = -steepness * torch.arange(1, VOCAB + 1).log()
    shuffled = ordered[:, torch.randperm(VOCAB, generator=generator)]
    normal = torch.randn(BATCH, VOCAB, generator=generator)
    return {"lm": shuffled + 0.05 * normal, "flat": 3.0 * normal}


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_step_moves_a_fiftieth_of_a_full_gather(whole_logits: dict[str, torch.Tensor], case: BenchCase) -> None:
    logits = whole_logits[case.logits]

    def row(index: int) -> RowSampling:
        fields = case.odd_row if case.odd_row is not None and index == BATCH // 2 else case.params
        params = SamplingParams.parse(fields, vocab_size=VOCAB, max_model_len=4096)
        seen = range(index, index + case.seen_ids)
        return RowSampling(params=params, seed=index, prompt_ids=seen, output_ids=seen)

    nucleus = (logits[::8].softmax(dim=-1).sort(descending=True).values.cumsum(dim=-1) < 0.9).sum(dim=-1)
    assert int(nucleus.max()) > 800
    sampler = SlicedSampler(TP, VOCAB)
    mask = torch.full((BATCH, 64 * -(-VOCAB // 64 // 32)), 0x55555555, dtype=torch.int32) if case.masked else None
    output = sampler.sample(logits, [row(index) for index in range(BATCH)], [0] * BATCH, mask)
    assert not output.status.any()
    traffic = Traffic.of(sampler.payload_bytes, TP, BATCH * VOCAB * 4)
    assert traffic.received_bytes <= traffic.full_gather_bytes / (10 if case.name == FALLBACK else 50)
