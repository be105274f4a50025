"""The set algebra of verdicts (scenario T3), and agreement in a group of one."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar_sync.agreement import AgreementError, GrammarFailure, LocalReport, Verdict, agree, merge_reports
from tp.group import TensorParallelGroup


def report(ready: Sequence[int] = (), failed: Sequence[int] = (), rank: int = 0) -> LocalReport:
    """Returns a report of a rank that compiled the same form as all others, its digest being the request's id."""
    failures = tuple(GrammarFailure(request_id, f"rank {rank}") for request_id in failed)
    return LocalReport(tuple(ready), tuple(ready), failures)


def failed_ids(verdict: Verdict) -> list[int]:
    return [failure.request_id for failure in verdict.failed]


def test_ready_is_the_intersection_and_failed_the_union() -> None:
    reports = [report([0, 1, 2]), report([0, 2], [5]), report([0, 1, 2]), report([2])]
    verdict = merge_reports(7, reports, waiting=[0, 1, 2, 5])
    assert verdict == Verdict(7, (2,), (GrammarFailure(5, "rank 0"),))


def test_s7_an_id_that_is_ready_everywhere_and_failed_once_is_failed() -> None:
    verdict = merge_reports(1, [report([3], [3]), report([3])], waiting=[3])
    assert verdict.ready == ()
    assert failed_ids(verdict) == [3]


def test_nothing_ready_nothing_failed() -> None:
    assert merge_reports(3, [report(), report()], waiting=[1, 2]) == Verdict(3)
    assert merge_reports(3, [report([1]), report([2])], waiting=[]) == Verdict(3)


def test_s10_order_is_that_of_arrival_whatever_the_reports_say() -> None:
    ids = list(range(500))
    waiting = random.Random(5).sample(ids, 500)
    reports = [report(random.Random(rank).sample(ids, 500)) for rank in range(4)]
    assert merge_reports(1, reports, waiting).ready == tuple(waiting)


def test_the_lowest_rank_that_failed_has_the_word() -> None:
    verdict = merge_reports(1, [report(), report([], [4], rank=1), report([], [4], rank=2)], waiting=[4])
    assert verdict.failed == (GrammarFailure(4, "rank 1"),)


def test_ids_that_do_not_wait_are_ignored() -> None:
    verdict = merge_reports(1, [report([1, 9], [8]), report([9, 1])], waiting=[1])
    assert verdict == Verdict(1, (1,))


def test_no_report_is_an_error() -> None:
    with pytest.raises(AgreementError, match="step 4"):
        merge_reports(4, [], waiting=[1])


_IDS = st.lists(st.integers(0, 20), max_size=12, unique=True)


@settings(deadline=None, max_examples=200)
@given(sets=st.lists(st.tuples(_IDS, _IDS), min_size=1, max_size=5), waiting=_IDS)
def test_set_algebra(sets: list[tuple[list[int], list[int]]], waiting: list[int]) -> None:
    reports = [report(ready, failed, rank) for rank, (ready, failed) in enumerate(sets)]
    verdict = merge_reports(2, reports, waiting)
    failed = set().union(*(set(failed) for _, failed in sets)) & set(waiting)
    ready = set.intersection(*(set(ready) for ready, _ in sets)) & set(waiting)
    assert set(verdict.ready) == ready - failed
    assert set(failed_ids(verdict)) == failed
    for listed in (list(verdict.ready), failed_ids(verdict)):
        assert listed == sorted(listed, key=waiting.index)
    shuffled = [
        LocalReport(tuple(reversed(one.ready)), tuple(reversed(one.forms)), tuple(reversed(one.failed)))
        for one in reports
    ]
    assert merge_reports(2, shuffled, waiting) == verdict
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(verdict), type=Verdict) == verdict


def test_a_group_of_one_agrees_with_itself() -> None:
    group = TensorParallelGroup(0, 1)
    assert agree(group, 9, report([2, 1], [3]), waiting=[1, 2, 3]) == Verdict(9, (1, 2), (GrammarFailure(3, "rank 0"),))
