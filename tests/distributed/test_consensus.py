"""What ranks compare beside their work, and the one shape of errors between ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import LeaveAtOnceError, run_ranks

from launch.rank.groups import build_groups
from pp.link import LinkError, StageLink, Tag
from runtime.comm_error import COMM_ERRORS, is_consequence
from runtime.consensus import Consensus
from runtime.plan import DesyncError, PlanRow, StepPlan
from tp.group import CollectiveError

STEP = 6


@dataclass(frozen=True)
class Raised:
    """An error, as a test sees it."""

    kind: str
    message: str
    fields: dict[str, Any]


def raised_by(call: Any) -> Raised | None:
    try:
        call()
    except (DesyncError, *COMM_ERRORS) as error:
        return Raised(type(error).__name__, str(error), vars(error) | {"is_consequence": is_consequence(error)})
    return None


def confirm(rank: int, world_size: int, tp: int, pp: int, odd_rank: int) -> Raised | None:
    groups = build_groups(tp, pp, timeout_s=20)
    groups.tensor_parallel.begin_step(STEP)
    groups.link.begin_step(STEP)
    # Nobody leaves while others still connect.
    dist.barrier()
    consensus = Consensus(groups.tensor_parallel, groups.link)
    assert consensus.is_alone == (world_size == 1)
    error = raised_by(lambda: consensus.confirm(77 if rank == odd_rank else -8))
    if odd_rank < 0:
        groups.link.drain()
        return error
    raise LeaveAtOnceError(error)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 3), (2, 2)])
def test_ranks_that_agree_confirm_it(tp: int, pp: int) -> None:
    assert run_ranks(confirm, tp * pp, tp, pp, -1) == [None] * (tp * pp)


@pytest.mark.parametrize(("tp", "pp", "odd_rank"), [(2, 1, 1), (1, 2, 1), (2, 2, 0), (2, 2, 3)])
def test_nothing_is_confirmed_to_the_leader_when_a_rank_differs(tp: int, pp: int, odd_rank: int) -> None:
    raised = run_ranks(confirm, tp * pp, tp, pp, odd_rank)
    assert raised[0] is not None
    desync = [one for one in raised if one is not None and one.kind == "DesyncError"]
    assert desync
    for one in desync:
        assert {one.fields["own"], one.fields["other"]} == {77, -8}
        assert one.fields["step"] == STEP
        assert f"step {STEP}" in one.message


def check_plan(rank: int, world_size: int, odd_rank: int) -> Raised | None:
    groups = build_groups(world_size, 1, timeout_s=20)
    groups.tensor_parallel.begin_step(STEP)
    plan = StepPlan(STEP, (PlanRow(0, 0, 1, samples=True, constrained=False),), 5 if rank == odd_rank else 4)
    return raised_by(lambda: Consensus(groups.tensor_parallel, groups.link).check_plan(plan))


def test_plans_are_compared_before_they_run() -> None:
    assert run_ranks(check_plan, 3, -1) == [None] * 3
    first, second, third = run_ranks(check_plan, 3, 2)
    assert first is second is None
    assert third is not None
    assert (third.kind, third.fields["rank"], third.fields["own"], third.fields["other"]) == ("DesyncError", 2, 5, 4)
    leader, *others = run_ranks(check_plan, 3, 0)
    assert leader is None
    assert [other is not None and other.fields["other"] for other in others] == [5, 5]


def wrong_calls(rank: int, world_size: int) -> list[Raised | None]:
    groups = build_groups(2, 2, timeout_s=20)
    group, link = groups.tensor_parallel, groups.link
    group.begin_step(STEP)
    link.begin_step(STEP)
    group.gather_numbers([rank])
    holes = torch.zeros(4, 2, dtype=torch.int64).t()
    return [
        raised_by(lambda: group.all_reduce_sum_(torch.zeros(2, device="meta"))),
        raised_by(lambda: group.all_gather(torch.zeros(2, device="meta"))),
        raised_by(lambda: group.broadcast_(holes)),
        raised_by(lambda: link.send_tensor(torch.zeros(2), link.stage, Tag.HIDDEN)),
        raised_by(lambda: link.send_tensor(torch.zeros(2, dtype=torch.complex64), 1 - link.stage, Tag.HIDDEN)),
    ]


def test_a_wrong_call_is_an_error_of_the_rank_that_makes_it_and_nothing_is_sent() -> None:
    for rank, errors in enumerate(run_ranks(wrong_calls, 4)):
        stage, tp_rank = divmod(rank, 2)
        operations = []
        for number, error in enumerate(errors):
            assert error is not None
            assert error.kind == (CollectiveError if number < 3 else LinkError).__name__
            assert error.fields["fault"] == "call"
            assert (error.fields["rank"], error.fields["step"]) == (rank, STEP)
            assert error.fields["group"] == (f"tp{stage}" if number < 3 else f"pp{tp_rank}")
            assert error.fields["sequence"] == (1 if number < 3 else 0)
            assert not error.fields["is_consequence"]
            operations.append(error.fields["operation"])
        send = "send hidden to stage"
        assert operations == ["all_reduce", "all_gather", "broadcast", f"{send} {stage}", f"{send} {1 - stage}"]


def lost_peer(rank: int, world_size: int, tp: int) -> Raised | None:
    groups = build_groups(tp, world_size // tp, timeout_s=20)
    groups.tensor_parallel.begin_step(STEP)
    groups.link.begin_step(STEP)
    # Nobody leaves while others still connect.
    dist.barrier()
    if rank == 1:
        raise LeaveAtOnceError(None)
    if tp == 2:
        raise LeaveAtOnceError(raised_by(lambda: groups.tensor_parallel.all_reduce_sum_(torch.zeros(2))))
    raise LeaveAtOnceError(raised_by(lambda: groups.link.receive_frame(1, Tag.TOKENS)))


@pytest.mark.parametrize(
    ("tp", "kind", "group", "operation"),
    [(2, "CollectiveError", "tp0", "all_reduce"), (1, "LinkError", "pp0", "receive tokens from stage 1")],
)
def test_a_rank_that_is_gone_is_an_error_of_the_backend(tp: int, kind: str, group: str, operation: str) -> None:
    error = run_ranks(lost_peer, 2, tp)[0]
    assert error is not None
    assert error.kind == kind
    expected = {"fault": "backend", "rank": 0, "group": group, "operation": operation, "step": STEP, "sequence": 1}
    assert {name: error.fields[name] for name in expected} == expected
    assert error.fields["is_consequence"]


def test_a_link_of_one_stage_can_send_to_nobody() -> None:
    with pytest.raises(LinkError, match="stage 0 cannot send to stage 0 of 1"):
        StageLink(0, (0,)).send_frame(b"x", 0, Tag.INTAKE)
