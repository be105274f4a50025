"""Who is out of step, from the digests that ranks kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.node.digests import Disagreement, RankDigests, first_disagreement, kept_digests
from launch.node.progress_record import DigestKind, ProgressRecord


def plans(*histories: dict[int, int]) -> dict[int, RankDigests]:
    return {rank: {DigestKind.STATE: history} for rank, history in enumerate(histories)}


def test_ranks_that_agree_are_not_told_apart() -> None:
    assert first_disagreement({}) is None
    assert first_disagreement(plans({1: 5, 2: 6}, {1: 5, 2: 6})) is None
    # One that did not come so far, and one that kept other steps.
    assert first_disagreement(plans({1: 5, 2: 6, 3: 7}, {1: 5, 2: 6}, {9: 1}, {})) is None


def test_the_majority_names_the_odd_rank() -> None:
    found = first_disagreement(plans({1: 5, 2: 6}, {1: 5, 2: -7, 3: 1}, {1: 5, 2: 6, 3: 9}, {1: 5, 2: 6}))
    assert found is not None
    assert (found.step, found.culprits, found.suspects) == (2, (1,), (1,))
    assert found.sentence() == (
        "rank 1 out of step: of all that was planned and committed before step 2 the digests are: "
        "ranks 0, 2, 3 0000000000000006, rank 1 fffffffffffffff9"
    )


def test_without_a_majority_all_are_suspects() -> None:
    pair = first_disagreement(plans({4: 1}, {4: 2}))
    assert pair is not None
    assert (pair.culprits, pair.suspects) == ((), (0, 1))
    assert pair.sentence().startswith("ranks 0, 1 differ: ")
    halves = first_disagreement(plans({4: 1}, {4: 2}, {4: 2}, {4: 1}))
    assert halves is not None
    assert (halves.culprits, halves.suspects) == ((), (0, 1, 2, 3))
    # The largest group is not enough: it must be more than all others.
    split = first_disagreement(plans({4: 1}, {4: 1}, {4: 2}, {4: 3}))
    assert split is not None
    assert split.culprits == ()


def test_masks_of_a_step_differ_after_what_came_before_it() -> None:
    masks = {DigestKind.MASKS: {7: 1}}
    digests = {
        0: {DigestKind.STATE: {7: 1, 8: 2}, **masks},
        1: {DigestKind.STATE: {7: 1, 8: 3}, DigestKind.MASKS: {7: 9}},
        2: {DigestKind.STATE: {7: 1}, **masks},
    }
    found = first_disagreement(digests)
    assert found == Disagreement(DigestKind.MASKS, 7, {1: (0, 2), 9: (1,)})
    assert found is not None
    assert found.sentence().startswith("rank 1 out of step: of the grammar masks of step 7 the digests are: ")
    digests[2] = {DigestKind.STATE: {7: 4}, **masks}
    earlier = first_disagreement(digests)
    assert earlier is not None
    assert (earlier.kind, earlier.step, earlier.culprits) == (DigestKind.STATE, 7, (2,))


@given(
    size=st.integers(3, 8),
    steps=st.integers(1, 30),
    odd=st.integers(0, 7),
    since=st.integers(1, 30),
    seen=st.lists(st.integers(0, 3), min_size=8, max_size=8),
)
def test_a_single_rank_that_goes_another_way_is_named(
    size: int, steps: int, odd: int, since: int, seen: list[int]
) -> None:
    odd, since = odd % size, 1 + since % steps
    histories = [
        {step: step + 1000 * (rank == odd and step >= since) for step in range(1, steps + 1 + seen[rank])}
        for rank in range(size)
    ]
    found = first_disagreement(plans(*histories))
    assert found is not None
    assert (found.step, found.culprits) == (since, (odd,))


@pytest.mark.parametrize(
    ("audits", "suspects"), [([0, 0, 7, 0], (2,)), ([5, 6, 0, 0], (0, 1)), ([5, 6, None, None], (0, 1)), ([1], (0,))]
)
def test_an_audit_tells_who_is_well(audits: list[int | None], suspects: tuple[int, ...]) -> None:
    kept = {rank: {} if one is None else {DigestKind.AUDIT: {8: one}} for rank, one in enumerate(audits)}
    found = first_disagreement(kept)
    assert found is not None
    assert (found.suspects, found.step) == (suspects, 8)
    assert first_disagreement({0: {DigestKind.AUDIT: {8: 0}}, 1: {DigestKind.AUDIT: {9: 0}}}) is None


def test_digests_come_from_records() -> None:
    kept = []
    for rank in range(2):
        record = ProgressRecord.create()
        record.begin_step(5, -(2**63) + rank, is_idle=False)
        record.note_plan(5, 3)
        record.note_masks(5, 2**63 - 1)
        kept.append(kept_digests(record))
        record.close()
    assert kept[1] == {
        DigestKind.STATE: {5: -(2**63) + 1},
        DigestKind.PLAN: {5: 3},
        DigestKind.MASKS: {5: 2**63 - 1},
        DigestKind.AUDIT: {},
    }
    found = first_disagreement({0: kept[0], 2: kept[1]})
    assert found is not None
    assert found.suspects == (0, 2)
