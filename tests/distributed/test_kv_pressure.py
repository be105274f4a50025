"""A KV pool that is too small for what runs: preempted sequences give the text of an uninterrupted run (T22, T4)."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from engine_ranks import Case, Job, Output, RankRecord, grammar, run_engine
from ranks import run_ranks
from tiny_checkpoints import write_tiny_checkpoint

from sampler.params import SamplingParams

pytestmark = pytest.mark.long(55)

INTEGERS = {"type": "array", "items": {"type": "integer"}}
LAYOUTS = [(1, 1), (2, 1), (2, 2), (1, 3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"), "llama", max_position_embeddings=2560, num_hidden_layers=4
    )


def prompt(length: int, seed: int) -> tuple[int, ...]:
    generator = random.Random(seed)
    return tuple(generator.randrange(1, 320) for _ in range(length))


def run(case: Case, timeout_s: float = 280) -> list[RankRecord]:
    records = run_ranks(run_engine, case.tp * case.pp, case, timeout_s=timeout_s)
    for record in records:
        assert record.plans == records[0].plans
        assert record.preempted == records[0].preempted
        assert record.statistics == records[0].statistics
        assert record.statistics[0].used_blocks == 0, "a block leaked"
    return records


def tokens(outputs: tuple[Output, ...]) -> list[tuple[tuple[int, ...], str, str | None]]:
    return [(output.token_ids, output.finish_reason, output.error) for output in outputs]


def demanding_jobs() -> tuple[Job, ...]:
    """Jobs whose next token depends on all before it: grammars, penalties, min_tokens, bad words, logprobs, seeds."""
    sampled = SamplingParams(temperature=1.0)
    penalised = SamplingParams(temperature=1.0, frequency_penalty=1.5, repetition_penalty=1.3, bad_words=("a",))
    patient = SamplingParams(temperature=1.0, min_tokens=24, logprobs=2, prompt_logprobs=1)
    return (
        Job(prompt(20, 0), 40, penalised, seed=1, bad_words_token_ids=((5,), (7, 9))),
        Job(prompt(9, 1), 40, sampled, seed=2, grammar=grammar(regex="[a-z]{40}")),
        Job(prompt(15, 2), 40, patient, seed=3),
        Job(prompt(12, 3), 40, penalised, seed=4, grammar=grammar(regex="([0-9] ?){40}")),
        Job(
            prompt(3, 4),
            40,
            sampled,
            seed=5,
            grammar=grammar(json_schema={"type": "array", "items": {"type": "integer"}}),
        ),
    )


@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
def test_t22_a_preempted_sequence_goes_on_as_if_nothing_had_been(model: Path, tp: int, pp: int) -> None:
    """SCENARIOS T22: preempted after six constrained tokens; penalties, min_tokens, seeds and grammars go on."""
    roomy = Case(model, demanding_jobs(), tp=tp, pp=pp)
    tiny = replace(roomy, kv_cache_tokens=96, block_tokens=4, prefix_cache=pp == 2)
    (uninterrupted, *_), (preempted, *_) = run(roomy), run(tiny)
    assert uninterrupted.preempted == ((),)
    interrupted = {sequence for sequence, outputs in preempted.preempted[0] if outputs >= 6}
    assert interrupted.intersection({1, 3, 4}), "no constrained sequence was preempted after six tokens"
    assert tokens(preempted.outputs[0]) == tokens(uninterrupted.outputs[0])
    for there, here in zip(uninterrupted.outputs[0], preempted.outputs[0], strict=True):
        for reports in ("reports", "prompt_reports"):
            expected, got = getattr(there, reports), getattr(here, reports)
            assert [one.token_id for one in got] == [one.token_id for one in expected]
            assert [one.logprob for one in got] == pytest.approx([one.logprob for one in expected], abs=2e-4)


def mixed_jobs(count: int, longest: int, seed: int, outputs: int = 60) -> tuple[Job, ...]:
    """Prompts of 1 to ``longest`` tokens, some alike at their beginning, three in ten aborted at some step."""
    draw = random.Random(seed)
    shared = prompt(longest, seed)
    jobs = []
    for index in range(count):
        length = draw.randint(1, longest)
        own = prompt(length, seed + index + 1)
        common = draw.choice([0, 0, length // 2])
        jobs.append(
            Job(
                shared[:common] + own[common:],
                draw.randint(1, outputs),
                SamplingParams(temperature=draw.choice([0.0, 1.0]), presence_penalty=draw.choice([0.0, 0.7])),
                seed=index,
                abort_at_step=draw.randint(2, 4 * count) if draw.random() < 0.3 else None,
                priority=draw.choice([0, 0, 0, 1]),
            )
        )
    return tuple(jobs)


def assert_equal_to_solo_runs(case: Case, timeout_s: float = 280) -> None:
    (crowded, *_) = run(case, timeout_s)
    assert len(crowded.preempted[0]) > len(case.jobs) // 20
    alone = tuple(replace(job, abort_at_step=None) for job in case.jobs)
    solo = replace(case, jobs=alone, tp=1, pp=1, max_num_seqs=1, kv_cache_tokens=1 << 16, prefix_cache=False)
    (expected, *_) = run(solo, timeout_s)
    finished = 0
    for job, here, there in zip(case.jobs, crowded.outputs[0], expected.outputs[0], strict=True):
        if here.finish_reason == "abort":
            assert job.abort_at_step is not None
            assert here.token_ids == there.token_ids[: len(here.token_ids)]
        else:
            assert tokens((here,)) == tokens((there,))
            finished += 1
    assert finished > len(case.jobs) // 2


@pytest.mark.parametrize(("tp", "pp", "budget"), [(1, 1, 64), (1, 2, 24)])
def test_mixed_requests_equal_their_solo_runs(model: Path, tp: int, pp: int, budget: int) -> None:
    jobs = mixed_jobs(24, 60, seed=11)
    assert_equal_to_solo_runs(
        Case(model, jobs, tp=tp, pp=pp, max_num_seqs=12, max_batch_tokens=budget, kv_cache_tokens=160, block_tokens=4)
    )


@pytest.mark.sweep
@pytest.mark.timeout(7000)
def test_two_thousand_mixed_requests_equal_their_solo_runs(model: Path) -> None:
    jobs = mixed_jobs(2000, 2000, seed=5, outputs=160)
    case = Case(model, jobs, max_num_seqs=48, max_batch_tokens=512, kv_cache_tokens=1 << 12, block_tokens=4)
    assert_equal_to_solo_runs(case, timeout_s=3000)


@pytest.mark.parametrize(("pp", "budget"), [(1, 2048), (2, 300)])
def test_a_shared_prefix_is_computed_once(model: Path, pp: int, budget: int) -> None:
    prefix = prompt(1000, 1)
    jobs = tuple(Job((*prefix, 1 + index, *prompt(20 + index, 2 + index)), 2) for index in range(32))
    (record, *_) = run(Case(model, jobs, pp=pp, max_batch_tokens=budget))
    once = 1000 + sum(len(job.prompt) - 1000 for job in jobs)
    computed = record.statistics[0].prefill_tokens
    assert computed == sum(
        row.length for plan in record.plans[0] for row in plan if row.start < len(jobs[row.sequence_id].prompt)
    )
    assert computed == pytest.approx(once, rel=0.05)
    assert record.statistics[0].hit_tokens == sum(len(job.prompt) for job in jobs) - computed
    (first, *_) = run(Case(model, jobs[:2], pp=pp, prefix_cache=False))
    assert tokens(record.outputs[0][:2]) == tokens(first.outputs[0])
    assert first.statistics[0].hit_tokens == 0


def test_tenants_with_different_salts_share_nothing(model: Path) -> None:
    jobs = tuple(Job(prompt(100, 1), 2, cache_salt=salt) for salt in ("", "a", "b", "a"))
    (record, *_) = run(Case(model, jobs))
    assert record.statistics[0].hit_tokens == 96
    assert len(set(tokens(record.outputs[0]))) == 1


@pytest.mark.parametrize("pp", [1, 4])
def test_t4_aborts_free_their_blocks_at_once_and_touch_nobody(model: Path, pp: int) -> None:
    """SCENARIOS T4: in prefill, while waiting for a grammar, in mid-decode, twice, after the end, an unknown id."""
    slow = grammar(regex="[a-z]{30}")
    jobs = (
        Job(prompt(30, 0), 24),
        Job(prompt(60, 1), 24, abort_at_step=3),
        Job(prompt(5, 2), 24, abort_at_step=12),
        Job(prompt(5, 3), 24, grammar=slow, abort_at_step=2),
        Job(prompt(5, 4), 2),
        Job(prompt(8, 10), 24),
    )
    case = Case(model, jobs, pp=pp, max_batch_tokens=16, more_ends=((13, 2), (30, 4), (5, 77), (5, 1)))
    (record, *_) = run(case)
    reasons = [output.finish_reason for output in record.outputs[0]]
    assert reasons == ["length", "abort", "abort", "abort", "length", "length"]
    assert 0 < len(record.outputs[0][2].token_ids) < 24
    for job, output in zip(jobs, record.outputs[0], strict=True):
        if job.abort_at_step is not None:
            index = jobs.index(job)
            after = record.holders[0][job.abort_at_step - 1 + pp :]
            assert not any(index in holders for holders in after), f"sequence {index} held blocks too long"
            assert output.error is None
    assert any(1 in holders for holders in record.holders[0]), "it was aborted before it ran at all"
    kept = tuple(job for job in jobs if job.abort_at_step is None)
    (undisturbed, *_) = run(Case(model, kept))
    survivors = tuple(one for one in record.outputs[0] if one.finish_reason != "abort")
    assert tokens(survivors) == tokens(undisturbed.outputs[0])
