"""Thinking first, on real ranks: the grammar begins after the end marker, budgets hold, all ranks agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from engine_ranks import Case, Job, RankRecord, grammar, run_engine
from ranks import run_ranks
from tiny_checkpoints import write_tiny_checkpoint

from grammar_sync.thinking import ThinkingRules
from runtime.tokenizer import Tokenizer
from sampler.params import SamplingParams

MARKERS = ("<think>", "</think>")
PATTERN = "[a-c]{3}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3")


def jobs() -> tuple[Job, ...]:
    sampled = SamplingParams(temperature=1.0)
    fixed = grammar(regex=PATTERN)
    return (
        Job([5, 6, 7], 40, sampled, seed=1, grammar=fixed, thinking=ThinkingRules(budget=4, before_grammar=True)),
        Job([9, 8], 40, sampled, seed=2),
        Job([5, 6], 40, sampled, seed=3, thinking=ThinkingRules(writes_start=True, budget=2, strict=True)),
        Job([7, 6], 5, sampled, seed=4, grammar=fixed, thinking=ThinkingRules(before_grammar=True)),
        Job([7, 9], 40, sampled, seed=5, grammar=fixed, thinking=ThinkingRules(budget=0, before_grammar=True)),
    )


@pytest.fixture(scope="module", params=[(1, 1), (2, 2)])
def records(model: Path, request: pytest.FixtureRequest) -> list[RankRecord]:
    tp, pp = request.param
    return run_ranks(run_engine, tp * pp, Case(model, jobs(), tp=tp, pp=pp, markers=MARKERS))


def test_thinking_first(model: Path, records: list[RankRecord]) -> None:
    """Scenario: a prompt that ends in a think marker → the grammar starts after the end marker; budget honoured."""
    assert all(record.plans == records[0].plans for record in records)
    tokenizer = Tokenizer.load(model)
    budgeted, _, free, cut, closed = records[0].outputs[0]
    texts = [tokenizer.decode(output.token_ids) for output in (budgeted, free, cut, closed)]
    thought, _, answer = texts[0].partition(MARKERS[1])
    assert budgeted.finish_reason == "stop"
    assert re.fullmatch(PATTERN, answer)
    assert len(tokenizer.encode(thought, add_special_tokens=False)) > 0
    end = tokenizer.encode(MARKERS[1], add_special_tokens=False)
    assert list(budgeted.token_ids[4 : 4 + len(end)]) == end, "four tokens of thinking, then the marker"
    assert texts[1].startswith(MARKERS[0])
    assert MARKERS[1] in texts[1]
    assert cut.finish_reason == "length", "cut while it thinks: said, not hidden"
    assert len(cut.token_ids) == 5
    assert re.fullmatch(re.escape(MARKERS[1]) + PATTERN, texts[3])


def test_plain_rows_do_not_notice(model: Path, records: list[RankRecord]) -> None:
    alone = run_ranks(run_engine, 1, Case(model, (jobs()[1],), markers=MARKERS))
    assert records[0].outputs[0][1].token_ids == alone[0].outputs[0][0].token_ids
