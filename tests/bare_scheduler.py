"""A scheduler without a model: requests for it, and the steps of the loop that drive it."""

from __future__ import annotations

from typing import Any

from grammar_sync.spec import GrammarSpec
from runtime.messages import AddSequence
from runtime.plan import StepPlan
from runtime.scheduler import Scheduler
from runtime.sequence import Sequence
from runtime.speculation import SpeculationLimits
from runtime.step_planner import SchedulerLimits
from sampler.params import SamplingParams

EOS = 1
GRAMMAR = GrammarSpec("regex", "a+")


def action(
    sequence_id: int,
    prompt_tokens: int = 3,
    max_tokens: int = 2,
    *,
    constrained: bool = False,
    priority: int = 0,
    first_token: int | None = None,
    **params: Any,
) -> AddSequence:
    """Returns a request; its prompt begins like no other's unless it is given a ``first_token``."""
    first = 1000 + sequence_id if first_token is None else first_token
    return AddSequence(
        sequence_id=sequence_id,
        choice=0,
        prompt_token_ids=[first, *range(10, 9 + prompt_tokens)],
        priority=priority,
        max_tokens=max_tokens,
        params=SamplingParams(**params),
        seed=0,
        grammar=GRAMMAR if constrained else None,
    )


def scheduler_of(
    *,
    max_num_seqs: int = 8,
    max_batch_tokens: int = 64,
    kv_cache_tokens: int = 1000,
    in_flight_steps: int = 1,
    block_tokens: int = 2,
    prefix_cache: bool = True,
    draft_tokens: int = 0,
) -> Scheduler:
    limits = SchedulerLimits(
        max_num_seqs=max_num_seqs,
        max_batch_tokens=max_batch_tokens,
        kv_cache_tokens=kv_cache_tokens,
        in_flight_steps=in_flight_steps,
        block_tokens=block_tokens,
        prefix_cache=prefix_cache,
        speculation=SpeculationLimits(draft_tokens),
    )
    return Scheduler(limits, [EOS])


def add(scheduler: Scheduler, *actions: AddSequence) -> None:
    for one in actions:
        scheduler.add(Sequence.from_action(one))


def ids_of(plan: StepPlan) -> list[int]:
    return [row.sequence_id for row in plan.rows]


def commit(scheduler: Scheduler, plan: StepPlan, token_id: int = 5) -> list[int]:
    count = len(plan.sampling_rows)
    indices = list(scheduler.commit(plan, [token_id] * count, [None] * count))
    return [plan.sampling_rows[index].sequence_id for index in indices]


def run_to_the_end(scheduler: Scheduler, *, first_step: int = 1, limit: int = 500) -> list[int]:
    """Runs with one step in flight until nothing is left to run; returns the order in which sequences were released."""
    released: list[int] = []
    for step in range(first_step, first_step + limit):
        if not scheduler.has_work:
            return released
        commit(scheduler, scheduler.plan(step))
        released += [sequence.sequence_id for sequence in scheduler.release_finished(step)]
    raise AssertionError(f"still at work after {limit} steps")


def assert_empty(scheduler: Scheduler) -> None:
    assert not scheduler.has_work
    assert scheduler.waiting_for_grammar == ()
    assert (scheduler._sequences, scheduler._waiting, scheduler._running) == ({}, {}, {})
    assert len(scheduler.blocks) == 0
    assert scheduler.statistics.used_blocks == 0
    scheduler.blocks.begin_plan()
    assert scheduler.blocks._computing == {}
