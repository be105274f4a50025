"""Whom a step runs: decodes beside prompts, priorities, and who gives up blocks to whom."""

from __future__ import annotations

import pytest
from bare_scheduler import action, add, assert_empty, commit, ids_of, run_to_the_end, scheduler_of

from runtime.plan import StepPlan
from runtime.scheduler import Scheduler


def decoding(scheduler: Scheduler, count: int, *, max_tokens: int = 50) -> None:
    """Brings ``count`` sequences to where they decode."""
    add(scheduler, *(action(one, prompt_tokens=1, max_tokens=max_tokens) for one in range(count)))
    for step in range(1, count + 1):
        commit(scheduler, scheduler.plan(step))
    assert not scheduler._waiting


def steps(scheduler: Scheduler, first: int, count: int) -> list[StepPlan]:
    plans = []
    for step in range(first, first + count):
        plans.append(scheduler.plan(step))
        commit(scheduler, plans[-1])
        scheduler.release_finished(step)
    return plans


@pytest.mark.parametrize("budget", [2, 5, 8, 12])
def test_neither_decodes_nor_prompts_starve(budget: int) -> None:
    scheduler = scheduler_of(max_num_seqs=16, max_batch_tokens=budget)
    decoding(scheduler, 10)
    add(scheduler, action(20, prompt_tokens=60, max_tokens=1))
    plans = steps(scheduler, 100, 20)
    for plan in plans[:10]:
        prompt = sum(row.length for row in plan.rows if row.sequence_id == 20)
        assert prompt >= max(budget // 4, 1)
        assert plan.num_tokens == budget
    longest_wait = 10 // max(budget - max(budget // 4, 1), 1) + 1
    for one in range(10):
        ran = [one in ids_of(plan) for plan in plans]
        assert all(any(ran[at : at + longest_wait + 1]) for at in range(len(ran) - longest_wait))


def test_a_step_keeps_nothing_for_prompts_when_none_waits() -> None:
    scheduler = scheduler_of(max_num_seqs=16, max_batch_tokens=8)
    decoding(scheduler, 8)
    assert all(len(plan.rows) == 8 for plan in steps(scheduler, 100, 5))


def test_the_lower_priority_number_is_admitted_first() -> None:
    scheduler = scheduler_of(max_num_seqs=1)
    add(scheduler, *(action(one, priority=priority) for one, priority in enumerate((0, 5, -1, 0, -1))))
    assert run_to_the_end(scheduler) == [2, 4, 0, 3, 1]


def test_the_last_in_rank_gives_up_its_blocks_and_runs_to_its_end_later() -> None:
    scheduler = scheduler_of(kv_cache_tokens=16, prefix_cache=False)
    add(scheduler, action(0, 3, 10), action(1, 3, 10, priority=-1), action(2, 3, 10))
    preempted: list[int] = []
    for step in range(1, 100):
        plan = scheduler.plan(step)
        preempted += plan.preempted
        commit(scheduler, plan)
        scheduler.release_finished(step)
    assert preempted[:2] == [2, 0], "first the one that came last, then the one of the higher number"
    assert scheduler.statistics.preemptions == len(preempted)
    assert_empty(scheduler)


def test_a_preempted_sequence_keeps_its_output_and_runs_all_its_tokens_again() -> None:
    scheduler = scheduler_of(kv_cache_tokens=12, prefix_cache=False)
    add(scheduler, action(0, 3, 6), action(1, 3, 6))
    sequence, before, again = scheduler[1], 0, []
    for step in range(1, 40):
        plan = scheduler.plan(step)
        if 1 in plan.preempted:
            before = len(sequence.output_token_ids)
            assert sequence.num_computed == 0
        again += [(row.start, row.length) for row in plan.rows if row.sequence_id == 1 and before and row.length > 1]
        commit(scheduler, plan)
        scheduler.release_finished(step)
    assert before > 0
    assert again == [(0, 3 + before)]
    assert len(sequence.output_token_ids) == 6


def test_one_that_was_preempted_waits_for_more_room_the_more_often_it_was() -> None:
    scheduler = scheduler_of(kv_cache_tokens=40, block_tokens=1, prefix_cache=False)
    add(scheduler, action(0, 10, 20), action(1, 10, 20), action(2, 10, 20))
    run_to_the_end(scheduler)
    assert scheduler.statistics.preemptions <= 6
    assert_empty(scheduler)


def test_a_plan_tells_of_every_block_once() -> None:
    scheduler = scheduler_of(block_tokens=2)
    add(scheduler, action(0, 5, 6))
    told: list[int] = []
    for step in range(1, 6):
        (row,) = scheduler.plan(step).rows
        told += row.new_blocks
        assert told == scheduler.blocks.table(0).blocks
        list(scheduler.commit(StepPlan(step, (row,), 0), [5], [None]))
    assert len(told) == 5
