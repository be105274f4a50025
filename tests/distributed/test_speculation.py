"""Speculation changes no token: the same requests with and without it, on every layout, and it did happen."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from engine_ranks import Case, Job, Output, RankRecord, grammar, run_engine
from ranks import run_ranks
from tiny_checkpoints import write_tiny_checkpoint

from sampler.params import SamplingParams

pytestmark = pytest.mark.long(60)

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", max_position_embeddings=2560)


def passage(length: int, seed: int) -> tuple[int, ...]:
    generator = random.Random(seed)
    return tuple(generator.randrange(1, 320) for _ in range(length))


def copying_jobs() -> tuple[Job, ...]:
    """Jobs whose output repeats itself or its prompt, with everything that a draw can depend on."""
    text = passage(24, 1)
    few = {7: 20.0, 9: 19.5, 12: 19.0, 30: 18.0}
    cold = SamplingParams(temperature=0.3, top_k=3)
    # A penalty for what was said makes the favoured ids take turns; the count of each decides whose turn it is.
    turns = SamplingParams(temperature=0.0, logit_bias=few, frequency_penalty=0.8, repetition_penalty=1.1)
    noisy = SamplingParams(temperature=0.2, logit_bias=few, frequency_penalty=1.0, presence_penalty=0.4, top_p=0.9)
    patient = SamplingParams(temperature=0.3, top_p=0.7, min_tokens=30, logprobs=2, prompt_logprobs=1)
    only = SamplingParams(temperature=1.0, allowed_token_ids=(7, 9), stop_token_ids=(11,))
    biased = SamplingParams(temperature=0.8, logit_bias={7: 14.0, 9: 13.5}, bad_words=("a",), logprobs=0)
    late = SamplingParams(temperature=0.0, logit_bias=few, min_tokens=25, stop_token_ids=(7,))
    return (
        Job((*text, *text, *text[:6]), 60, GREEDY),
        Job(passage(9, 2), 60, cold, seed=1),
        Job((*text, *text[:4]), 60, turns, seed=2),
        Job(passage(12, 3), 60, patient, seed=3),
        Job(passage(7, 4), 60, only, seed=4),
        Job(passage(7, 5), 60, biased, seed=5, bad_words_token_ids=((7, 7, 9), (9, 9, 9))),
        Job(passage(9, 6), 60, GREEDY, grammar=grammar(regex="(abc|xy){20,40}")),
        Job(passage(5, 7), 60, cold, seed=6, grammar=grammar(regex='(\\{"a": [01]\\}, )+')),
        Job(passage(5, 8), 60, SamplingParams(temperature=1.0, return_support=True, top_k=2), seed=7),
        Job(passage(30, 9), 60, noisy, seed=8),
        Job(passage(3, 10), 60, late),
        Job(passage(6, 11), 40, noisy, seed=9),
        Job(passage(6, 11), 40, noisy, seed=9, choice=1, prefill_of=11),
    )


@pytest.fixture(scope="module")
def plain(model: Path) -> RankRecord:
    """What the jobs give on one rank without speculation."""
    record = run(Case(model, copying_jobs()))
    assert record.statistics[0].drafted_tokens == 0
    return record


def run(case: Case, timeout_s: float = 280) -> RankRecord:
    records = run_ranks(run_engine, case.tp * case.pp, case, timeout_s=timeout_s)
    for record in records:
        assert record.plans == records[0].plans
        assert record.statistics == records[0].statistics
        assert record.statistics[0].used_blocks == 0, "a block leaked"
    return records[0]


def tokens(outputs: tuple[Output, ...]) -> list[tuple[tuple[int, ...], str, str | None]]:
    return [(output.token_ids, output.finish_reason, output.error) for output in outputs]


def assert_the_same(plain: RankRecord, guessed: RankRecord, *, tolerance: float = 2e-4) -> None:
    assert tokens(guessed.outputs[0]) == tokens(plain.outputs[0])
    for there, here in zip(plain.outputs[0], guessed.outputs[0], strict=True):
        for reports in ("reports", "prompt_reports"):
            expected, got = getattr(there, reports), getattr(here, reports)
            assert [one.token_id for one in got] == [one.token_id for one in expected]
            assert [one.logprob for one in got] == pytest.approx([one.logprob for one in expected], abs=tolerance)


def guesses(record: RankRecord) -> dict[int, int]:
    """Returns how many tokens were guessed for each sequence."""
    found: dict[int, int] = {}
    for plan in record.plans[0]:
        for row in plan:
            found[row.sequence_id] = found.get(row.sequence_id, 0) + len(row.draft)
    return found


@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
def test_every_kind_of_request_draws_the_same_tokens(model: Path, plain: RankRecord, tp: int, pp: int) -> None:
    guessed = run(Case(model, copying_jobs(), tp=tp, pp=pp, audit=tp == 2, draft_tokens=5))
    assert_the_same(plain, guessed)
    assert all(guesses(guessed).values()), "of some request nothing was guessed"
    statistics = guessed.statistics[0]
    assert 100 < statistics.accepted_tokens < statistics.drafted_tokens


def test_every_request_alone_draws_the_same_tokens(model: Path, plain: RankRecord) -> None:
    """One row at a time has all the budget: long drafts, which end at the last token that was asked for."""
    guessed = run(Case(model, copying_jobs(), max_num_seqs=1, draft_tokens=16))
    assert_the_same(plain, guessed)
    assert max(len(row.draft) for plan in guessed.plans[0] for row in plan) == 16
    steps, drawn = len(guessed.plans[0]), sum(len(output.token_ids) for output in plain.outputs[0])
    assert steps < 0.8 * drawn


def test_in_invariant_mode_the_bits_are_the_same_too(model: Path) -> None:
    case = Case(model, copying_jobs(), tp=2, invariant=True)
    plain, guessed = run(case), run(replace(case, draft_tokens=7))
    assert guessed.outputs == plain.outputs
    assert guessed.statistics[0].accepted_tokens > 100


def storm_jobs(count: int, seed: int) -> tuple[Job, ...]:
    """Jobs that copy, of all lengths and priorities, three in ten of which are aborted."""
    draw = random.Random(seed)
    text = passage(40, seed)
    jobs = []
    for index in range(count):
        bias = {token_id: draw.uniform(17, 20) for token_id in draw.sample(range(2, 300), 4)}
        constrained = grammar(regex="(ab|cd|e){30,60}") if draw.random() < 0.2 else None
        params = SamplingParams(
            temperature=draw.choice([0.0, 0.3]),
            logit_bias=None if constrained else bias,
            frequency_penalty=draw.choice([0.0, 0.9]),
        )
        jobs.append(
            Job(
                (*text[: draw.randint(0, 40)], *passage(draw.randint(1, 20), seed + index + 1)),
                draw.randint(1, 60),
                params,
                seed=index,
                grammar=constrained,
                abort_at_step=draw.randint(2, 60) if draw.random() < 0.3 else None,
                priority=draw.choice([0, 0, 0, 1]),
            )
        )
    return tuple(jobs)


@pytest.mark.parametrize(("tp", "pp", "budget"), [(1, 1, 64), (2, 1, 20), (1, 2, 24), (2, 2, 40)])
def test_an_abort_storm_on_a_tiny_pool_equals_solo_runs(model: Path, tp: int, pp: int, budget: int) -> None:
    jobs = storm_jobs(20, seed=7 * tp + pp)
    tight = Case(
        model,
        jobs,
        tp=tp,
        pp=pp,
        max_num_seqs=10,
        max_batch_tokens=budget,
        kv_cache_tokens=200,
        block_tokens=4,
        draft_tokens=6,
    )
    crowded = run(tight)
    alone = tuple(replace(job, abort_at_step=None) for job in jobs)
    expected = run(Case(model, alone, max_num_seqs=1, prefix_cache=False))
    finished = 0
    for here, there in zip(crowded.outputs[0], expected.outputs[0], strict=True):
        if here.finish_reason == "abort":
            assert here.token_ids == there.token_ids[: len(here.token_ids)]
        else:
            assert tokens((here,)) == tokens((there,))
            finished += 1
    assert finished > len(jobs) // 2
    assert crowded.statistics[0].accepted_tokens > 60
    assert crowded.statistics[0].preemptions > 0
