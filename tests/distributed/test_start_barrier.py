"""The start barrier over real processes: a rank that is late is waited for, one that does not come is named."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed import HashStore, PrefixStore, TCPStore

from launch.environment import RankEnvironment
from launch.rank.start_barrier import StartError, connect_store, meet

pytestmark = pytest.mark.long(28)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def environment(rank: int, world_size: int, port: int, *, attempt: int = 0, agent: bool = False) -> RankEnvironment:
    return RankEnvironment(rank, world_size, rank, world_size, "127.0.0.1", port, agent, attempt, None)


def timed(call: Any) -> tuple[str, float]:
    """Returns the text of the StartError that ``call`` raises, and the seconds it took."""
    started_s = time.monotonic()
    try:
        call()
    except StartError as error:
        return str(error), time.monotonic() - started_s
    return "", time.monotonic() - started_s


def late_rank(rank: int, world_size: int, port: int, late: int, late_s: float) -> tuple[str, float]:
    if rank == late:
        time.sleep(late_s)
    here = environment(rank, world_size, port)
    store = connect_store(here, 20)
    result = timed(lambda: meet(store, "started", here, 20))
    # Rank 0 keeps the store; it must not leave before the others have looked.
    time.sleep(1.0 if rank == 0 else 0.0)
    return result


@pytest.mark.parametrize("late", [0, 2])
def test_a_rank_three_seconds_late_is_waited_for(late: int) -> None:
    results = run_ranks(late_rank, 3, free_port(), late, 3.0)
    assert [message for message, _ in results] == ["", "", ""]
    assert all(waited_s < 10 for _, waited_s in results)
    if late != 0:  # others wait for rank 0's store before they wait at the barrier
        assert all(waited_s > 2.0 for rank, (_, waited_s) in enumerate(results) if rank != late)


def missing_rank(rank: int, world_size: int, port: int, missing: tuple[int, ...]) -> tuple[str, float]:
    here = environment(rank, world_size, port)
    store = connect_store(here, 10)
    dist.barrier()  # all are connected before any gives up
    result = ("", 0.0) if rank in missing else timed(lambda: meet(store, "loaded", here, 1.5))
    # Rank 0 keeps the store; it must not leave before the others have looked.
    time.sleep(1.0 if rank == 0 else 0.0)
    return result


@pytest.mark.parametrize("missing", [(1,), (2,), (1, 3)])
def test_a_rank_that_does_not_come_is_named_on_all_others_within_the_limit(missing: tuple[int, ...]) -> None:
    results = run_ranks(missing_rank, 4, free_port(), missing)
    for rank, (message, waited_s) in enumerate(results):
        if rank in missing:
            continue
        assert message == f"ranks {list(missing)} did not reach 'loaded' in 1.5 s"
        assert 1.4 < waited_s < 6


def store_lost(rank: int, world_size: int, port: int) -> tuple[str, str]:
    """Rank 0, which keeps the store, gives up and is gone while rank 1 still waits for rank 2."""
    here = environment(rank, world_size, port)
    store = connect_store(here, 10)
    dist.barrier()  # all are connected before any gives up
    if rank == 2:
        time.sleep(4)
        return "", ""
    if rank == 0:
        message, _ = timed(lambda: meet(store, "started", here, 0.5))
        del store
        return "StartError", message
    try:
        meet(store, "started", here, 3)
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_a_store_that_is_lost_while_waiting_is_a_start_error() -> None:
    results = run_ranks(store_lost, 3, free_port())
    assert "did not reach 'started' in 0.5 s" in results[0][1]
    kind, message = results[1]
    assert kind == "StartError"
    assert "rank 1" in message or "[2]" in message


def test_a_store_that_cannot_be_reached_is_named_within_the_limit() -> None:
    port = free_port()
    here = environment(1, 2, port)
    message, waited_s = timed(lambda: connect_store(here, 1.0))
    assert f"rank 1 cannot reach the store at 127.0.0.1:{port}" in message
    assert waited_s < 15


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        message, _ = timed(lambda: connect_store(environment(0, 2, port), 1.0))
    assert f"127.0.0.1:{port}" in message


def test_a_restarted_attempt_does_not_see_the_ranks_of_the_one_before() -> None:
    port = free_port()
    server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    first = environment(1, 2, port, agent=True)
    assert "ranks [0]" in timed(lambda: meet(connect_store(first, 5), "started", first, 0.2))[0]
    zero = environment(0, 2, port, attempt=1, agent=True)
    assert timed(lambda: meet(connect_store(zero, 5), "started", zero, 0.2))[0].startswith("ranks [1]")
    again = environment(1, 2, port, attempt=1, agent=True)
    assert timed(lambda: meet(connect_store(again, 5), "started", again, 5))[0] == ""
    assert server.port == port


def test_two_barriers_do_not_mix() -> None:
    store = PrefixStore("test", HashStore())
    zero, one = environment(0, 2, 1), environment(1, 2, 1)
    other = threading.Thread(target=meet, args=(store, "started", one, 10))
    other.start()
    meet(store, "started", zero, 10)
    other.join(10)
    assert "ranks [1] did not reach 'loaded' in 0.2 s" in timed(lambda: meet(store, "loaded", zero, 0.2))[0]


def test_a_rank_that_waits_shows_that_it_is_alive() -> None:
    store, beats = PrefixStore("test", HashStore()), list[float]()
    with pytest.raises(StartError):
        meet(store, "started", environment(0, 2, 1), 1.0, lambda: beats.append(time.monotonic()))
    assert max(after - before for before, after in itertools.pairwise(beats)) < 0.5
    assert beats[-1] - beats[0] > 0.5


def test_one_rank_meets_itself_at_once() -> None:
    message, waited_s = timed(lambda: meet(HashStore(), "started", environment(0, 1, 1), 5))
    assert message == ""
    assert waited_s < 1
