"""Tensors of a stage through shared memory: what they add up to, and who is told what when ranks do not meet."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import LeaveAtOnceError, run_ranks

from launch.rank import groups as rank_groups
from launch.rank.groups import build_groups
from tp.group import CollectiveError
from tp.shared_memory import SLOT_BYTES
from tp.shared_memory_group import BACKEND, register

ELEMENTS = (0, 1, 7, 576, SLOT_BYTES // 4, SLOT_BYTES // 4 + 1, 3 * SLOT_BYTES // 4 + 5)
ALL_REDUCE = dist.all_reduce
GONE = re.compile(r"rank 1 of the group (closed its connection|is lost: |cannot be told: )")
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.float64)


def own_part(rank: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    numbers = torch.randint(-1000, 1000, (elements,), generator=torch.Generator().manual_seed(100 * rank + 7))
    return (numbers / 8).to(dtype) if dtype.is_floating_point else numbers.to(dtype)


def sums_and_gathers(rank: int, world_size: int) -> list[str]:
    group = build_groups(world_size, 1, timeout_s=30).tensor_parallel
    wrong = []
    for elements in ELEMENTS:
        for dtype in DTYPES:
            parts = [own_part(one, elements, dtype) for one in range(world_size)]
            total = parts[0].clone()
            for part in parts[1:]:
                total += part
            found = {
                "sum": torch.equal(group.all_reduce_sum_(parts[rank].clone()), total),
                "max": torch.equal(group.all_reduce_max_(parts[rank].clone()), torch.stack(parts).amax(0)),
                "gather": torch.equal(group.all_gather(parts[rank]), torch.stack(parts)),
            }
            wrong += [f"{name} of {elements} {dtype}" for name, is_right in found.items() if not is_right]
    return wrong


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sums_in_rank_order_maxima_and_gathers_of_any_size(world_size: int) -> None:
    assert run_ranks(sums_and_gathers, world_size) == [[]] * world_size


def many_in_a_row(rank: int, world_size: int) -> bool:
    """Whether a slot is never overwritten before all have read it: ranks dawdle in turn."""
    group = build_groups(world_size, 1, timeout_s=30).tensor_parallel
    for number in range(300):
        if number % world_size == rank and number % 10 == 0:
            time.sleep(0.002)
        total = group.all_reduce_sum_(torch.full((33,), float(number * (rank + 1))))
        if not torch.equal(total, torch.full((33,), float(number * sum(range(1, world_size + 1))))):
            return False
    return True


def test_no_rank_reads_what_another_has_overwritten() -> None:
    assert run_ranks(many_in_a_row, 3) == [True] * 3


def backend_of_a_stage(rank: int, world_size: int) -> tuple[str, set[Path], list[str]]:
    before = set(Path("/dev/shm").iterdir())
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as made:
        build_groups(2, world_size // 2, timeout_s=30)
    backends = [call.kwargs["backend"] for call in made.call_args_list]
    mapped = Path("/proc/self/maps").read_text(encoding="ascii")
    files = sorted({line.split(maxsplit=5)[5] for line in mapped.splitlines() if "lockstep-" in line})
    return str(backends), set(Path("/dev/shm").iterdir()) - before, files


def test_stages_share_memory_that_has_no_name_and_pipelines_do_not() -> None:
    for backends, named, files in run_ranks(backend_of_a_stage, 4):
        assert backends == str(["gloo", BACKEND, "gloo", BACKEND, "gloo", "gloo"])
        assert named == set()
        assert files == ["/memfd:lockstep-meeting (deleted)"]


def backends_over_two_hosts(rank: int, world_size: int) -> list[str]:
    with (
        mock.patch.object(rank_groups, "host_identity", return_value=f"host {rank // 2}"),
        mock.patch.object(dist, "new_group", wraps=dist.new_group) as made,
    ):
        group = build_groups(4, 1, timeout_s=30).tensor_parallel
        assert group.all_reduce_sum_(torch.ones(3)).tolist() == [4.0] * 3
    return [call.kwargs["backend"] for call in made.call_args_list]


def test_a_stage_on_two_hosts_uses_gloo() -> None:
    assert run_ranks(backends_over_two_hosts, 4) == [["gloo"]] * 4


def error_of(call: Callable[[], object]) -> CollectiveError:
    with pytest.raises(CollectiveError) as caught:
        call()
    return caught.value


def one_leaves(rank: int, world_size: int) -> str:
    group = build_groups(world_size, 1, timeout_s=30).tensor_parallel
    group.all_reduce_sum_(torch.ones(3))
    if rank == 1:
        raise LeaveAtOnceError("")
    # Long before the time-out of thirty seconds, which has another message.
    error = error_of(lambda: group.all_reduce_sum_(torch.ones(3)))
    assert error.fault == "backend"
    raise LeaveAtOnceError(str(error))


def test_a_rank_that_ends_is_noticed_by_those_that_wait_for_it() -> None:
    message, other = run_ranks(one_leaves, 2)
    assert other == ""
    assert message.startswith("all_reduce on tp0 rank 0 of 2, step 0: ")
    assert GONE.search(message)


def one_is_late(rank: int, world_size: int) -> str:
    group = build_groups(world_size, 1, timeout_s=1).tensor_parallel
    if rank == 1:
        time.sleep(4)
        return ""
    return str(error_of(lambda: group.all_reduce_sum_(torch.ones(3))))


def test_a_rank_that_does_not_come_is_named_in_the_time_out() -> None:
    message, _ = run_ranks(one_is_late, 2)
    assert "rank 1 of the group did not come in 1 s" in message


class LeavesOut:
    """``all_reduce`` but for one call, as a faulty backend does it; the first is 1."""

    def __init__(self, call: int) -> None:
        self._left = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._left -= 1
        return None if self._left == 0 else ALL_REDUCE(*args, **kwargs)


def one_leaves_a_call_out(rank: int, world_size: int) -> tuple[str, str]:
    group = build_groups(world_size, 1, timeout_s=10).tensor_parallel
    with mock.patch.object(dist, "all_reduce", LeavesOut(2 if rank == 1 else 0)):
        group.all_reduce_sum_(torch.ones(3))
        if rank == 1:
            group.all_reduce_sum_(torch.ones(3))
        error = error_of(lambda: group.all_reduce_sum_(torch.ones(3)))
    if rank == 1:
        # The others' error comes from this rank's end.
        assert group._device_group is not None
        group._device_group.shutdown()
    return error.fault, str(error)


def test_a_rank_that_left_a_call_out_says_so_itself_before_it_sends_anything() -> None:
    (fault, message), (own_fault, own_message) = run_ranks(one_leaves_a_call_out, 2)
    assert (fault, own_fault) == ("backend", "call")
    assert GONE.search(message)
    assert "call 2 is all_reduce_sum of 12 bytes of torch.float32; announced was call 3" in own_message


def different_calls(rank: int, world_size: int) -> str:
    register()
    group = dist.new_group([0, 1], backend=BACKEND, timeout=timedelta(seconds=20))
    tensor = torch.ones(4 if rank == 0 else 8)
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, torch.ones(tensor.shape)), "what does not belong together is not added"
    return str(caught.value)


def test_tensors_of_different_sizes_meet_no_further_than_their_headers() -> None:
    for message in run_ranks(different_calls, 2):
        assert "call 1 with 16 bytes of torch.float32" in message
        assert "call 1 with 32 bytes of torch.float32" in message


def other_reductions(rank: int, world_size: int) -> list[str]:
    register()
    group = dist.new_group([0, 1], backend=BACKEND, timeout=timedelta(seconds=20))
    messages = []
    calls: tuple[Callable[[], object], ...] = (
        lambda: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.PRODUCT, group=group),
        lambda: dist.all_reduce(torch.ones(2, 3).t(), group=group),
    )
    for call in calls:
        with pytest.raises(RuntimeError) as caught:
            call()
        messages.append(str(caught.value))
    root = torch.full((3,), float(rank))
    dist.broadcast(root, src=1, group=group)
    dist.barrier(group=group)
    assert root.tolist() == [1.0] * 3
    return messages


def test_what_it_cannot_do_is_refused_by_name() -> None:
    for product, strided in run_ranks(other_reductions, 2):
        assert "SUM and MAX alone" in product
        assert "contiguous" in strided
