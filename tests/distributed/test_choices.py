"""The choices of a request share one prefill, and draw what they would have drawn alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_ranks import Case, Job, grammar, run_engine
from ranks import run_ranks
from tiny_checkpoints import write_tiny_checkpoint

from sampler.params import SamplingParams

PROMPT = tuple(range(5, 45))
SAMPLED = SamplingParams(temperature=1.0, frequency_penalty=0.5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama")


def choices(count: int, *, shared: bool) -> tuple[Job, ...]:
    spec = grammar(regex="[a-z]{12}")
    return tuple(
        Job(PROMPT, 16, SAMPLED, 9, index, 0 if shared and index else None, spec if index % 2 else None)
        for index in range(count)
    )


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (2, 2)])
def test_shared_prefill_changes_no_token(model: Path, tp: int, pp: int) -> None:
    shared, alone = (
        run_ranks(run_engine, tp * pp, Case(model, choices(4, shared=shared), tp=tp, pp=pp)) for shared in (True, False)
    )
    assert shared[0].outputs == alone[0].outputs
    assert len({output.token_ids for output in shared[0].outputs[0]}) == 4
    rows = [row for plan in shared[0].plans[0] for row in plan]
    assert sum(row.length for row in rows if row.start < len(PROMPT)) == len(PROMPT) + 3
    assert all(record.plans == shared[0].plans for record in shared)


def test_chunked_prefill_is_shared_too(model: Path) -> None:
    case = Case(model, choices(3, shared=True), max_batch_tokens=7)
    assert (
        run_ranks(run_engine, 1, case)[0].outputs
        == run_ranks(run_engine, 1, Case(model, choices(3, shared=False), max_batch_tokens=7))[0].outputs
    )
