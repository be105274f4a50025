"""Who is to blame for a fault, and how many faults are survived."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.node.rank_fault import FaultBudget, RankFault, culprits


def fault(rank: int, *, consequence: bool = False) -> RankFault:
    return RankFault(
        rank=rank,
        stage=rank // 2,
        tp_rank=rank % 2,
        kind="raised" if consequence else "killed",
        message="lost" if consequence else "killed by SIGKILL",
        phase="collective",
        step=7,
        operation="all_reduce tp0",
        age_s=0.01,
        is_consequence=consequence,
    )


def test_who_failed_by_itself_is_to_blame_however_late_it_is_seen() -> None:
    lost, own = fault(0, consequence=True), fault(2)
    assert culprits([lost, own]) == ((own,), (lost,))


def test_two_that_failed_by_themselves_are_both_to_blame() -> None:
    assert culprits([fault(3), fault(1)]) == ((fault(3), fault(1)), ())


def test_where_all_only_lost_contact_the_first_is_named() -> None:
    faults = [fault(rank, consequence=True) for rank in (2, 0, 1)]
    assert culprits(faults) == ((faults[0],), tuple(faults[1:]))


@given(st.lists(st.tuples(st.integers(0, 7), st.booleans()), min_size=1))
def test_every_fault_is_on_one_side_and_somebody_is_to_blame(drawn: list[tuple[int, bool]]) -> None:
    faults = [fault(rank, consequence=consequence) for rank, consequence in drawn]
    own, lost = culprits(faults)
    assert own
    assert sorted([*own, *lost], key=repr) == sorted(faults, key=repr)


def test_a_fault_says_where_it_was() -> None:
    assert fault(3).sentence() == "rank 3 (stage 1, tensor-parallel rank 1) failed in step 7: killed by SIGKILL"
    early = msgspec.structs.replace(fault(3), step=0, phase="load")
    assert early.sentence() == "rank 3 (stage 1, tensor-parallel rank 1) failed at start: killed by SIGKILL"


@pytest.mark.parametrize(
    ("limit", "times_s", "survived"),
    [
        (0, [0.0], [False]),
        (2, [0.0, 1.0, 2.0], [True, True, False]),
        (2, [0.0, 1.0, 10.0, 10.5, 11.0], [True, True, True, False, False]),
        (1, [0.0, 9.9], [True, False]),
        (1, [0.0, 10.0], [True, True]),
    ],
)
def test_so_many_faults_in_so_many_seconds(limit: int, times_s: list[float], survived: list[bool]) -> None:
    budget = FaultBudget(limit, window_s=10.0)
    assert [budget.spend(time_s) for time_s in times_s] == survived


@given(st.integers(0, 4), st.lists(st.floats(0, 100), max_size=30).map(sorted))
def test_no_window_holds_more_survived_faults_than_the_limit(limit: int, times_s: list[float]) -> None:
    budget = FaultBudget(limit, window_s=10.0)
    survived = [time_s for time_s in times_s if budget.spend(time_s)]
    for end_s in survived:
        assert sum(end_s - 10.0 < time_s <= end_s for time_s in survived) <= limit
