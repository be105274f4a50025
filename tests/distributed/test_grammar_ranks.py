"""Real ranks over gloo: agreement and relay, and what happens when one rank leaves the step (T3)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ranks import run_ranks

from grammar_sync.agreement import AgreementError, GrammarFailure, LocalReport, Verdict, agree
from grammar_sync.relay import RelayError, relay_verdict
from launch.rank.groups import RankGroups, build_groups
from pp.link import LinkError, StageLink

TIMEOUT_S = 30.0
# Scenario T3: what each of four ranks has ready and failed.
READY = ([0, 1, 2], [2, 0], [1, 0, 2], [2, 9])
FAILED: tuple[list[int], ...] = ([], [5], [], [5, 6])


def begin(groups: RankGroups, step: int) -> None:
    groups.tensor_parallel.begin_step(step)
    groups.link.begin_step(step)


def error_of(call: Callable[[], object]) -> str:
    """Returns which of the expected errors ``call`` raised, with its message; an empty string when it raised none."""
    try:
        call()
    except (AgreementError, RelayError, LinkError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def agree_rank(rank: int, world_size: int) -> list[Verdict]:
    groups = build_groups(world_size, 1, timeout_s=TIMEOUT_S)
    verdicts = []
    for step in (1, 2, 3):
        begin(groups, step)
        failed = tuple(GrammarFailure(request_id, f"rank {rank}") for request_id in FAILED[rank])
        report = LocalReport(tuple(READY[rank]), tuple(READY[rank]), failed) if step != 2 else LocalReport()
        verdicts.append(agree(groups.tensor_parallel, step, report, waiting=[6, 2, 1, 0, 5]))
    return verdicts


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_ranks_get_one_verdict(world_size: int) -> None:
    results = run_ranks(agree_rank, world_size)
    assert all(verdicts == results[0] for verdicts in results)
    ready = (2, 0) if world_size == 2 else (2,)
    failed = (
        [GrammarFailure(5, "rank 1")] if world_size == 2 else [GrammarFailure(6, "rank 3"), GrammarFailure(5, "rank 1")]
    )
    assert results[0] == [Verdict(1, ready, tuple(failed)), Verdict(2), Verdict(3, ready, tuple(failed))]


def out_of_step_rank(rank: int, world_size: int) -> str:
    groups = build_groups(world_size, 1, timeout_s=TIMEOUT_S)
    step = 7 if rank == world_size - 1 else 8
    begin(groups, step)
    return error_of(lambda: agree(groups.tensor_parallel, step, LocalReport((1,), (1,)), waiting=[1]))


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_of_another_step_is_named_by_all(world_size: int) -> None:
    *others, last = run_ranks(out_of_step_rank, world_size)
    late = world_size - 1
    for rank, message in enumerate(others):
        assert message == (
            f"AgreementError: grammar agreement on tp0: rank {late} reported for step 7, rank {rank} is in step 8"
        )
    assert "rank 0 reported for step 8" in last


def relay_rank(rank: int, world_size: int, tp_size: int) -> list[Verdict]:
    groups = build_groups(tp_size, world_size // tp_size, timeout_s=TIMEOUT_S)
    verdicts = []
    for step in range(1, 6):
        begin(groups, step)
        mine = Verdict(step, tuple(range(step * 100)), (GrammarFailure(step, "línea"),))
        verdicts.append(relay_verdict(groups.link, mine if groups.link.is_first else None))
    groups.link.drain()
    return verdicts


@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 2), (1, 3), (2, 2)])
def test_the_verdict_reaches_every_stage(tp_size: int, pp_size: int) -> None:
    results = run_ranks(relay_rank, tp_size * pp_size, tp_size)
    assert all(verdicts == results[0] for verdicts in results)
    assert [verdict.step for verdict in results[0]] == [1, 2, 3, 4, 5]
    assert results[0][4].ready == tuple(range(500))


def relay_errors_rank(rank: int, world_size: int) -> list[str]:
    groups = build_groups(1, world_size, timeout_s=TIMEOUT_S)
    link = groups.link
    begin(groups, 3 if rank == 0 else 4)
    if rank == 0:
        errors = [
            error_of(lambda: relay_verdict(link, None)),
            error_of(lambda: relay_verdict(link, Verdict(2))),
            error_of(lambda: relay_verdict(link, Verdict(3))),
        ]
        link.drain()
        return errors
    return [error_of(lambda: relay_verdict(link, Verdict(4))), error_of(lambda: relay_verdict(link, None))]


def test_a_verdict_that_is_missing_or_of_another_step_is_an_error() -> None:
    first, second = run_ranks(relay_errors_rank, 2)
    assert "stage 0 has no verdict to send" in first[0]
    assert "got step 2, expected 3" in first[1]
    assert first[2] == ""
    assert "stage 1 has a verdict of its own" in second[0]
    assert second[1].startswith("LinkError")
    assert "of step 3" in second[1]
    assert "of step 4" in second[1]


def test_one_stage_keeps_its_verdict() -> None:
    link = StageLink(0, (0,))
    link.begin_step(4)
    assert relay_verdict(link, Verdict(4, (1,))) == Verdict(4, (1,))
    with pytest.raises(RelayError, match="got step 5, expected 4"):
        relay_verdict(link, Verdict(5))
