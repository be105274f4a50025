"""No collective and no message of a decode step grows with the vocabulary."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from engine_ranks import Case, Job, grammar, run_engine
from ranks import run_ranks
from tiny_checkpoints import write_tiny_checkpoint

from sampler.params import SamplingParams

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
