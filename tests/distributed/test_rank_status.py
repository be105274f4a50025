"""What a rank notes of its steps: the time it waits for others is told from its work."""

from __future__ import annotations

import time

import torch
from ranks import run_ranks

from launch.rank.groups import build_groups, warm_up
from pp.link import Tag
from runtime.engine_statistics import RankState
from runtime.rank_status import RankStatus

LATE_S = 0.3


def late_collective(rank: int, world_size: int) -> RankState:
    groups = build_groups(world_size, 1, timeout_s=60)
    warm_up(groups)
    status = RankStatus(groups.tensor_parallel, groups.link, None)
    status.begin_step(7, -1)
    # What is waited for before the work begins does not count.
    groups.tensor_parallel.broadcast_frame(b"actions" if rank == 0 else None)
    status.begin_work()
    if rank == 1:
        time.sleep(LATE_S)
    groups.tensor_parallel.all_reduce_sum_(torch.ones(4))
    status.end_step(3, is_busy=True)
    status.begin_step(8, 5)
    status.begin_work()
    status.end_step(0, is_busy=False)
    return status.state()


def test_the_rank_that_comes_late_waits_least() -> None:
    early, late = run_ranks(late_collective, 2)
    assert (early.rank, late.rank, early.tp_rank, late.tp_rank) == (0, 1, 0, 1)
    assert early.wait_s > LATE_S / 2 > late.wait_s > 0
    for state in (early, late):
        assert (state.step, state.digest, state.beat, state.busy_steps) == (8, "0000000000000005", 1, 1)
        assert state.busy_s == state.last_step_s >= state.wait_s
        assert state.busy_s > LATE_S / 2
        assert state.resident_bytes > 1 << 20
        assert (state.searches, state.searched_rows) == (0, 0)


def late_message(rank: int, world_size: int) -> float:
    groups = build_groups(1, world_size, timeout_s=60)
    warm_up(groups)
    before_ns = groups.link.waited_ns
    if rank == 0:
        time.sleep(LATE_S)
        groups.link.send_frame(b"late", 1, Tag.INTAKE)
    else:
        assert groups.link.receive_frame(0, Tag.INTAKE) == b"late"
    groups.link.drain()
    return (groups.link.waited_ns - before_ns) / 1e9


def test_a_late_message_is_waited_for() -> None:
    sender_s, receiver_s = run_ranks(late_message, 2)
    assert receiver_s > LATE_S / 2 > sender_s


def negative_digest(rank: int, world_size: int) -> str:
    groups = build_groups(world_size, 1, timeout_s=60)
    status = RankStatus(groups.tensor_parallel, groups.link, None)
    status.begin_step(1, -2)
    return status.state().digest


def test_a_digest_is_shown_unsigned() -> None:
    assert run_ranks(negative_digest, 1) == ["fffffffffffffffe"]
