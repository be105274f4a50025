"""Who is vetted when: no order of hard and easy grammars keeps an easy one waiting for long."""

from __future__ import annotations

import random

import pytest

from grammar_sync.vetting.lanes import HARD_WORKERS, QUICK_S, QUICK_WORKERS, Lanes

TICK_S = 0.01


def run(durations: dict[int, float], dropped: dict[int, float] | None = None) -> dict[int, float]:
    """Runs jobs that take so long, all asked at once, in simulated time; returns when each ended."""
    lanes = Lanes()
    for job in durations:
        lanes.add(job)
    ends: dict[int, float] = {}
    begun: dict[int, float] = {}
    now_s = 0.0
    while len(ends) < len(durations):
        for job, began_s in list(begun.items()):
            if now_s - began_s >= durations[job]:
                lanes.done(job)
                del begun[job]
                ends[job] = now_s
        while (hard := lanes.overdue(now_s)) is not None:
            del begun[hard]
        while (new := lanes.start(now_s)) is not None:
            assert new not in begun
            begun[new] = now_s
        assert len(begun) <= QUICK_WORKERS + HARD_WORKERS
        now_s += TICK_S
        assert now_s < 10_000, f"these never ended: {durations.keys() - ends.keys()}"
    return ends


def test_easy_ones_run_in_order() -> None:
    ends = run(dict.fromkeys(range(10), 0.1))
    assert sorted(ends, key=lambda job: (ends[job], job)) == list(range(10))
    assert max(ends.values()) <= 10 * 0.1 / QUICK_WORKERS + 20 * TICK_S


def test_a_hard_one_alone_is_never_started_over() -> None:
    assert run({1: 30.0})[1] == pytest.approx(30.0, abs=0.05)


def test_an_easy_one_waits_for_the_first_tries_of_hard_ones_at_most() -> None:
    hard = dict.fromkeys(range(60), 10.0)
    ends = run({**hard, 60: 0.05})
    assert ends[60] <= 60 / QUICK_WORKERS * (QUICK_S + 2 * TICK_S) + 0.1
    assert max(ends.values()) <= 60 / HARD_WORKERS * 10.5 + 60


def test_all_end_whatever_the_order() -> None:
    draw = random.Random(3)
    for _ in range(50):
        jobs = {job: draw.choice([0.02, 0.1, 0.6, 3.0]) for job in range(draw.randrange(1, 12))}
        ends = run(jobs)
        easy = [job for job in jobs if jobs[job] < QUICK_S]
        assert all(ends[job] <= len(jobs) * (QUICK_S + 2 * TICK_S) for job in easy)


def test_one_that_waits_can_be_dropped() -> None:
    lanes = Lanes(quick_workers=1, hard_workers=1)
    for job in (1, 2, 3):
        lanes.add(job)
    assert lanes.start(0.0) == 1
    lanes.drop(2)
    lanes.done(1)
    assert lanes.start(1.0) == 3
    assert lanes.start(1.0) is None


def test_when_to_look_again() -> None:
    lanes = Lanes(quick_s=0.5)
    assert lanes.next_s(0.0) is None
    lanes.add(1)
    assert lanes.start(2.0) == 1
    assert lanes.next_s(2.0) == 2.5
    assert lanes.overdue(2.4) is None
    assert lanes.next_s(2.4) == 2.5
    assert lanes.overdue(2.5) is None
    assert lanes.next_s(2.5) is None, "it goes on in a place for hard ones"


def test_hard_ones_without_a_place_are_not_asked_about_again_and_again() -> None:
    lanes = Lanes(quick_s=0.5, quick_workers=2, hard_workers=1)
    for job in (1, 2):
        lanes.add(job)
        assert lanes.start(0.0) == job
    assert lanes.overdue(1.0) is None
    assert lanes.next_s(1.0) is None, "one goes on as a hard one, the other where it is: nobody waits for its place"
    lanes.add(3)
    assert lanes.start(1.0) == 3
    assert lanes.next_s(1.0) == 1.5
    lanes.add(4)
    assert lanes.overdue(1.0) == 2, "now somebody does"
    assert lanes.start(1.0) == 4
    lanes.done(1)
    assert lanes.start(1.1) == 2
