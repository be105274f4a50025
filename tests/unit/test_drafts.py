"""Drafts: what is guessed, how much of it, and what the scheduler makes of right and wrong guesses."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from bare_scheduler import EOS, action, add, assert_empty, commit, scheduler_of
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.cli.parse import UsageError
from launch.speculate import speculation_limits
from runtime.drafter import Drafter
from runtime.messages import ErrorInfo
from runtime.plan import PlanDigest, PlanRow
from runtime.scheduler import Scheduler
from runtime.sequence import Sequence
from runtime.speculation import PromptLookup, SpeculationLimits

_tokens = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def found_by_search(token_ids: list[int], most: int) -> tuple[int, ...]:
    """Says what follows the latest earlier place of the last four, or else the last two, tokens."""
    for size in (4, 2):
        for end in range(len(token_ids) - 1, size - 1, -1):
            if len(token_ids) > size and token_ids[end - size : end] == token_ids[-size:]:
                copied = list(token_ids)
                for at in range(most):
                    copied.append(copied[end + at])
                return tuple(copied[len(token_ids) :])
    return ()


@given(token_ids=_tokens, added=st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=8), most=st.integers(1, 9))
@settings(deadline=None)
def test_the_index_finds_what_a_search_finds(token_ids: list[int], added: list[list[int]], most: int) -> None:
    lookup = PromptLookup(most)
    for more in [[], *added]:
        token_ids = token_ids + more
        assert lookup.draft(token_ids, most) == found_by_search(token_ids, most)


@given(token_ids=_tokens, longest=st.integers(1, 8), most=st.integers(-2, 9), fates=st.lists(st.integers(0, 8)))
@settings(deadline=None)
def test_a_draft_is_never_longer_than_it_may_be(
    token_ids: list[int], longest: int, most: int, fates: list[int]
) -> None:
    lookup = PromptLookup(longest)
    for accepted in fates:
        draft = lookup.draft(token_ids, most)
        assert len(draft) <= max(min(longest, most), 0)
        if draft:
            lookup.settle(len(draft), min(accepted, len(draft)), len(token_ids) + 1)
        token_ids = [*token_ids, 1]


def test_the_length_follows_the_last_draft() -> None:
    lookup, token_ids = PromptLookup(8), [1, 2, 3, 4] * 6
    lengths = []
    for accepted in (8, 3, 3, 6, 8, 1, 2):
        draft = lookup.draft(token_ids, 99)
        lengths.append(len(draft))
        lookup.settle(len(draft), accepted, len(token_ids))
    assert lengths == [8, 8, 3, 6, 8, 8, 1]


def test_what_is_wrong_from_the_start_rests_longer_each_time() -> None:
    lookup, token_ids = PromptLookup(8), [1, 2] * 4
    asked = []
    while len(token_ids) < 800:
        if draft := lookup.draft(token_ids, 99):
            asked.append(len(token_ids))
            lookup.settle(len(draft), 0, len(token_ids))
        token_ids.append(token_ids[-2])
    rests = [after - before for before, after in pairwise(asked)]
    assert rests == [4, 8, 16, 32, 64, 128, 256, 256]


def decoding(prompt: list[int], output: list[int], max_tokens: int = 50, **params: Any) -> Sequence:
    sequence = Sequence.from_action(action(1, len(prompt), max_tokens, **params))
    sequence.prompt_token_ids[:] = prompt
    sequence.output_token_ids += output
    return sequence


def test_nothing_is_guessed_beyond_the_end_nor_the_end_itself() -> None:
    drafter = Drafter(SpeculationLimits(8), frozenset({EOS}))
    assert drafter.draft(decoding([7, 8, 9, EOS, 5, 7], [8]), 8) == (9,)
    assert drafter.draft(decoding([7, 8, 9, EOS, 5, 7], [8], ignore_eos=True), 8) == (9, EOS, 5, 7, 8, 9, EOS, 5)
    assert drafter.draft(decoding([7, 8, 9, 3, 5, 7], [8], stop_token_ids=(3,)), 8) == (9,)
    assert drafter.draft(decoding([7, 8, 9, 3, 5, 7], [8], max_tokens=4), 8) == (9, 3)
    assert drafter.draft(decoding([7, 8, 9, 3, 5, 7], [8], max_tokens=2), 8) == ()


def test_who_does_not_speculate() -> None:
    drafter = Drafter(SpeculationLimits(8), frozenset({EOS}))
    assert drafter.draft(decoding([7, 8, 9, 7, 8], []), 8) == ()
    assert drafter.draft(decoding([7, 8, 9, 7], [8], logit_processors=({"name": "x"},)), 8) == ()
    assert drafter.budget(99) == 32
    assert Drafter(SpeculationLimits(), frozenset()).budget(99) == 0


def copying_scheduler(**limits: Any) -> Scheduler:
    """Returns a scheduler with one sequence that has just drawn 10 behind the prompt [1000, 10, 11, 12, 13, 10, 11]."""
    scheduler = scheduler_of(draft_tokens=4, **limits)
    one = action(0, 7, 20)
    one.prompt_token_ids[:] = [1000, 10, 11, 12, 13, 14, 10]
    add(scheduler, one)
    commit(scheduler, scheduler.plan(1), 11)
    return scheduler


def test_right_guesses_are_committed_with_the_token_behind_them() -> None:
    scheduler = copying_scheduler(block_tokens=2)
    plan = scheduler.plan(2)
    (row,) = plan.rows
    assert (row.start, row.length, row.draft) == (7, 5, (12, 13, 14, 10))
    assert plan.sampling_rows == (row,) * 5
    assert plan.guessed == (0, 1, 2, 3, 4)
    assert list(scheduler.commit(plan, [12, 13, 14, 10, 11], [None] * 5)) == [0, 1, 2, 3, 4]
    assert scheduler[0].output_token_ids == [11, 12, 13, 14, 10, 11]
    assert scheduler[0].num_computed == 12
    assert (scheduler.statistics.drafted_tokens, scheduler.statistics.accepted_tokens) == (4, 4)
    scheduler.end(0, "abort")
    scheduler.release_finished(2)
    add(scheduler, action(1, 2))
    newcomer = scheduler._waiting[1]
    newcomer.prompt_token_ids[:] = [1000, 10, 11, 12, 13, 14, 10, 11, 12, 13, 14, 10, 11, 5]
    scheduler.plan(3)
    assert scheduler.statistics.hit_tokens == 12, "what was computed for right guesses can be reused"


def test_wrong_guesses_leave_nothing_behind() -> None:
    scheduler = copying_scheduler(block_tokens=2)
    plan = scheduler.plan(2)
    assert len(scheduler.blocks.table(0)) == 6
    assert list(scheduler.commit(plan, [12, 99, 14, 10, 11], [None] * 5)) == [0, 1]
    assert scheduler[0].output_token_ids == [11, 12, 99]
    assert scheduler[0].num_computed == 9
    assert len(scheduler.blocks.table(0)) == 5
    assert scheduler.statistics.used_blocks == 5
    assert (scheduler.statistics.drafted_tokens, scheduler.statistics.accepted_tokens) == (4, 1)
    (row,) = scheduler.plan(3).rows
    assert (row.start, row.length, row.new_blocks) == (9, 1, ())
    scheduler.end(0, "abort")
    commit(scheduler, scheduler.plan(4))
    scheduler[0].in_flight = False
    scheduler.release_finished(4)
    add(scheduler, action(1, 2))
    scheduler._waiting[1].prompt_token_ids[:] = [1000, 10, 11, 12, 13, 14, 10, 11, 12, 13, 14, 10, 11, 5]
    scheduler.plan(5)
    # Eight tokens in whole blocks, and one more in a block that begins alike.
    assert scheduler.statistics.hit_tokens <= 9, "what was computed for wrong guesses was reused"


def test_what_fails_behind_a_guess_is_drawn_again() -> None:
    scheduler = copying_scheduler()
    error = ErrorInfo("grammar_error", "took too long")
    plan = scheduler.plan(2)
    assert list(scheduler.commit(plan, [12, 13, -1, -1, -1], [None, None, error, error, error])) == [0, 1]
    assert scheduler[0].finish_reason is None
    assert scheduler[0].output_token_ids == [11, 12, 13]
    plan = scheduler.plan(3)
    assert plan.rows[0].start == 9
    failed = len(plan.sampling_rows)
    assert list(scheduler.commit(plan, [-1] * failed, [error] * failed)) == [0]
    assert scheduler[0].error == error


def test_a_draft_takes_no_block_that_another_needs() -> None:
    scheduler = copying_scheduler(block_tokens=2, kv_cache_tokens=10)
    (row,) = scheduler.plan(2).rows
    assert (row.draft, scheduler.statistics.used_blocks) == ((), 4)
    scheduler = copying_scheduler(block_tokens=2, kv_cache_tokens=12)
    (row,) = scheduler.plan(2).rows
    assert (row.draft, scheduler.statistics.used_blocks) == ((12, 13), 5)


def test_a_draft_leaves_room_for_other_rows() -> None:
    scheduler = copying_scheduler(max_batch_tokens=8)
    add(scheduler, action(1, 9))
    rows = scheduler.plan(2).rows
    assert [(row.sequence_id, row.length, len(row.draft)) for row in rows] == [(0, 5, 4), (1, 3, 0)]


def test_a_sequence_that_copies_runs_to_its_end_in_few_steps() -> None:
    scheduler = copying_scheduler()
    text, steps = [11, 12, 13, 14, 10], 1
    while scheduler.has_work:
        steps += 1
        plan = scheduler.plan(steps)
        at = len(scheduler[0].output_token_ids) if plan.rows else 0
        drawn = [text[(at + guessed) % 5] for guessed in plan.guessed]
        list(scheduler.commit(plan, drawn, [None] * len(drawn)))
        scheduler.release_finished(steps)
    assert steps == 5
    assert_empty(scheduler)


def test_drafts_are_part_of_the_digest() -> None:
    rows = [PlanRow(1, 9, 3, samples=True, constrained=False, draft=draft) for draft in ((4, 5), (4, 6), ())]
    assert len({PlanDigest().update_rows(1, (row,)) for row in rows}) == 3


@pytest.mark.parametrize("text", ["", "ngram", "ngram:", "ngram:0", "ngram:33", "ngram:-1", "ngram:٣", "draft:4", "4"])
def test_what_the_option_does_not_take(text: str) -> None:
    with pytest.raises(UsageError, match=r"--speculate is .*: ngram:K is needed, K from 1 to 32"):
        speculation_limits(text)


def test_what_the_option_takes() -> None:
    assert speculation_limits(None).draft_tokens == 0
    assert speculation_limits("ngram:8").draft_tokens == 8
