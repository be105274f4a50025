"""When what a step committed may leave: the clock that all ranks keep alike, and the leader's messages."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from runtime.held_outputs import HeldOutputs
from runtime.messages import Finished, TokenDelta, Usage
from runtime.output_check import CheckJob, CheckResult
from runtime.plan import PlanRow, StepPlan
from runtime.release import LateMessages, ReleaseClock


def plan(step: int, *, samples: bool = True, scores: bool = False, length: int = 1) -> StepPlan:
    return StepPlan(step, (PlanRow(0, 0, length, samples=samples, constrained=False, scores=scores),), 0)


def test_a_plan_is_answered_when_the_last_stage_must_have_run_it() -> None:
    assert plan(1).is_answered
    assert plan(1, samples=False, scores=True, length=2).is_answered
    # The last token of a prompt has no next one that its logits tell of.
    assert not plan(1, samples=False, scores=True).is_answered
    assert not plan(1, samples=False, length=100).is_answered
    assert not StepPlan(1, (), 0).is_answered


class TestClock:
    def test_nothing_waits_at_first(self) -> None:
        clock = ReleaseClock()
        assert not clock.is_pending
        assert not clock.needs_round(5, [])

    def test_a_later_step_that_is_answered_needs_no_round(self) -> None:
        clock = ReleaseClock()
        clock.tell(4)
        assert clock.is_pending
        assert not clock.needs_round(4, []), "the next step can still show it"
        assert not clock.needs_round(5, [plan(5)])
        assert clock.needs_round(5, [])
        assert clock.needs_round(5, [plan(5, samples=False)])
        assert clock.needs_round(6, [plan(6, samples=False), plan(4)]), "a step shows what was told before it only"
        assert not clock.needs_round(6, [plan(6, samples=False), plan(5)])

    def test_what_is_agreed_waits_no_more(self) -> None:
        clock = ReleaseClock()
        for step in (4, 4, 6, 7):
            clock.tell(step)
        clock.agree(6)
        assert clock.is_pending
        assert clock.needs_round(8, [plan(6)])
        clock.agree(8)
        assert not clock.is_pending


class Checks:
    def __init__(self) -> None:
        self.submitted: list[int] = []

    def submit(self, number: int, job: CheckJob) -> None:
        assert job.schema == "{}"
        self.submitted.append(number)

    def results(self) -> list[tuple[int, CheckResult]]:
        return []


def delta(number: int) -> TokenDelta:
    return TokenDelta(number, 0, "x", [number])


def finished(number: int) -> Finished:
    return Finished(number, 0, "stop", Usage(1, 1, 2))


class TestMessages:
    def test_messages_leave_in_order_when_their_step_is_agreed(self) -> None:
        late = LateMessages(None)
        late.begin_step(1)
        late.add(delta(1))
        late.begin_step(2)
        late.add(delta(2))
        late.finish(0, finished(2), None)
        late.begin_step(3)
        assert late.agreed(1) == []
        assert late.agreed(2) == [delta(1)]
        assert late.agreed(2) == []
        assert late.agreed(4) == [delta(2), finished(2)]

    def test_an_output_is_checked_once_it_is_agreed(self) -> None:
        checks = Checks()
        late = LateMessages(HeldOutputs(checks))
        late.begin_step(1)
        late.finish(7, finished(7), CheckJob("{}", "1"))
        late.finish(8, finished(8), None)
        assert (late.agreed(1), checks.submitted) == ([], [])
        assert late.agreed(2) == [finished(8)]
        assert checks.submitted == [7]


@given(
    depth=st.integers(1, 4),
    steps=st.lists(st.tuples(st.sampled_from(["decode", "chunk", "empty"]), st.booleans()), min_size=1, max_size=40),
)
def test_everything_leaves_after_its_own_step_and_before_long(depth: int, steps: list[tuple[str, bool]]) -> None:
    """As the step loop does it: nothing is released by what all ranks had to pass before it was told."""
    clock, late = ReleaseClock(), LateMessages(None)
    flights: deque[StepPlan] = deque()
    told_in: dict[int, int] = {}
    told_limit: dict[int, int] = {}
    number = 0

    def release(before: int, now: int) -> None:
        clock.agree(before)
        for message in late.agreed(before):
            assert isinstance(message, TokenDelta)
            assert told_in.pop(message.request_id) < before
            assert now <= told_limit[message.request_id]

    def tell(step: int) -> None:
        nonlocal number
        number += 1
        told_in[number], told_limit[number] = step, step + depth + 1
        clock.tell(step)
        late.add(delta(number))

    last = len(steps) + depth + 2
    for step, (kind, ends) in enumerate([*steps, *[("empty", False)] * (depth + 2)], start=1):
        late.begin_step(step)
        if ends:
            tell(step)
        planned = StepPlan(step, (), 0) if kind == "empty" else plan(step, samples=kind == "decode", length=2)
        if clock.needs_round(step, (planned, *flights)):
            release(step + 1, step)
        if planned.rows:
            flights.append(planned)
        while flights and (len(flights) == depth or not planned.rows):
            done = flights.popleft()
            if done.is_answered:
                release(done.step, step)
                tell(step)
    assert step == last
    assert not told_in
    assert not clock.is_pending
