"""The replicated scheduler under random histories: what must hold after every step, and what is left at the end."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import msgspec
import pytest
import torch
from bare_scheduler import EOS, action, add, assert_empty, commit, ids_of, run_to_the_end, scheduler_of
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from grammar_sync.agreement import GrammarFailure, Verdict
from runtime.messages import AddSequence, ErrorInfo
from runtime.plan import PlanDigest, PlanRow, StepPlan
from runtime.scheduler import Scheduler
from runtime.sequence import Sequence, SequenceState
from runtime.speculation import SpeculationLimits
from runtime.step_planner import SchedulerLimits

MOST_TOKENS = 14


class SimulatedMemory:
    """Stands for the KV pool: a slot holds all tokens up to its own, or nothing that is known."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._slots: dict[int, tuple[int, ...]] = {}

    def run(self, plan: StepPlan, scheduler: Scheduler) -> None:
        """Does what a forward pass does with the pool, and checks that each row reads its own tokens' entries."""
        size = self._block_tokens
        rows = [(row, scheduler[row.sequence_id], scheduler.blocks.table(row.sequence_id).blocks) for row in plan.rows]
        for row, _, blocks in rows:
            if row.copied >= 0:
                source, target = row.copied * size, blocks[row.start // size] * size
                self._slots.update({target + at: self._slots.get(source + at, ()) for at in range(size)})
        for row, sequence, blocks in rows:
            tokens = [*sequence.token_ids(0, row.start + row.length), *row.draft]
            for at in range(row.start, row.start + row.length):
                self._slots[blocks[at // size] * size + at % size] = tuple(tokens[: at + 1])
        for row, sequence, blocks in rows:
            tokens = [*sequence.token_ids(0, row.start + row.length), *row.draft]
            for at in range(row.start + row.length):
                assert self._slots.get(blocks[at // size] * size + at % size) == tuple(tokens[: at + 1])


class SchedulerHistory(RuleBasedStateMachine):
    """Two replicas that are fed the same, run as the step loop runs them, with every promise checked on the way."""

    @initialize(
        max_num_seqs=st.integers(1, 4),
        max_batch_tokens=st.integers(1, 9),
        block_tokens=st.integers(1, 5),
        more_blocks=st.integers(0, 4),
        in_flight_steps=st.integers(1, 4),
        prefix_cache=st.booleans(),
        draft_tokens=st.integers(0, 4),
        step_tokens=st.integers(0, 6),
    )
    def begin(
        self,
        max_num_seqs: int,
        max_batch_tokens: int,
        block_tokens: int,
        more_blocks: int,
        in_flight_steps: int,
        prefix_cache: bool,
        draft_tokens: int,
        step_tokens: int,
    ) -> None:
        kv_cache_tokens = (-(-MOST_TOKENS // block_tokens) + more_blocks) * block_tokens
        self.limits = SchedulerLimits(
            max_num_seqs,
            max_batch_tokens,
            kv_cache_tokens,
            in_flight_steps,
            max_scored_tokens=3,
            block_tokens=block_tokens,
            prefix_cache=prefix_cache,
            speculation=SpeculationLimits(draft_tokens, step_tokens),
        )
        self.replicas = [Scheduler(self.limits, [EOS]) for _ in range(2)]
        self.memory = SimulatedMemory(block_tokens)
        self.flights: deque[StepPlan] = deque()
        self.step = 0
        self.next_id = 0
        self.computed: dict[int, int | None] = {}
        self.scored: dict[int, int] = {}
        self.finished: set[int] = set()
        self.reported: set[int] = set()
        self.mirrors: dict[int, Sequence] = {}

    @property
    def scheduler(self) -> Scheduler:
        return self.replicas[0]

    @rule(
        prompt_tokens=st.integers(1, 6),
        max_tokens=st.integers(1, 8),
        constrained=st.booleans(),
        jump=st.integers(1, 3),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        first_token=st.sampled_from([3, 3, None]),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        choices=st.sampled_from([1, 1, 2, 3]),
    )
    def arrive(
        self,
        prompt_tokens: int,
        max_tokens: int,
        constrained: bool,
        jump: int,
        priority: int,
        first_token: int | None,
        prompt_logprobs: int | None,
        choices: int,
    ) -> None:
        self.next_id += jump
        first = action(
            self.next_id,
            prompt_tokens,
            max_tokens,
            constrained=constrained,
            priority=priority,
            first_token=first_token,
            prompt_logprobs=prompt_logprobs,
        )
        for choice in range(choices):
            one = msgspec.structs.replace(
                first, sequence_id=self.next_id, choice=choice, prefill_of=first.sequence_id if choice else None
            )
            for replica in self.replicas:
                add(replica, one)
            self.mirrors[self.next_id] = self.scheduler[self.next_id]
            self.computed[self.next_id] = None
            self.scored[self.next_id] = 0
            self.next_id += 1

    @rule(data=st.data(), reason=st.sampled_from(["abort", "error", "stop"]))
    def end(self, data: st.DataObject, reason: Any) -> None:
        sequence_id = data.draw(st.integers(0, self.next_id + 1))
        ended = [replica.end(sequence_id, reason) for replica in self.replicas]
        known = sequence_id in self.mirrors and sequence_id not in self.finished
        assert [sequence is not None for sequence in ended] == [known, known]
        if known:
            assert self.mirrors[sequence_id].finish_reason == reason
            self.finished.add(sequence_id)

    @precondition(lambda self: self.scheduler.waiting_for_grammar)
    @rule(data=st.data())
    def agree(self, data: st.DataObject) -> None:
        waiting = self.scheduler.waiting_for_grammar
        outcome = data.draw(st.lists(st.sampled_from("rfw"), min_size=len(waiting), max_size=len(waiting)))
        ready = tuple(one for one, what in zip(waiting, outcome, strict=True) if what == "r")
        failed = tuple(
            GrammarFailure(one, "no such rule") for one, what in zip(waiting, outcome, strict=True) if what == "f"
        )
        verdict = Verdict(self.step, ready, failed)
        for replica in self.replicas:
            ended = replica.apply(verdict)
            assert [sequence.sequence_id for sequence in ended] == [failure.request_id for failure in failed]
            assert all(
                sequence.error == ErrorInfo("grammar_error", "regex: no such rule", "regex") for sequence in ended
            )
        self.finished.update(failure.request_id for failure in failed)

    @rule(data=st.data())
    def run_step(self, data: st.DataObject) -> None:
        self.step += 1
        before = list(self.scheduler._waiting.values())
        unreleased = self.finished - self.reported
        parents = {one.prefill_of for one in before}
        held_back = parents.intersection(self.scheduler.waiting_for_grammar)
        idle = not self.flights and self.scheduler.has_work and not unreleased and not held_back
        plans = [replica.plan(self.step) for replica in self.replicas]
        assert plans[0] == plans[1]
        plan = plans[0]
        self._check(plan, before)
        assert plan.rows or not idle, "work is there, nothing is in flight, and nothing runs"
        if plan.rows:
            self.flights.append(plan)
        while self.flights and (len(self.flights) == self.limits.in_flight_steps or not plan.rows):
            self._commit(self.flights.popleft(), data)
        self._release()

    def _check(self, plan: StepPlan, waiting_before: list[Sequence]) -> None:
        assert plan.num_tokens <= self.limits.max_batch_tokens
        assert len(set(ids_of(plan))) == len(plan.rows)
        in_flight = {one for flight in self.flights for one in ids_of(flight)}
        assert in_flight.isdisjoint(ids_of(plan))
        assert in_flight.isdisjoint(plan.preempted)
        if not self.limits.prefix_cache:
            # Those that share nothing are admitted in order of rank.
            alone = [one for one in waiting_before if one.prefill_of is None and not one.scores_prompt]
            admitted = [one.state is not SequenceState.WAITING for one in alone]
            assert admitted == sorted(admitted, reverse=True)
        for sequence_id in plan.preempted:
            self.computed[sequence_id] = None
            assert self.mirrors[sequence_id].state is SequenceState.WAITING
            assert all(
                self.mirrors[sequence_id].rank > running.rank
                for running in self.scheduler._running.values()
                if running.state is SequenceState.RUNNING and not running.in_flight
            ), "one of a higher rank was preempted"
        self.memory.run(plan, self.scheduler)
        for row in plan.rows:
            sequence = self.mirrors[row.sequence_id]
            assert row.sequence_id not in self.finished
            computed = self.computed[row.sequence_id]
            if computed is None:
                shares = self.limits.prefix_cache or sequence.prefill_of is not None
                assert row.start == 0 or (shares and row.start < sequence.num_tokens)
                assert row.new_blocks == tuple(self.scheduler.blocks.table(row.sequence_id).blocks)
            else:
                assert row.start == computed
            assert row.length >= 1
            assert len(sequence.token_ids(row.start, row.length)) == row.length - len(row.draft)
            self.computed[row.sequence_id] = row.start + row.length
            assert row.samples == (row.start + row.length - len(row.draft) == sequence.num_tokens)
            if row.draft:
                assert row.length == 1 + len(row.draft)
                assert len(row.draft) <= self.limits.speculation.draft_tokens
                assert EOS not in row.draft
                assert row.start + row.length < sequence.capacity_tokens
            assert row.constrained == (row.samples and sequence.grammar is not None)
            if row.scores:
                assert row.start == self.scored[row.sequence_id], "each prompt token is scored once, in order"
                self.scored[row.sequence_id] += row.length
            if row.samples and sequence.scores_prompt:
                assert self.scored[row.sequence_id] == len(sequence.prompt_token_ids)
        assert sum(row.length for row in plan.rows if row.scores) <= self.limits.max_scored_tokens
        assert sum(len(row.draft) for row in plan.rows) <= self.limits.speculation.step_tokens

    def _commit(self, plan: StepPlan, data: st.DataObject) -> None:
        count = len(plan.sampling_rows)
        outcomes = data.draw(st.lists(st.sampled_from([5, 5, 6, 6, 7, 7, EOS, None]), min_size=count, max_size=count))
        follows_guess = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
        for index, (row, guessed) in enumerate(zip(plan.sampling_rows, plan.guessed, strict=True)):
            if guessed < len(row.draft) and follows_guess[index]:
                outcomes[index] = row.draft[guessed]
        tokens = [-1 if outcome is None else outcome for outcome in outcomes]
        errors = [ErrorInfo("sampling_error", "no token") if outcome is None else None for outcome in outcomes]
        lengths = {row.sequence_id: self.mirrors[row.sequence_id].num_tokens for row in plan.rows}
        expected = self._expected_commits(plan, outcomes)
        for replica in self.replicas:
            assert list(replica.commit(plan, tokens, errors)) == expected
        for row in {row.sequence_id: row for row in plan.sampling_rows}.values():
            sequence = self.mirrors[row.sequence_id]
            grew = sum(
                tokens[index] >= 0 for index in expected if plan.sampling_rows[index].sequence_id == row.sequence_id
            )
            assert sequence.num_tokens == lengths[row.sequence_id] + grew
            if sequence.state is SequenceState.FINISHED:
                self.finished.add(row.sequence_id)
            elif row.draft:
                assert sequence.num_computed == sequence.num_tokens - 1
                self.computed[row.sequence_id] = sequence.num_computed
                blocks = self.scheduler.blocks.table(row.sequence_id).blocks
                assert len(blocks) == -(-sequence.num_tokens // self.limits.block_tokens), "a guess keeps its block"

    def _expected_commits(self, plan: StepPlan, outcomes: list[int | None]) -> list[int]:
        """Says, token by token, which of a step's draws a run without speculation would have made too."""
        expected: list[int] = []
        goes_on: dict[int, bool] = {}
        left = {one: sequence.max_tokens - len(sequence.output_token_ids) for one, sequence in self.mirrors.items()}
        for index, (row, guessed) in enumerate(zip(plan.sampling_rows, plan.guessed, strict=True)):
            one, outcome = row.sequence_id, outcomes[index]
            if one in self.finished or (guessed and (not goes_on[one] or outcome is None)):
                goes_on[one] = False
                continue
            expected.append(index)
            left[one] -= 1
            is_right = guessed < len(row.draft) and outcome == row.draft[guessed]
            goes_on[one] = is_right and outcome not in (EOS, None) and left[one] > 0
        return expected

    def _release(self) -> None:
        released = [
            [sequence.sequence_id for sequence in replica.release_finished(self.step)] for replica in self.replicas
        ]
        assert released[0] == released[1]
        assert self.finished.issuperset(released[0])
        assert self.reported.isdisjoint(released[0]), "a sequence was released twice"
        self.reported.update(released[0])

    @invariant()
    def limits_hold(self) -> None:
        if not hasattr(self, "replicas"):
            return
        running = self.scheduler._running
        assert len(running) <= self.limits.max_num_seqs
        for queue in (self.scheduler._waiting, running):
            assert [one.rank for one in queue.values()] == sorted(one.rank for one in queue.values())
        assert list(self.scheduler.waiting_for_grammar) == sorted(self.scheduler.waiting_for_grammar)
        in_flight = {one for flight in self.flights for one in ids_of(flight)}
        assert in_flight == {one for one, sequence in self.scheduler._sequences.items() if sequence.in_flight}

    @invariant()
    def blocks_in_use_are_those_referred_to(self) -> None:
        if not hasattr(self, "replicas"):
            return
        tables = [{one: replica.blocks.table(one).blocks for one in replica._running} for replica in self.replicas]
        assert tables[0] == tables[1]
        assert len(self.scheduler.blocks) == len(tables[0])
        referred = Counter(block for blocks in tables[0].values() for block in blocks)
        pool = self.scheduler.blocks.pool
        assert {block: pool.references(block) for block in range(pool.num_blocks) if pool.references(block)} == referred
        statistics = self.scheduler.statistics
        assert statistics == self.replicas[1].statistics
        assert statistics.used_blocks == len(referred)
        assert statistics.used_blocks + statistics.cached_blocks <= statistics.blocks

    def teardown(self) -> None:
        """Lets every grammar become ready and every row sample: all sequences finish, nothing is left."""
        if not hasattr(self, "replicas"):
            return
        bound = (
            10 + 9 * sum(sequence.capacity_tokens for sequence in self.mirrors.values()) * self.limits.in_flight_steps
        )
        replica = self.scheduler
        replica.apply(Verdict(self.step, replica.waiting_for_grammar))
        while (replica.has_work or self.flights) and bound > 0:
            bound -= 1
            self.step += 1
            plan = replica.plan(self.step)
            self.memory.run(plan, replica)
            if plan.rows:
                self.flights.append(plan)
            while self.flights and (len(self.flights) == self.limits.in_flight_steps or not plan.rows):
                commit(replica, self.flights.popleft())
            replica.release_finished(self.step)
        for _ in range(2):
            self.step += 1
            replica.release_finished(self.step)
        assert_empty(replica)
        assert all(sequence.finish_reason is not None for sequence in self.mirrors.values())


TestSchedulerHistory = SchedulerHistory.TestCase
TestSchedulerHistory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_prompt_longer_than_the_budget_runs_in_chunks_and_samples_once() -> None:
    scheduler = scheduler_of(max_batch_tokens=4)
    add(scheduler, action(0, prompt_tokens=10, max_tokens=2))
    rows = []
    for step in range(1, 6):
        plan = scheduler.plan(step)
        rows += [(row.start, row.length, row.samples) for row in plan.rows]
        commit(scheduler, plan)
        scheduler.release_finished(step)
    assert rows == [(0, 4, False), (4, 4, False), (8, 2, True), (10, 1, True)]
    assert_empty(scheduler)


def test_decoding_goes_on_beside_a_long_prefill() -> None:
    scheduler = scheduler_of(max_batch_tokens=4)
    add(scheduler, action(0, prompt_tokens=2, max_tokens=20))
    commit(scheduler, scheduler.plan(1))
    add(scheduler, action(1, prompt_tokens=12, max_tokens=1))
    for step in range(2, 6):
        plan = scheduler.plan(step)
        assert [(row.sequence_id, row.length) for row in plan.rows] == [(0, 1), (1, 3)]
        commit(scheduler, plan)


def test_the_rest_of_the_budget_goes_to_the_next_prompt() -> None:
    scheduler = scheduler_of(max_batch_tokens=8)
    add(scheduler, *(action(one, prompt_tokens=5) for one in range(3)))
    assert [(row.sequence_id, row.length, row.samples) for row in scheduler.plan(1).rows] == [
        (0, 5, True),
        (1, 3, False),
    ]


def test_a_sequence_that_does_not_fit_holds_back_those_behind_it() -> None:
    scheduler = scheduler_of(kv_cache_tokens=20)
    add(scheduler, action(0, 10, 4), action(1, 10, 4), action(2, 1, 1))
    admitted: list[int] = []
    for step in range(1, 20):
        plan = scheduler.plan(step)
        admitted += [row.sequence_id for row in plan.rows if row.start == 0]
        commit(scheduler, plan)
        scheduler.release_finished(step)
    assert admitted == [0, 1, 2]
    assert_empty(scheduler)


def test_sequences_wait_for_a_free_row() -> None:
    scheduler = scheduler_of(max_num_seqs=2)
    add(scheduler, *(action(one, max_tokens=2) for one in range(4)))
    for step, expected in enumerate(([0, 1], [0, 1], [2, 3], [2, 3]), 1):
        plan = scheduler.plan(step)
        assert ids_of(plan) == expected
        commit(scheduler, plan)
        scheduler.release_finished(step)
    assert_empty(scheduler)


def test_steps_in_flight_share_the_sequences() -> None:
    scheduler = scheduler_of(in_flight_steps=3)
    add(scheduler, *(action(one, max_tokens=3) for one in range(5)))
    plans = [scheduler.plan(step) for step in (1, 2, 3)]
    assert [ids_of(plan) for plan in plans] == [[0, 1], [2, 3], [4]]
    assert scheduler.plan(4).rows == ()
    commit(scheduler, plans[0])
    assert ids_of(scheduler.plan(5)) == [0, 1]


def test_a_late_verdict_keeps_the_order_of_arrival() -> None:
    scheduler = scheduler_of(max_num_seqs=1)
    add(scheduler, action(0, constrained=True), action(1), action(2, constrained=True), action(3))
    assert scheduler.waiting_for_grammar == (0, 2)
    assert scheduler.has_work
    assert ids_of(scheduler.plan(1)) == [1]
    scheduler.apply(Verdict(1, (2,)))
    scheduler.apply(Verdict(1, (0,)))
    assert not scheduler.waiting_for_grammar
    commit(scheduler, StepPlan(1, (PlanRow(1, 0, 3, samples=True, constrained=False),), 0))
    assert run_to_the_end(scheduler, first_step=2) == [1, 0, 2, 3]


def test_one_that_waits_for_its_grammar_delays_nobody() -> None:
    scheduler = scheduler_of()
    add(scheduler, action(0, constrained=True), action(1), action(2))
    assert run_to_the_end(scheduler) == [1, 2]
    assert scheduler.waiting_for_grammar == (0,)
    assert not scheduler.has_work
    assert scheduler.plan(99).rows == ()


def test_only_rows_that_sample_are_constrained() -> None:
    scheduler = scheduler_of(max_batch_tokens=4)
    add(scheduler, action(0, prompt_tokens=6, constrained=True), action(1, prompt_tokens=1))
    scheduler.apply(Verdict(0, (0,)))
    first = scheduler.plan(1)
    assert [(row.samples, row.constrained) for row in first.rows] == [(False, False)]
    assert first.constrained_rows == ()
    commit(scheduler, first)
    second = scheduler.plan(2)
    assert [(row.samples, row.constrained) for row in second.rows] == [(True, True), (True, False)]
    assert second.constrained_rows == (0,)


def test_an_abort_while_waiting_for_a_grammar_leaves_nothing() -> None:
    scheduler = scheduler_of()
    add(scheduler, action(0, constrained=True))
    ended = scheduler.end(0, "abort")
    assert ended is not None
    assert ended.finish_reason == "abort"
    assert scheduler.waiting_for_grammar == ()
    assert scheduler.release_finished(1) == [ended]
    assert_empty(scheduler)


def test_an_abort_between_the_chunks_of_a_prompt() -> None:
    scheduler = scheduler_of(max_batch_tokens=4)
    add(scheduler, action(0, prompt_tokens=10))
    plan = scheduler.plan(1)
    assert scheduler.end(0, "abort") is not None
    assert scheduler.release_finished(1) == [], "its KV is still being written"
    assert scheduler.plan(2).rows == ()
    commit(scheduler, plan)
    (released,) = scheduler.release_finished(2)
    assert (released.num_computed, released.output_token_ids) == (4, [])
    assert_empty(scheduler)


def test_an_abort_in_flight_drops_the_late_token() -> None:
    scheduler = scheduler_of(in_flight_steps=2)
    add(scheduler, action(0), action(1))
    plan, other = scheduler.plan(1), scheduler.plan(2)
    assert (ids_of(plan), ids_of(other)) == ([0], [1])
    assert scheduler.end(0, "abort") is not None
    assert scheduler.end(0, "abort") is None, "a second abort finds nothing"
    assert scheduler.end(77, "abort") is None
    assert scheduler.end(0, "error", ErrorInfo("timeout", "late")) is None
    assert commit(scheduler, plan) == []
    (released,) = scheduler.release_finished(2)
    assert (released.finish_reason, released.error, released.output_token_ids) == ("abort", None, [])
    assert 0 not in scheduler
    assert scheduler.end(0, "abort") is None, "nor does one after the release"
    assert commit(scheduler, other) == [1]


def test_a_failed_row_ends_alone() -> None:
    scheduler = scheduler_of()
    add(scheduler, action(0), action(1))
    plan = scheduler.plan(1)
    error = ErrorInfo("sampling_error", "step 1, stage 0: no token may be drawn")
    assert list(scheduler.commit(plan, [-1, 5], [error, None])) == [0, 1]
    committed = [scheduler[0], scheduler[1]]
    assert [(one.finish_reason, one.error, one.output_token_ids) for one in committed] == [
        ("error", error, []),
        (None, None, [5]),
    ]


def test_a_commit_with_another_number_of_tokens_is_refused() -> None:
    scheduler = scheduler_of()
    add(scheduler, action(0), action(1))
    plan = scheduler.plan(1)
    with pytest.raises(ValueError, match="argument"):
        scheduler.commit(plan, [5], [None])


@given(
    prompts=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    at=st.integers(0, 3),
    row=st.integers(0, 4),
)
@settings(max_examples=40, deadline=None)
def test_one_different_token_shows_in_the_next_digest(prompts: list[int], at: int, row: int) -> None:
    replicas = [scheduler_of(max_batch_tokens=7) for _ in range(2)]
    for replica in replicas:
        add(replica, *(action(one, prompt_tokens, 8) for one, prompt_tokens in enumerate(prompts)))
    diverged = False
    for step in range(6):
        plans = [replica.plan(step) for replica in replicas]
        assert plans[0].rows == plans[1].rows
        assert (plans[0].digest == plans[1].digest) is not diverged
        tokens = [5] * len(plans[0].sampling_rows)
        others = list(tokens)
        if step == at and others:
            others[row % len(others)] = 6
            diverged = True
        for replica, ids in zip(replicas, (tokens, others), strict=True):
            list(replica.commit(plans[0], ids, [None] * len(ids)))


def test_an_abort_that_one_replica_missed_shows_in_the_digest() -> None:
    replicas = [scheduler_of() for _ in range(2)]
    for replica in replicas:
        add(replica, action(0, max_tokens=9), action(1, max_tokens=9))
        commit(replica, replica.plan(1))
    replicas[0].end(0, "abort")
    assert replicas[0].plan(2).digest != replicas[1].plan(2).digest


def test_a_failed_row_and_a_drawn_one_give_different_digests() -> None:
    replicas = [scheduler_of() for _ in range(2)]
    for replica in replicas:
        add(replica, action(0, max_tokens=9), action(1, max_tokens=9))
    plans = [replica.plan(1) for replica in replicas]
    list(replicas[0].commit(plans[0], [5, 5], [None, None]))
    list(replicas[1].commit(plans[1], [5, 5], [None, ErrorInfo("sampling_error", "x")]))
    assert replicas[0].plan(2).digest != replicas[1].plan(2).digest


_rows = st.builds(
    PlanRow,
    sequence_id=st.integers(0, 2**40),
    start=st.integers(0, 2**20),
    length=st.integers(1, 2**20),
    samples=st.booleans(),
    constrained=st.booleans(),
)


@given(left=st.lists(_rows, max_size=4), right=st.lists(_rows, max_size=4), data=st.data())
@settings(max_examples=100, deadline=None)
def test_the_digest_is_of_the_rows_in_their_order(
    left: list[PlanRow], right: list[PlanRow], data: st.DataObject
) -> None:
    def digest(rows: list[PlanRow], step: int = 3) -> int:
        return PlanDigest().update_rows(step, tuple(rows))

    assert (digest(left) == digest(right)) == (left == right)
    assert digest(left) != digest(left, step=4)
    shuffled = data.draw(st.permutations(left))
    assert (digest(left) == digest(shuffled)) == (left == shuffled)
    assert torch.tensor([digest(left)], dtype=torch.int64).item() == digest(left)


def test_the_digest_is_of_the_whole_history() -> None:
    rows = (PlanRow(0, 0, 3, samples=True, constrained=False),)
    chain, other = PlanDigest(), PlanDigest()
    other.update_rows(0, ())
    assert chain.update_rows(1, rows) != other.update_rows(1, rows)
    before = chain.update_rows(2, rows)
    assert chain.update_rows(2, rows) != before


def test_the_plan_counts_its_tokens_and_sampling_rows() -> None:
    rows = (
        PlanRow(4, 0, 3, samples=False, constrained=False),
        PlanRow(5, 7, 1, samples=True, constrained=True),
        PlanRow(6, 2, 5, samples=True, constrained=False),
        PlanRow(9, 8, 1, samples=True, constrained=True),
    )
    plan = StepPlan(1, rows, 0)
    assert plan.num_tokens == 10
    assert plan.sampling_rows == rows[1:]
    assert plan.constrained_rows == (0, 2)


# ---- choices that share a prefill


def choices(count: int, *, prompt_tokens: int = 5, max_tokens: int = 3) -> list[AddSequence]:
    one = action(0, prompt_tokens, max_tokens)
    return [
        msgspec.structs.replace(one, sequence_id=index, choice=index, prefill_of=0 if index else None)
        for index in range(count)
    ]


def prompt_tokens_run(plans: list[StepPlan], prompt_tokens: int) -> int:
    return sum(
        min(row.length, prompt_tokens - row.start) for plan in plans for row in plan.rows if row.start < prompt_tokens
    )


@pytest.mark.parametrize("in_flight_steps", [1, 2, 3])
@pytest.mark.parametrize("max_tokens", [1, 3])
@pytest.mark.parametrize("budget", [2, 64])
def test_choices_share_one_prefill(in_flight_steps: int, max_tokens: int, budget: int) -> None:
    scheduler = scheduler_of(in_flight_steps=in_flight_steps, max_batch_tokens=budget, prefix_cache=False)
    add(scheduler, *choices(4, max_tokens=max_tokens))
    plans, flights = [], deque[StepPlan]()
    for step in range(1, 100):
        plan = scheduler.plan(step)
        if plan.rows:
            plans.append(plan)
            flights.append(plan)
        while flights and (len(flights) == in_flight_steps or not plan.rows):
            commit(scheduler, flights.popleft())
        scheduler.release_finished(step)
    assert_empty(scheduler)
    first_rows = {row.sequence_id: row for plan in reversed(plans) for row in plan.rows}
    forks = [one for one, row in first_rows.items() if (row.start, row.length) == (4, 1)]
    # What was admitted too late, after the first had ended and gone, runs the prompt itself.
    late = 4 - 1 - len(forks)
    assert prompt_tokens_run(plans, 5) == 5 + len(forks) + 5 * late
    if (budget, in_flight_steps) == (64, 1):
        assert sorted(forks) == [1, 2, 3]


def test_a_choice_whose_first_was_aborted_runs_the_prompt_itself() -> None:
    scheduler = scheduler_of(max_batch_tokens=2, prefix_cache=False)
    add(scheduler, *choices(2))
    commit(scheduler, scheduler.plan(1))
    scheduler.end(0, "abort")
    scheduler.release_finished(1)
    plan = scheduler.plan(2)
    assert [(row.sequence_id, row.start, row.copied) for row in plan.rows] == [(1, 0, -1)]


def test_a_choice_that_waits_for_a_prefill_delays_nobody() -> None:
    scheduler = scheduler_of(max_batch_tokens=4)
    add(scheduler, *choices(2, prompt_tokens=3), action(7, prompt_tokens=1))
    assert ids_of(scheduler.plan(1)) == [0, 7]
