"""Scenario T1: every rank runs the same batches, however unevenly compiles finish and stages stall."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from engine_ranks import Case, Job, grammar, run_engine
from ranks import run_ranks
from tiny_checkpoints import write_tiny_checkpoint

from runtime.tokenizer import Tokenizer
from sampler.params import SamplingParams

pytestmark = pytest.mark.long(80)

RUNS = 200
SCHEMAS = (
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]},
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3", num_hidden_layers=2)


def jobs(model: Path) -> tuple[Job, ...]:
    """Two JSON requests and a plain one, seeded, so that equal batches must give equal tokens."""
    tokenizer = Tokenizer.load(model)
    prompt = tokenizer.encode("One two")
    sampled = SamplingParams(temperature=1.0)
    return (
        Job(prompt, 3, sampled, seed=1, grammar=grammar(json_schema=SCHEMAS[0])),
        Job(prompt, 4, sampled, seed=2),
        Job(prompt, 3, sampled, seed=3, grammar=grammar(json_schema=SCHEMAS[1])),
    )


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_random_compile_delays_and_stalls(model: Path) -> None:
    """Stage 0's two ranks compile 0 to 400 ms late, each by itself; a stage-1 rank stalls 200 ms; 200 runs.

    The runs mostly wait, so two engines share them.
    """
    base = Case(model, jobs(model), tp=2, pp=2, rounds=RUNS // 2, compile_delay_s=0.4, stall_s=0.2)
    with ThreadPoolExecutor(2) as threads:
        halves = list(
            threads.map(lambda seed: run_ranks(run_engine, 4, replace(base, seed=seed), timeout_s=480), (7, 8))
        )
    plans_of_runs = [[record.plans[number] for record in half] for half in halves for number in range(RUNS // 2)]
    assert len(plans_of_runs) == RUNS
    for number, plans in enumerate(plans_of_runs):
        assert plans[0]
        assert all(plan == plans[0] for plan in plans), f"run {number}: the ranks ran different batches"
    tokenizer = Tokenizer.load(model)
    outputs = [run for half in halves for run in half[0].outputs]
    for number, run in enumerate(outputs):
        assert [output.error for output in run] == [None] * 3, f"run {number}"
        for output in (run[0], run[2]):
            text = tokenizer.decode(output.token_ids)
            if output.finish_reason == "stop":
                assert isinstance(json.loads(text), dict)
    assert len({run[1].token_ids for run in outputs}) == 1, "the plain request never depends on compiles"
    # The delays were real: the JSON requests entered the batch at different steps, in both orders.
    first_rows = [[row.sequence_id for rows in plans[0] for row in rows] for plans in plans_of_runs]
    entries = [(order.index(0), order.index(2)) for order in first_rows]
    assert len(set(entries)) > 10
    assert any(a < b for a, b in entries)
    assert any(a > b for a, b in entries)


def test_later_stages_hold_neither_tokenizer_nor_compiler(model: Path) -> None:
    records = run_ranks(run_engine, 4, Case(model, jobs(model), tp=2, pp=2))
    assert [record.tokenizers_built for record in records] == [1, 1, 0, 0]
    assert [record.compilers_built for record in records] == [1, 1, 0, 0]


def test_plain_requests_do_not_wait_for_compiles(model: Path) -> None:
    """The plain request's batches come at once, while the others' grammars are still being compiled."""
    case = Case(model, jobs(model), tp=2, pp=2, rounds=5, seed=1, compile_delay_s=0.4)
    for plans in run_ranks(run_engine, 4, case)[0].plans:
        assert [row.sequence_id for row in plans[0]] == [1]
        assert plans[0][0].start == 0
