"""Both ends of the client socket: order, waiting, waking, and what happens when one end is not there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from runtime.client_socket import ClientSocketError, FrontSocket, LeaderSocket
from runtime.messages import (
    Abort,
    Accepted,
    ClientMessage,
    EngineMessage,
    EngineReady,
    ErrorInfo,
    Finished,
    Rejected,
    Settled,
    Shutdown,
    Submit,
    TokenDelta,
    Usage,
)

SETTLED = Settled(seed=2**64 - 1, prompt_tokens=3, max_tokens=7)
CLIENT_MESSAGES: list[ClientMessage] = [
    Submit(0, '{"prompt": "a😀\\u0000\\n", "temperature": 0.5, "seed": 18446744073709551616}'),
    Abort(1),
    Submit(2, "no JSON at all\0"),
    Shutdown(),
]
ENGINE_MESSAGES: list[EngineMessage] = [
    EngineReady(2, 2, "float32", "cpu", 2048),
    Accepted(0, 3, SETTLED),
    Rejected(1, ErrorInfo("invalid_request", "no", "prompt")),
    TokenDelta(0, 2, "é", [5, 6]),
    Finished(0, 2, "stop", Usage(1, 2, 3)),
    Finished(0, 1, "error", Usage(1, 0, 1), ErrorInfo("timeout", "late")),
]


def receive_all(receive: Callable[[float], list[Any]], count: int) -> list[Any]:
    messages: list[Any] = []
    deadline_s = time.monotonic() + 20
    while len(messages) < count and time.monotonic() < deadline_s:
        messages += receive(0.2)
    return messages


@contextmanager
def pair(folder: Path) -> Iterator[tuple[FrontSocket, LeaderSocket]]:
    """Yields both ends, connected."""
    endpoint = f"ipc://{folder / 'client'}"
    front = FrontSocket(endpoint)
    leader = LeaderSocket(endpoint)
    try:
        leader.send([Accepted(9, 9, SETTLED)])
        assert receive_all(front.receive, 1) == [Accepted(9, 9, SETTLED)]
        yield front, leader
    finally:
        leader.close()
        front.close(undelivered_s=0)


def returns_in(limit_s: float, call: Callable[[], object]) -> bool:
    """Whether ``call`` returns or raises in ``limit_s``; it goes on in a thread of its own if not."""
    done = threading.Event()

    def run() -> None:
        try:
            call()
        except ClientSocketError:
            pass
        finally:
            done.set()

    threading.Thread(target=run, daemon=True).start()
    return done.wait(limit_s)


def test_messages_arrive_whole_and_in_order(tmp_path: Path) -> None:
    with pair(tmp_path) as (front, leader):
        front.send(CLIENT_MESSAGES[:2])
        front.send(CLIENT_MESSAGES[2:])
        assert receive_all(leader.receive, 4) == CLIENT_MESSAGES
        leader.send(ENGINE_MESSAGES[:4])
        leader.send(ENGINE_MESSAGES[4:])
        assert receive_all(front.receive, 6) == ENGINE_MESSAGES


def test_many_messages_are_neither_lost_nor_reordered(tmp_path: Path) -> None:
    with pair(tmp_path) as (front, leader):
        for number in range(5000):
            leader.send([TokenDelta(number, 0, "x", [number])])
        received = receive_all(front.receive, 5000)
        assert [message.request_id for message in received] == list(range(5000))


def test_a_large_message(tmp_path: Path) -> None:
    text = "é" * 2_000_000
    with pair(tmp_path) as (front, leader):
        front.send([Submit(0, text)])
        assert receive_all(leader.receive, 1) == [Submit(0, text)]


def test_nothing_comes_in_time(tmp_path: Path) -> None:
    with pair(tmp_path) as (front, leader):
        for end in (front, leader):
            started_s = time.monotonic()
            assert end.receive(0.15) == []
            assert 0.1 < time.monotonic() - started_s < 2
            assert end.receive(0.0) == []


def test_wake_ends_a_wait_from_another_thread(tmp_path: Path) -> None:
    with pair(tmp_path) as (front, leader), ThreadPoolExecutor(1) as pool:
        started_s = time.monotonic()
        waiting = pool.submit(leader.receive, 20.0)
        time.sleep(0.1)
        leader.wake()
        assert waiting.result(10) == []
        assert time.monotonic() - started_s < 10
        assert leader.receive(0.05) == [], "one wake ends one wait"
        front.send([Abort(1)])
        assert receive_all(leader.receive, 1) == [Abort(1)]


def test_a_wake_before_the_wait_is_not_lost(tmp_path: Path) -> None:
    with pair(tmp_path) as (_, leader):
        leader.wake()
        leader.wake()
        assert leader.receive(0.0) == []
        started_s = time.monotonic()
        assert leader.receive(20.0) == []
        assert time.monotonic() - started_s < 10


def test_the_front_may_bind_later(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path / 'client'}"
    leader = LeaderSocket(endpoint)
    leader.send([EngineReady(1, 1, "float32", "cpu", 10)])
    front = FrontSocket(endpoint)
    try:
        assert receive_all(front.receive, 1) == [EngineReady(1, 1, "float32", "cpu", 10)]
    finally:
        leader.close()
        front.close(undelivered_s=0)


def test_what_was_sent_before_closing_is_delivered(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path / 'client'}"
    front = FrontSocket(endpoint)
    leader = LeaderSocket(endpoint)
    leader.send(ENGINE_MESSAGES)
    leader.close()
    try:
        assert receive_all(front.receive, len(ENGINE_MESSAGES)) == ENGINE_MESSAGES
    finally:
        front.close(undelivered_s=0)


@pytest.mark.parametrize("endpoint", ["ipc:///nowhere/at/all/client", f"ipc:///tmp/{'x' * 200}", "nonsense"])
def test_an_endpoint_that_cannot_be_bound_is_named(endpoint: str) -> None:
    with pytest.raises(ClientSocketError, match=r"cannot bind .*(nowhere|xxx|nonsense)"):
        FrontSocket(endpoint)


def test_sending_does_not_wait_for_a_leader_that_never_came(tmp_path: Path) -> None:
    front = FrontSocket(f"ipc://{tmp_path / 'client'}")
    assert returns_in(3.0, lambda: front.send([Shutdown()])), "send waits although it says that it does not"
    front.close(undelivered_s=0)


def test_sending_does_not_wait_for_a_leader_that_is_gone(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path / 'client'}"
    front = FrontSocket(endpoint)
    leader = LeaderSocket(endpoint)
    leader.send([Accepted(0, 1, SETTLED)])
    assert receive_all(front.receive, 1) == [Accepted(0, 1, SETTLED)]
    leader.close()
    time.sleep(0.3)
    assert returns_in(3.0, lambda: front.send([Shutdown()])), "a front whose ranks died would never end"
    front.close(undelivered_s=0)


def test_a_leader_sends_without_a_front(tmp_path: Path) -> None:
    leader = LeaderSocket(f"ipc://{tmp_path / 'client'}")
    assert returns_in(3.0, lambda: leader.send([Accepted(0, 1, SETTLED)]))
    assert leader.receive(0.05) == []
    assert returns_in(10.0, leader.close), "what nobody takes is given up after two seconds"


@pytest.mark.parametrize("frame", [b"", b"\x80\x04K\x01.", b"\xc1", b"\x91\x81\xa4type\xa3xyz"])
def test_a_frame_that_is_no_message_does_nothing(tmp_path: Path, frame: bytes) -> None:
    with pair(tmp_path) as (front, leader):
        front._socket.send_multipart([front._leader, frame])
        leader._socket.send(frame)
        front.send([Abort(1)])
        leader.send([Accepted(1, 1, SETTLED)])
        assert receive_all(leader.receive, 1) == [Abort(1)]
        assert receive_all(front.receive, 1) == [Accepted(1, 1, SETTLED)]


@contextmanager
def front_and_leaders(folder: Path, *epochs: int) -> Iterator[tuple[FrontSocket, list[LeaderSocket]]]:
    """Yields a front and leaders of these epochs that have said nothing yet."""
    endpoint = f"ipc://{folder / 'client'}"
    front = FrontSocket(endpoint)
    leaders = [LeaderSocket(endpoint, epoch) for epoch in epochs]
    try:
        yield front, leaders
    finally:
        for leader in leaders:
            leader.close()
        front.close(undelivered_s=0)


def test_a_front_that_heard_of_no_leader_says_so(tmp_path: Path) -> None:
    with front_and_leaders(tmp_path, 0) as (front, _):
        with pytest.raises(ClientSocketError, match="no leader is connected"):
            front.send([Abort(1)])
        assert not front.is_lost, "what was never there is not lost"


def test_what_an_older_leader_still_says_is_dropped_and_counted(tmp_path: Path) -> None:
    with front_and_leaders(tmp_path, 3, 11) as (front, (old, new)):
        old.send([TokenDelta(1, 0, "a", [1])])
        assert receive_all(front.receive, 1) == [TokenDelta(1, 0, "a", [1])]
        front.send([Abort(1)])
        assert receive_all(old.receive, 1) == [Abort(1)]
        new.send([EngineReady(1, 1, "float32", "cpu", 10, epoch=11)])
        assert receive_all(front.receive, 1) == [EngineReady(1, 1, "float32", "cpu", 10, epoch=11)]
        for number in range(3):
            old.send([TokenDelta(1, 0, "b", [number])])
        new.send([Accepted(5, 1, SETTLED)])
        heard = receive_all(front.receive, 1)
        deadline_s = time.monotonic() + 20
        while front.dropped_frames < 3 and time.monotonic() < deadline_s:
            heard += front.receive(0.05)
        assert heard == [Accepted(5, 1, SETTLED)]
        assert front.dropped_frames == 3
        front.send([Abort(2)])
        assert receive_all(new.receive, 1) == [Abort(2)], "what is sent goes to the newest leader"
        assert old.receive(0.05) == []


def test_a_leader_that_is_gone_is_lost_until_the_next_one_speaks(tmp_path: Path) -> None:
    with front_and_leaders(tmp_path, 0) as (front, (old,)):
        old.send([Accepted(1, 1, SETTLED)])
        assert receive_all(front.receive, 1) == [Accepted(1, 1, SETTLED)]
        assert not front.is_lost
        waiting_s = time.monotonic()
        old._socket.close(linger=0)
        while not front.is_lost and time.monotonic() < waiting_s + 20:
            assert front.receive(5.0) == []
        assert time.monotonic() - waiting_s < 4, "the end of a leader ends the wait for its word"
        with pytest.raises(ClientSocketError, match="no leader is connected"):
            front.send([Abort(1)])
        with pytest.raises(ClientSocketError):
            front.send([Abort(1)])
        new = LeaderSocket(f"ipc://{tmp_path / 'client'}", 1)
        try:
            assert front.receive(0.3) == []
            assert front.is_lost, "it is there, but has not said that all its ranks are"
            new.send([EngineReady(1, 1, "float32", "cpu", 10, epoch=1)])
            assert len(receive_all(front.receive, 1)) == 1
            assert not front.is_lost
        finally:
            new.close()


def test_a_stranger_is_not_taken_for_a_leader(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pair(tmp_path) as (front, leader):
        stranger: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        stranger.setsockopt(zmq.ROUTING_ID, b"zz")
        stranger.connect(f"ipc://{tmp_path / 'client'}")
        stranger.send(msgspec.msgpack.encode([Accepted(9, 9, SETTLED)]))
        while "that no leader sent" not in caplog.text:
            assert front.receive(0.1) == []
        front.send([Abort(1)])
        assert receive_all(leader.receive, 1) == [Abort(1)]
        stranger.close(linger=0)
