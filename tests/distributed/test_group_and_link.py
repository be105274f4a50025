"""Group, link, intake and token share over real ranks: what arrives, in which order, and how a wrong step shows."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import run_ranks

from launch.rank.groups import RankGroups, build_groups, warm_up
from pp.link import LinkError, StageLink, Tag
from runtime.intake import Intake, Patience
from runtime.messages import Action, AddSequence, EndSequence, ErrorInfo, StopRanks
from runtime.plan import DesyncError, PlanRow, StepPlan
from runtime.token_share import TokenShare
from sampler.params import SamplingParams
from tp.group import CollectiveError, TensorParallelGroup

pytestmark = pytest.mark.long(45)

FIRST_FRAME_BODY = 4096 - 24
INLINE_BODY = 1024 - 72
SIZES = (0, 1, 100, FIRST_FRAME_BODY - 1, FIRST_FRAME_BODY, FIRST_FRAME_BODY + 1, 3 * 4096, 1_000_003)
LINK_SIZES = (0, 1, INLINE_BODY - 1, INLINE_BODY, INLINE_BODY + 1, 8192, 1_000_003)


def payload(size: int) -> bytes:
    return bytes(index * 31 % 251 for index in range(size))


def error_of(call: Any) -> tuple[str, str]:
    """Returns the class and text of what ``call`` raises."""
    try:
        call()
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return "", ""


def frames_over_a_group(rank: int, world_size: int) -> list[bool]:
    group = build_groups(world_size, 1, timeout_s=30).tensor_parallel
    correct = []
    for step, size in enumerate(SIZES):
        group.begin_step(step)
        got = group.broadcast_frame(payload(size) if rank == 0 else None)
        correct.append(got == payload(size))
    return correct


@pytest.mark.parametrize("tp_size", [2, 3])
def test_a_frame_of_any_size_reaches_the_group(tp_size: int) -> None:
    assert run_ranks(frames_over_a_group, tp_size) == [[True] * len(SIZES)] * tp_size


def collectives(rank: int, world_size: int) -> dict[str, Any]:
    group = build_groups(2, 2, timeout_s=30).tensor_parallel
    other_stage = 10 * (rank // 2)
    own = torch.arange(6, dtype=torch.float32).reshape(2, 3) + group.rank + other_stage
    strided = torch.arange(12, dtype=torch.int64).reshape(3, 4).t() + 100 * group.rank
    half = torch.full((2, 2), 1.5 + group.rank, dtype=torch.bfloat16)
    return {
        "gather": group.all_gather(own).tolist(),
        "strided": group.all_gather(strided).tolist(),
        "scalar": group.all_gather(torch.tensor(group.rank)).tolist(),
        "empty": list(group.all_gather(torch.empty(0, 5)).shape),
        "bfloat16": (group.all_gather(half).float().tolist(), group.all_reduce_sum_(half.clone()).float().tolist()),
        "sum": group.all_reduce_sum_(own.clone()).tolist(),
        "max": group.all_reduce_max_(own.clone()).tolist(),
        "broadcast": group.broadcast_(torch.tensor([rank, 7])).tolist(),
        "objects": group.all_gather_object({"rank": rank, "none": None}),
    }


def test_collectives_stay_within_their_stage() -> None:
    results = run_ranks(collectives, 4)
    for stage in range(2):
        base = torch.arange(6.0).reshape(2, 3) + 10 * stage
        for result in results[2 * stage : 2 * stage + 2]:
            assert result["gather"] == [base.tolist(), (base + 1).tolist()]
            table = torch.arange(12).reshape(3, 4).t()
            assert result["strided"] == [table.tolist(), (table + 100).tolist()]
            assert result["scalar"] == [0, 1]
            assert result["empty"] == [2, 0, 5]
            assert result["bfloat16"] == ([[[1.5, 1.5]] * 2, [[2.5, 2.5]] * 2], [[4.0, 4.0]] * 2)
            assert result["sum"] == (2 * base + 1).tolist()
            assert result["max"] == (base + 1).tolist()
            assert result["broadcast"] == [2 * stage, 7]
            assert result["objects"] == [{"rank": 2 * stage + one, "none": None} for one in range(2)]


def strided_reduction(rank: int, world_size: int) -> list[list[float]]:
    group = build_groups(world_size, 1, timeout_s=30).tensor_parallel
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3).t()
    return group.all_reduce_sum_(tensor).tolist()


def test_a_reduction_of_a_strided_tensor_is_right_or_an_error() -> None:
    assert run_ranks(strided_reduction, 2) == [[[0.0, 6.0], [2.0, 8.0], [4.0, 10.0]]] * 2


def frame_out_of_step(rank: int, world_size: int) -> tuple[str, str]:
    group = build_groups(world_size, 1, timeout_s=30).tensor_parallel
    group.begin_step(7 + rank)
    return error_of(lambda: group.broadcast_frame(b"x" if rank == 0 else None))


def test_t20_a_frame_of_another_step_is_refused_by_name() -> None:
    """SCENARIOS T20: a rank that left a call out is told by the step number of the next payload."""
    leader, other = run_ranks(frame_out_of_step, 2)
    assert leader == ("", "")
    kind, message = other
    assert kind == "CollectiveError"
    assert "tp0 rank 1" in message
    assert "got step 7, expected 8" in message


def frame_of_two_halves(rank: int, world_size: int) -> tuple[str, str]:
    """Rank 0 leaves out the second part of a long frame, and sends that of the next one in its place."""
    group = build_groups(world_size, 1, timeout_s=30).tensor_parallel
    group.begin_step(3)
    broadcast = group.broadcast_
    calls: list[int] = []

    def all_but_the_second(tensor: torch.Tensor) -> torch.Tensor:
        calls.append(tensor.numel())
        return tensor if rank == 0 and len(calls) == 2 else broadcast(tensor)

    with mock.patch.object(group, "broadcast_", all_but_the_second):
        error = error_of(lambda: group.broadcast_frame(payload(9000) if rank == 0 else None))
        if rank == 0:
            group.broadcast_(torch.zeros(calls[1], dtype=torch.uint8))
    return error


def test_a_frame_whose_second_part_is_another_one_is_refused() -> None:
    leader, (kind, message) = run_ranks(frame_of_two_halves, 2)
    assert leader == ("", "")
    assert kind == "CollectiveError"
    assert "9000 bytes are not those that were sent" in message


def absent_rank(rank: int, world_size: int) -> tuple[str, str, float]:
    group = build_groups(world_size, 1, timeout_s=2).tensor_parallel
    group.begin_step(5)
    if rank == 1:
        time.sleep(4)
        return "", "", 0.0
    started_s = time.monotonic()
    kind, message = error_of(lambda: group.all_reduce_sum_(torch.zeros(2)))
    return kind, message, time.monotonic() - started_s


def test_t20_a_rank_that_does_not_come_is_a_named_error_in_the_time_out() -> None:
    """SCENARIOS T20: the error names operation, group, rank and step; who is absent, the keeper of the ranks tells."""
    kind, message, waited_s = run_ranks(absent_rank, 2)[0]
    assert kind == "CollectiveError"
    assert "all_reduce on tp0 rank 0 of 2, step 5" in message
    assert waited_s < 4


class TestGroupOfOne:
    def test_nothing_is_communicated(self) -> None:
        seen: list[object] = []
        group = TensorParallelGroup(0, 1, observer=lambda *record: seen.append(record))
        tensor = torch.arange(4.0)
        assert torch.equal(group.all_gather(tensor), tensor.unsqueeze(0))
        assert group.all_reduce_sum_(tensor) is tensor
        assert group.all_reduce_max_(tensor) is tensor
        assert group.broadcast_(tensor) is tensor
        assert group.broadcast_frame(b"x") == b"x"
        assert group.broadcast_frame(b"") == b""
        assert group.all_gather_object("one") == ["one"]
        assert seen == []

    def test_a_leader_without_a_payload_is_a_fault(self) -> None:
        with pytest.raises(CollectiveError, match="no payload"):
            TensorParallelGroup(0, 1).broadcast_frame(None)

    def test_more_ranks_need_groups(self) -> None:
        with pytest.raises(CollectiveError, match="tp of 2 ranks"):
            TensorParallelGroup(0, 2)
        with pytest.raises(LinkError, match="2 stages"):
            StageLink(0, (0, 1))

    def test_a_link_of_one_stage_is_first_and_last(self) -> None:
        link = StageLink(0, (0,))
        assert (link.is_first, link.is_last, link.size) == (True, True, 1)
        link.begin_step(3)
        link.drain()


def link_of_two(timeout_s: float = 30) -> StageLink:
    return build_groups(1, 2, timeout_s=timeout_s).link


def frames_over_a_link(rank: int, world_size: int) -> list[bool]:
    link = link_of_two()
    link.begin_step(3)
    if link.is_first:
        for size in LINK_SIZES:
            link.send_frame(payload(size), 1, Tag.INTAKE)
        link.drain()
        return []
    return [link.receive_frame(0, Tag.INTAKE) == payload(size) for size in LINK_SIZES]


def test_a_frame_of_any_size_reaches_the_next_stage() -> None:
    assert run_ranks(frames_over_a_link, 2)[1] == [True] * len(LINK_SIZES)


def tensors_to_send() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randn(3, 5, generator=generator),
        torch.randn(40, 64, generator=generator).to(torch.bfloat16),
        torch.randn(2, 3, generator=generator).to(torch.float16),
        torch.randn(7, generator=generator, dtype=torch.float64),
        torch.arange(12, dtype=torch.int32).reshape(1, 2, 3, 2),
        torch.tensor(2**62, dtype=torch.int64),
        torch.empty(0, 5),
        torch.empty(0, dtype=torch.int64),
        torch.arange(600, dtype=torch.int64).reshape(20, 30).t(),
        torch.arange(40, dtype=torch.int64).reshape(5, 8)[:, ::2],
        torch.tensor([float("nan"), float("inf"), -0.0]),
        torch.arange(238, dtype=torch.float32),
        torch.arange(239, dtype=torch.float32),
    ]


def tensors_over_a_link(rank: int, world_size: int) -> list[tuple[bool, bool]]:
    link = link_of_two()
    link.begin_step(1)
    tensors = tensors_to_send()
    if link.is_first:
        for tensor in tensors:
            link.send_tensor(tensor, 1, Tag.HIDDEN)
        link.drain()
        return []
    same = []
    for tensor in tensors:
        got = link.receive_tensor(0, Tag.HIDDEN, shape=tuple(tensor.shape), dtype=tensor.dtype)
        same.append((torch.equal(got.nan_to_num(1.0), tensor.nan_to_num(1.0)), got.is_contiguous()))
    return same


def test_tensors_arrive_bit_for_bit_in_their_shape() -> None:
    assert run_ranks(tensors_over_a_link, 2)[1] == [(True, True)] * len(tensors_to_send())


def many_tags(rank: int, world_size: int) -> list[bytes]:
    link = link_of_two()
    if link.is_first:
        for step in range(1, 6):
            link.begin_step(step, in_flight_steps=10)
            for tag in (Tag.INTAKE, Tag.MASK, Tag.VERDICT):
                link.send_frame(f"{tag.name}{step}".encode() + payload(step * 400), 1, tag)
        link.drain()
        return []
    received = []
    for tag in (Tag.VERDICT, Tag.INTAKE, Tag.MASK):
        for step in range(1, 6):
            frame = link.receive_frame(0, tag, step=step)
            assert frame.endswith(payload(step * 400))
            received.append(frame[: len(frame) - step * 400])
    return received


def test_messages_of_a_tag_keep_their_order_whatever_other_tags_do() -> None:
    expected = [f"{tag}{step}".encode() for tag in ("VERDICT", "INTAKE", "MASK") for step in range(1, 6)]
    assert run_ranks(many_tags, 2)[1] == expected


def held_buffers(rank: int, world_size: int) -> list[bool]:
    """The receiver comes late; by then the sender has dropped every tensor and filled the memory anew."""
    link = link_of_two()
    if link.is_first:
        for step in range(1, 5):
            link.begin_step(step, in_flight_steps=10)
            link.send_tensor(torch.full((200, 100), float(step)), 1, Tag.HIDDEN)
            link.send_frame(bytes([step]) * 5000, 1, Tag.INTAKE)
            small = torch.full((4,), float(step))
            link.send_tensor(small, 1, Tag.TOKENS)
            small.zero_()
            junk = [torch.full((200, 100), -1.0) for _ in range(4)]
            assert len(junk) == 4
        link.drain()
        return []
    time.sleep(0.5)
    correct = []
    for step in range(1, 5):
        link.begin_step(step)
        hidden = link.receive_tensor(0, Tag.HIDDEN, shape=(200, 100), dtype=torch.float32)
        small = link.receive_tensor(0, Tag.TOKENS, shape=(4,), dtype=torch.float32)
        correct.append(bool((hidden == step).all()) and bool((small == step).all()))
        correct.append(link.receive_frame(0, Tag.INTAKE) == bytes([step]) * 5000)
    return correct


def test_buffers_are_held_until_they_were_taken() -> None:
    assert run_ranks(held_buffers, 2)[1] == [True] * 8


def wrong_messages(rank: int, world_size: int) -> list[tuple[str, str]]:
    link = link_of_two()
    link.begin_step(4)
    if link.is_first:
        for _ in range(2):
            link.send_frame(b"x", 1, Tag.VERDICT)
        for _ in range(3):
            link.send_tensor(torch.zeros(2, 3), 1, Tag.TOKENS)
        link.send_tensor(torch.zeros(2, 3), 1, Tag.HIDDEN)
        link.drain()
        return [
            error_of(lambda: link.send_tensor(torch.zeros(1, 1, 1, 1, 1), 1, Tag.HIDDEN)),
            error_of(lambda: link.send_tensor(torch.zeros(2, dtype=torch.bool), 1, Tag.HIDDEN)),
        ]

    def tensor(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[str, str]:
        return error_of(lambda: link.receive_tensor(0, Tag.TOKENS, shape=shape, dtype=dtype))

    errors = [error_of(lambda: link.receive_frame(0, Tag.VERDICT, step=3))]
    link.begin_step(5)
    errors.append(error_of(lambda: link.receive_frame(0, Tag.VERDICT)))
    link.begin_step(4)
    errors += [tensor((3, 2), torch.float32), tensor((2, 3), torch.int64), tensor((6,), torch.float32)]
    good = link.receive_tensor(0, Tag.HIDDEN, shape=(2, 3), dtype=torch.float32)
    assert torch.equal(good, torch.zeros(2, 3))
    return errors


def test_t20_a_message_of_another_step_shape_or_dtype_is_refused_by_name() -> None:
    """SCENARIOS T20: every message carries its step."""
    sender, receiver = run_ranks(wrong_messages, 2)
    assert [kind for kind, _ in sender + receiver] == ["LinkError"] * 7
    steps, (_, shape), (_, dtype), (_, flat) = receiver[:2], *receiver[2:]
    for (_, message), expected in zip(steps, (3, 5), strict=True):
        assert "VERDICT on pp0 from stage 0" in message
        assert "step 4" in message
        assert f"of step {expected}" in message
    assert "(2, 3), expected torch.float32 (3, 2)" in shape
    assert "torch.float32" in dtype
    assert "expected torch.int64" in dtype
    assert "expected torch.float32 (6,)" in flat
    assert all("step 4" in message for message in (shape, dtype, flat))
    assert "torch.bool" in sender[1][1]


def silent_stage(rank: int, world_size: int) -> tuple[str, str, float]:
    link = link_of_two(timeout_s=2)
    link.begin_step(6)
    if link.is_first:
        time.sleep(4)
        return "", "", 0.0
    started_s = time.monotonic()
    kind, message = error_of(lambda: link.receive_frame(0, Tag.INTAKE))
    return kind, message, time.monotonic() - started_s


def test_a_stage_that_says_nothing_is_a_named_error_in_the_time_out() -> None:
    kind, message, waited_s = run_ranks(silent_stage, 2)[1]
    assert kind == "LinkError"
    assert "receive of INTAKE on pp0 between stages 1 and 0, step 6" in message
    assert waited_s < 4


def sends_nobody_takes(rank: int, world_size: int) -> tuple[str, str]:
    link = link_of_two(timeout_s=2)
    if not link.is_first:
        time.sleep(5)
        return "", ""
    link.begin_step(1)
    link.send_tensor(torch.zeros(4_000_000), 1, Tag.HIDDEN)
    link.begin_step(2)
    return error_of(lambda: link.begin_step(3))


def test_a_send_that_nobody_takes_is_a_named_error_of_its_own_step() -> None:
    kind, message = run_ranks(sends_nobody_takes, 2)[0]
    assert kind == "LinkError"
    assert "send of step 1 on pp0 stage 0" in message


def warm(rank: int, world_size: int) -> tuple[list[str], list[tuple[str, str]], list[str]]:
    groups = build_groups(2, 3, timeout_s=30)
    collectives_seen: list[str] = []
    sends: list[tuple[str, str]] = []
    groups.tensor_parallel.observer = lambda operation, name, _: collectives_seen.append(f"{operation} {name}")
    groups.link.observer = lambda operation, name, _: sends.append((operation, name))
    warm_up(groups)
    return collectives_seen, sends, [groups.tensor_parallel.name, groups.link.name]


def test_warm_up_connects_every_group_and_pair() -> None:
    for rank, (seen, sends, names) in enumerate(run_ranks(warm, 6)):
        assert names == [f"tp{rank // 2}", f"pp{rank % 2}"]
        assert seen == [f"{name} tp{rank // 2}" for name in ("all_reduce", "broadcast", "all_gather_object")]
        tensors = [("send:hidden", f"pp{rank % 2}")] if rank < 4 else []
        assert sends == [("send:warm_up", f"pp{rank % 2}")] * 2 + tensors


def sent_bytes(rank: int, world_size: int) -> list[tuple[str, str, int]]:
    link = link_of_two()
    seen: list[tuple[str, str, int]] = []
    link.observer = lambda *record: seen.append(record)
    link.begin_step(1)
    if link.is_first:
        link.send_frame(b"abc", 1, Tag.INTAKE)
        link.send_tensor(torch.zeros(1000), 1, Tag.HIDDEN)
    else:
        link.receive_frame(0, Tag.INTAKE)
        link.receive_tensor(0, Tag.HIDDEN, shape=(1000,), dtype=torch.float32)
    link.drain()
    return seen


def test_the_observer_sees_every_send_with_its_bytes() -> None:
    assert run_ranks(sent_bytes, 2) == [[("send:intake", "pp0", 1024), ("send:hidden", "pp0", 1024 + 4000)], []]


class ScriptedSource:
    """Gives out one list of actions a step."""

    def __init__(self, lists: list[list[Action]]) -> None:
        self.lists = lists

    def collect(self, patience: Patience) -> list[Action]:
        assert patience is Patience.LONG
        return self.lists.pop(0)


def action_lists() -> list[list[Action]]:
    add = AddSequence(
        sequence_id=1,
        choice=0,
        prompt_token_ids=list(range(5000)),
        max_tokens=5,
        params=SamplingParams(stop=("é",), logit_bias={3: 1.5}),
        seed=2**64 - 1,
    )
    return [
        [],
        [add, EndSequence(7, "error", ErrorInfo("timeout", "late"))],
        [],
        [EndSequence(1, "abort"), StopRanks()],
    ]


def intake(rank: int, world_size: int, tp_size: int, pp_size: int) -> list[bool]:
    groups = build_groups(tp_size, pp_size, timeout_s=30)
    source = ScriptedSource(action_lists()) if rank == 0 else None
    part = Intake(groups.tensor_parallel, groups.link, source)
    same = []
    for step, expected in enumerate(action_lists()):
        groups.tensor_parallel.begin_step(step)
        groups.link.begin_step(step)
        same.append(part.exchange(Patience.LONG, step - 2) == expected)
    groups.link.drain()
    return same


@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 1), (2, 1), (1, 3), (2, 2)])
def test_every_rank_learns_the_same_actions_in_the_same_step(tp_size: int, pp_size: int) -> None:
    results = run_ranks(intake, tp_size * pp_size, tp_size, pp_size)
    assert results == [[True] * 4] * (tp_size * pp_size)


def diverged_intake(rank: int, world_size: int, odd_rank: int) -> tuple[str, str]:
    groups = build_groups(2, 2, timeout_s=4)
    source = ScriptedSource(action_lists()) if rank == 0 else None
    part = Intake(groups.tensor_parallel, groups.link, source)
    groups.tensor_parallel.begin_step(5)
    groups.link.begin_step(5)
    result = error_of(lambda: part.exchange(Patience.LONG, 77 if rank == odd_rank else -8))
    groups.link.drain()
    return result


@pytest.mark.parametrize("odd_rank", [1, 2, 3])
def test_a_rank_that_planned_or_committed_something_else_is_noticed_before_it_runs_anything(odd_rank: int) -> None:
    results = run_ranks(diverged_intake, 4, odd_rank)
    kind, message = results[odd_rank]
    assert kind == DesyncError.__name__
    for named in (f"stage {odd_rank // 2} rank {odd_rank % 2}", "step 5", "-8", "77"):
        assert named in message
    assert [result for rank, result in enumerate(results) if rank != odd_rank] == [("", "")] * 3


def plan_of(step: int, rows: int, digest: int = -(2**63)) -> StepPlan:
    made = tuple(PlanRow(index, 0, 1, samples=index % 2 == 0, constrained=False) for index in range(2 * rows))
    return StepPlan(step, made, digest)


def share_tokens(
    groups: RankGroups, plan: StepPlan, ids: list[int], statuses: list[int]
) -> tuple[list[int], list[int]]:
    share = TokenShare(groups.tensor_parallel, groups.link)
    groups.tensor_parallel.begin_step(plan.step)
    groups.link.begin_step(plan.step)
    if groups.link.is_last:
        return share.publish(plan, torch.tensor(ids), torch.tensor(statuses))
    return share.receive(plan)


def token_share(rank: int, world_size: int, tp_size: int, pp_size: int) -> list[tuple[list[int], list[int]]]:
    groups = build_groups(tp_size, pp_size, timeout_s=30)
    shared = []
    for step, rows in enumerate((1, 3, 200)):
        # A rank of the last stage whose own draw differs takes its rank 0's all the same.
        ids = [10 * step + index + 1000 * (groups.tensor_parallel.rank > 0) for index in range(rows)]
        shared.append(share_tokens(groups, plan_of(step, rows), ids, [index % 3 for index in range(rows)]))
    groups.link.drain()
    return shared


@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 1), (2, 1), (1, 3), (2, 2)])
def test_all_ranks_commit_the_tokens_of_the_last_stages_rank_0(tp_size: int, pp_size: int) -> None:
    expected = [
        ([10 * step + index for index in range(rows)], [index % 3 for index in range(rows)])
        for step, rows in enumerate((1, 3, 200))
    ]
    assert run_ranks(token_share, tp_size * pp_size, tp_size, pp_size) == [expected] * (tp_size * pp_size)


def diverged(rank: int, world_size: int, odd_rank: int, digest: int, rows: int) -> tuple[str, str]:
    groups = build_groups(2, 2, timeout_s=4)
    plan = plan_of(3, rows, digest) if rank == odd_rank else plan_of(3, 2)
    count = len(plan.sampling_rows)
    result = error_of(lambda: share_tokens(groups, plan, [5] * count, [0] * count))
    if groups.link.is_last and rank != odd_rank:
        groups.link.drain()
    return result


@pytest.mark.parametrize("odd_rank", [0, 1, 3])
def test_a_rank_whose_plan_differs_is_noticed_at_once_and_named(odd_rank: int) -> None:
    results = run_ranks(diverged, 4, odd_rank, 77, 2)
    kind, message = results[odd_rank]
    assert kind == DesyncError.__name__
    assert f"stage {odd_rank // 2} rank {odd_rank % 2}" in message
    assert "[3, 77, 2]" in message
    assert str(-(2**63)) in message
    assert [result for rank, result in enumerate(results) if rank not in (odd_rank, odd_rank - 2)] == [("", "")] * (
        3 if odd_rank < 2 else 2
    )


def test_another_number_of_rows_is_noticed_on_a_stage_before() -> None:
    kind, message = run_ranks(diverged, 4, 1, -(2**63), 3)[1]
    assert kind in {"LinkError", DesyncError.__name__}
    assert "TOKENS" in message


@pytest.mark.parametrize("rows", [0, 1, 3, 50])
def test_another_number_of_rows_is_noticed_within_the_last_stage(rows: int) -> None:
    kind, message = run_ranks(diverged, 4, 3, 77, rows)[3]
    assert kind == DesyncError.__name__
    assert "stage 1 rank 1" in message
