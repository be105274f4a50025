"""A device that begins to compute wrong numbers is found by ``--audit-every``, and named where anybody can tell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from corrupt_ranks import Corruption, run_corrupted
from engine_ranks import Case, Job, run_engine
from ranks import run_ranks
from tiny_checkpoints import write_tiny_checkpoint

from launch.node.digests import first_disagreement
from launch.node.progress_record import DigestKind
from runtime.self_check import verdict
from sampler.params import SamplingParams


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3")


def case_of(model: Path, tp: int, pp: int, audit_every: int = 1) -> Case:
    jobs = (Job([5, 6, 7], 12, SamplingParams(temperature=1.0), seed=1), Job([9, 8], 12, SamplingParams(temperature=0)))
    return Case(model, jobs, tp=tp, pp=pp, audit_every=audit_every)


@pytest.mark.parametrize(
    ("what", "size", "rank", "suspects", "message"),
    [
        ("weight", (2, 2), 1, (1,), "rank 1 of tp0: its weights are not those that it loaded"),
        ("product", (1, 2), 1, (1,), "rank 0 of tp1: it multiplies wrong"),
        ("output", (2, 1), 0, (0, 1), "its hidden states are not those of most others"),
        ("output", (3, 1), 2, (2,), "rank 2 of tp0: its hidden states are not those of most others"),
    ],
)
def test_who_computes_wrong_numbers_is_named(
    model: Path, what: str, size: tuple[int, int], rank: int, suspects: tuple[int, ...], message: str
) -> None:
    seen = run_ranks(run_corrupted, size[0] * size[1], case_of(model, *size), Corruption(what, rank, 5))
    assert seen[rank].fired >= 5
    assert seen[rank].kind == "DesyncError"
    assert message in seen[rank].message
    found = first_disagreement({one: seen[one].digests for one in range(len(seen))})
    assert found is not None
    assert (found.kind, found.suspects) == (DigestKind.AUDIT, suspects)
    assert "of the audit" in found.sentence()


@pytest.mark.parametrize("invariant", [False, True])
def test_ranks_that_are_well_never_notice(model: Path, invariant: bool) -> None:
    plain = replace(case_of(model, 2, 1, audit_every=0), invariant=invariant)
    outputs = [run_ranks(run_engine, 2, replace(plain, audit_every=every))[0].outputs for every in (0, 1)]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("found", "digests"),
    [
        ([[5, 0]], [0]),
        ([[5, 0], [5, 0]], [0, 0]),
        ([[5, 0], [6, 0]], [5, 6]),
        ([[0, 0], [6, 0]], [-1, 6]),
        ([[5, 0], [6, 0], [5, 0]], [0, 6, 0]),
        ([[5, 0], [6, 1], [7, 0]], [0, 1, 0]),
        ([[5, 0], [5, 0], [6, 0], [6, 0]], [5, 5, 6, 6]),
    ],
)
def test_a_majority_is_right(found: list[list[int]], digests: list[int]) -> None:
    assert verdict(found) == digests
