"""SCENARIOS T2, T10, T11, T12 and S6 on real ranks: mixed batches, stale matchers, ends, and masks of nothing."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from engine_ranks import Case, Job, Output, grammar, run_engine
from ranks import run_ranks
from tiny_checkpoints import write_tiny_checkpoint

from grammar_sync.spec import GrammarSpec
from runtime.tokenizer import Tokenizer
from sampler.params import SamplingParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "ok": {"type": "boolean"}}, "required": ["ok"]}
BOUNDED = {"type": "object", "properties": {"ok": {"enum": [True, False, "maybe"]}}, "required": ["ok"]}
DEAD_END = 'root ::= "x" a\na ::= b\nb ::= a'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3")


def job(number: int, spec: GrammarSpec | None = None, tokens: int = 24, **params: object) -> Job:
    sampled = SamplingParams(**{"temperature": 1.0} | params)  # type: ignore[arg-type]  # of the caller's fields
    return Job([5 + number, 9, 11 + number], tokens, sampled, seed=number, grammar=spec)


def outputs(case: Case) -> list[Output]:
    """Returns what the leader heard, after checking that all ranks ran the same batches."""
    records = run_ranks(run_engine, case.tp * case.pp, case)
    assert all(record.plans == records[0].plans for record in records)
    return list(records[0].outputs[0])


def test_t12_each_row_of_a_mixed_batch_equals_its_solo_run(model: Path) -> None:
    """[plain, json, plain, regex]; rows end, others shift, later ones join."""
    jobs = (
        job(1),
        job(2, grammar(json_schema=BOUNDED, any_whitespace=False)),
        job(3, tokens=9),
        job(4, grammar(regex="[a-f]{4}")),
        job(5, grammar(choice=["red", "green"])),
        job(6, tokens=12),
    )
    mixed = outputs(Case(model, jobs, tp=2, pp=2, max_num_seqs=4))
    for one, together in zip(jobs, mixed, strict=True):
        assert outputs(Case(model, (one,)))[0] == together


def test_t2_a_constrained_request_has_one_decode_in_flight(model: Path) -> None:
    """The scheduler of the test fails a rank that plans such a row too early."""
    jobs = tuple(job(number, grammar(json_schema=BOUNDED, any_whitespace=False)) for number in range(8)) + tuple(
        job(20 + number, tokens=8) for number in range(3)
    )
    ended = outputs(Case(model, jobs, pp=3, stall_s=0.05, seed=5))
    tokenizer = Tokenizer.load(model)
    for output in ended[:8]:
        assert output.finish_reason == "stop"
        assert json.loads(tokenizer.decode(output.token_ids))["ok"] in (True, False, "maybe")


def test_ends_and_masks_of_nothing(model: Path) -> None:
    """T10: ignore_eos ends all the same; T11: the grammar beats min_tokens, a mask of nothing ends its row alone."""
    tokenizer = Tokenizer.load(model)
    yes_or_no = [token_id for letter in "yn" for token_id in tokenizer.encode(letter)]
    starts = [token_id for token_id in range(tokenizer.size) if tokenizer.piece(token_id, 0)[:1] in (b"y", b"n")]
    jobs = (
        job(1, grammar(json_schema={"type": "boolean"}), ignore_eos=True),
        job(2, grammar(regex="yes|no"), min_tokens=20, temperature=0.0),
        job(3, grammar(regex="yes|no"), logit_bias=dict.fromkeys(yes_or_no, -100.0)),
        job(4, grammar(regex="yes|no"), banned_token_ids=tuple(starts)),
        job(5, grammar(ebnf=DEAD_END)),
        job(6, grammar(json_schema=SCHEMA), tokens=3),
        job(7, tokens=24),
    )
    boolean, least, biased, banned, dead, cut, plain = outputs(Case(model, jobs, tp=2, pp=2))
    texts = [tokenizer.decode(output.token_ids) for output in (boolean, least, biased)]
    assert texts[0] in ("true", "false"), "no junk after the end"
    assert boolean.finish_reason == "stop"
    assert [output.finish_reason for output in (least, biased)] == ["stop", "stop"]
    assert all(re.fullmatch("yes|no", text) for text in texts[1:])
    assert (banned.finish_reason, banned.token_ids) == ("error", ())
    assert banned.error is not None
    assert "everything is banned or masked" in banned.error
    assert (dead.finish_reason, dead.token_ids) == ("error", ())
    assert dead.error is not None
    assert "rule root never comes to an end" in dead.error
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 3)
    assert plain == outputs(Case(model, (jobs[6],)))[0]


def test_t8_a_model_that_wants_blanks_is_held_to_the_bound(model: Path) -> None:
    tokenizer = Tokenizer.load(model)
    blanks = {token_id: 100.0 for token_id in range(tokenizer.size) if tokenizer.piece(token_id, 0).strip() == b""}
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    bounded = job(1, grammar(json_schema=schema), tokens=120, logit_bias=blanks)
    strict = replace(bounded, grammar=grammar(json_schema=schema, any_whitespace=False))
    for output, most in zip(outputs(Case(model, (bounded, strict))), (21, 1), strict=True):
        text = tokenizer.decode(output.token_ids)
        assert output.finish_reason == "stop"
        assert json.loads(text)["a"] in (True, False)
        assert max(map(len, re.findall(r"\s+", text)), default=0) <= most
