"""One rank alone cannot fill a mask or accept a token: that sequence ends alike on every rank, the others go on."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_ranks import Case, Job, RankRecord, grammar, run_engine
from faulty_parts import FillFault
from ranks import run_ranks
from tiny_checkpoints import write_tiny_checkpoint

from sampler.params import SamplingParams

HEALTHY = grammar(regex="[a-c]{12}")
BAD = grammar(regex="[x-z]{12}")
TOKENS = 10
DEADLINE_S = 0.1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3")


def jobs() -> tuple[Job, ...]:
    params = SamplingParams(temperature=1.0)
    return (
        Job([5, 6, 7], TOKENS, params, seed=1, grammar=HEALTHY),
        Job([9, 8], TOKENS, params, seed=2, grammar=BAD),
        Job([10, 11, 12, 13], TOKENS, params, seed=3),
    )


@pytest.fixture(scope="module")
def clean(model: Path) -> RankRecord:
    return run_ranks(run_engine, 4, Case(model, jobs(), tp=2, pp=2))[0]


@pytest.mark.parametrize(
    ("what", "rank", "said"),
    [
        ("hang", 1, "the regex grammar took too long to fill its mask"),
        ("hang", 0, "the regex grammar took too long to fill its mask"),
        ("fail", 1, "the regex grammar failed in its engine while its mask was filled"),
        ("refuse", 1, "the regex grammar refused a token that its mask allowed"),
    ],
)
def test_a_fault_of_one_rank_ends_its_sequence_everywhere_and_no_other(
    model: Path, clean: RankRecord, what: str, rank: int, said: str
) -> None:
    fault = FillFault(BAD.source, rank, what)
    case = Case(model, jobs(), tp=2, pp=2, fill_faults=(fault,), fill_deadline_s=DEADLINE_S)
    records = run_ranks(run_engine, 4, case)
    assert all(record.plans == records[0].plans for record in records)
    healthy, bad, plain = records[0].outputs[0]
    expected = clean.outputs[0]
    assert (healthy, plain) == (expected[0], expected[2])
    tokens = fault.after + (what == "refuse")
    assert bad.finish_reason == "error"
    assert bad.token_ids == expected[1].token_ids[:tokens]
    assert bad.error is not None
    assert bad.error.startswith(f"{said} (step ")
    assert bad.error.endswith(f", rank {rank}, output token {tokens})")


def test_a_refusal_that_the_leader_sees_is_told_with_state_and_tokens(model: Path, clean: RankRecord) -> None:
    case = Case(model, jobs(), tp=2, pp=2, fill_faults=tuple(FillFault(BAD.source, rank, "refuse") for rank in (0, 1)))
    records = run_ranks(run_engine, 4, case)
    assert all(record.plans == records[0].plans for record in records)
    healthy, bad, plain = records[0].outputs[0]
    expected = clean.outputs[0]
    assert (healthy, plain) == (expected[0], expected[2])
    assert bad.finish_reason == "error"
    assert bad.error is not None
    first_two = list(expected[1].token_ids[:2])
    assert f"refuses token {expected[1].token_ids[2]} as output token 2" in bad.error
    assert f"the last tokens: {first_two}" in bad.error


def test_an_audit_does_not_take_a_missing_mask_for_a_sick_rank(model: Path) -> None:
    fault = FillFault(BAD.source, 1, "fail")
    records = run_ranks(run_engine, 2, Case(model, jobs(), tp=2, audit=True, fill_faults=(fault,)))
    assert [output.finish_reason for output in records[0].outputs[0]] == ["length", "error", "length"]


@pytest.mark.parametrize("pp", [1, 2])
def test_masks_fill_while_the_forward_pass_runs(model: Path, pp: int) -> None:
    """Every fill of these matchers waits until the forward pass of its own step has begun."""
    faults = tuple(FillFault(spec.source, 0, "overlap") for spec in (HEALTHY, BAD))
    records = run_ranks(run_engine, pp, Case(model, jobs(), pp=pp, fill_faults=faults))
    assert [output.finish_reason for output in records[0].outputs[0]] == ["length"] * 3
