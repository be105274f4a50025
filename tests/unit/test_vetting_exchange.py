"""The rank's side alone, with a thread in place of the compile process: what is asked, kept, counted, asked again."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from grammars import small_vocabulary

from grammar_sync.engines.prepared import PreparedGrammar
from grammar_sync.spec import GrammarSpec
from grammar_sync.vetting.messages import (
    Answer,
    Busy,
    Drop,
    FrameBuffer,
    FrameError,
    Order,
    Refused,
    Setup,
    Vet,
    Vetted,
    VettingLimits,
    VettingOutcome,
    to_frame,
)
from grammar_sync.vetting.service import VettingService

SETUP = Setup(small_vocabulary(), "module:name", "auto", VettingLimits())
PATIENCE_S = 30.0
SPECS = 5000


def spec(source: str) -> GrammarSpec:
    return GrammarSpec("regex", source)


def passed(source: str) -> Vetted:
    return Vetted(PreparedGrammar("xgrammar", "regex", source, spec(source).options), 10, 0.25, 0.0)


class ThreadedProcess:
    """Answers in a thread; a source may say how."""

    def __init__(self) -> None:
        self.connection, self._theirs = socket.socketpair()
        self.orders: list[Order] = []
        self.was_ended = False
        threading.Thread(target=self._run, daemon=True).start()

    def end(self) -> None:
        self.was_ended = True
        self.connection.close()

    def _run(self) -> None:
        buffer = FrameBuffer()
        while buffer.read(self._theirs.fileno()):
            for frame in buffer.frames():
                order: Order = msgspec.msgpack.decode(frame, type=Order)
                self.orders.append(order)
                if isinstance(order, Vet) and not self._answer(order):
                    self._theirs.close()
                    return

    def _answer(self, order: Vet) -> bool:
        """Answers one order; returns whether to go on."""
        source = order.spec.source
        outcome: VettingOutcome = passed(source)
        match source.split():
            case ["silent", *_]:
                return True
            case ["busy"]:
                self._theirs.sendall(to_frame(Busy()))
                return True
            case ["die", *_]:
                return False
            case ["nonsense"]:
                self._theirs.sendall(b"\x00\x00\x00\x01\xc1")
                return True
            case ["endless"]:
                self._theirs.sendall(b"\xff" * 100)
                return True
            case ["refuse", reason]:
                outcome = Refused(reason, "no", is_final=reason != "time")  # type: ignore[arg-type]
        self._theirs.sendall(to_frame(Answer(order.job, outcome, 0.5, 2.0)))
        return True


class Bench:
    def __init__(self, **options: Any) -> None:
        self.processes: list[ThreadedProcess] = []
        self.service = VettingService(SETUP, self.start(), self.start, **options)

    def start(self) -> ThreadedProcess:
        self.processes.append(ThreadedProcess())
        return self.processes[-1]

    def outcome(self, source: str) -> VettingOutcome:
        self.service.submit(spec(source))
        until(lambda: self.service.poll(spec(source)) is not None)
        report = self.service.poll(spec(source))
        assert report is not None
        self.service.discard(spec(source))
        return report.outcome

    def asked(self) -> list[str]:
        return [order.spec.source for process in self.processes for order in process.orders if isinstance(order, Vet)]


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "did not happen in time"
        time.sleep(0.0005)


@contextmanager
def running(**options: Any) -> Iterator[Bench]:
    bench = Bench(**options)
    try:
        yield bench
    finally:
        bench.service.close()
        assert all(process.was_ended for process in bench.processes)


def test_thousands_of_grammars_leave_a_bounded_cache() -> None:
    with running(cache_limit_bytes=100_000) as bench:
        for begin in range(0, SPECS, 500):
            batch = [spec(f"{'x' * 100} {number}") for number in range(begin, begin + 500)]
            for one in batch:
                bench.service.submit(one)
            until(lambda batch=batch: all(bench.service.poll(one) is not None for one in batch))  # type: ignore[misc]
            for one in batch:
                bench.service.discard(one)
            assert bench.service._cache.size_bytes <= 100_000
        assert len(bench.asked()) == SPECS
        assert not bench.service._jobs
        assert not bench.service._asked
        assert len(bench.service._cache._slots) < 100
        bench.outcome(f"{'x' * 100} {SPECS - 1}")
        assert len(bench.asked()) == SPECS, "the last ones are still there"


def test_what_is_counted() -> None:
    with running() as bench:
        for source in ("a", "a", "refuse grammar", "refuse masks", "refuse grammar", "refuse time", "refuse time"):
            bench.outcome(source)
        bench.service.submit(spec("silent"))
        bench.service.discard(spec("silent"))
        counters = bench.service.counters()
    assert (counters.asked, counters.cache_hits, counters.dropped, counters.restarts) == (8, 2, 1, 0)
    assert (counters.vetted, counters.compile_s) == (1, 0.25)
    assert counters.refused == {"grammar": 1, "masks": 1, "time": 2}
    assert (counters.queue_s, counters.vet_s) == (0.5 * 5, 2.0 * 5)


def test_it_knows_when_the_process_last_got_on() -> None:
    with running() as bench:
        for source in ("busy", "a"):
            before_s = bench.service.heard_s
            bench.service.submit(spec(source))
            until(lambda before_s=before_s: bench.service.heard_s > before_s)  # type: ignore[misc]
        assert bench.service.poll(spec("busy")) is None
        before_s = bench.service.heard_s
        bench.service.submit(spec("silent"))
        until(lambda: "silent" in bench.asked())
        time.sleep(0.05)
        assert bench.service.heard_s == before_s
        bench.service.submit(spec("die"))
        until(lambda: bench.service.heard_s > before_s)
        until(lambda: bench.service.counters().restarts == 2)


def test_the_first_message_is_the_set_up_and_a_drop_follows_what_it_drops() -> None:
    with running() as bench:
        bench.service.submit(spec("silent"))
        until(lambda: bench.asked() == ["silent"])
        bench.service.discard(spec("silent"))
        bench.outcome("a")
        orders = bench.processes[0].orders
    assert orders[0] == SETUP
    assert orders[1:] == [Vet(0, spec("silent")), Drop(0), Vet(1, spec("a"))]


@pytest.mark.parametrize("source", ["nonsense", "endless"])
def test_a_process_that_talks_nonsense_is_replaced(source: str, caplog: pytest.LogCaptureFixture) -> None:
    with running() as bench:
        outcome = bench.outcome(source)
        assert outcome == Refused("crash", "the compile process was lost while it worked on it", is_final=False)
        assert bench.asked() == [source, source]
        assert bench.outcome("a") == passed("a")
        assert bench.service.counters().restarts == len(bench.processes) - 1 == 2
    assert "sent what is no answer" in caplog.text


def test_what_a_lost_process_had_is_asked_again_in_order() -> None:
    with running() as bench:
        for source in ("silent 1", "silent 2", "silent dropped", "die"):
            bench.service.submit(spec(source))
        bench.service.discard(spec("silent dropped"))
        until(lambda: len(bench.processes) == 3)
        until(lambda: len(bench.processes[1].orders) >= 4)
        second = [order.spec.source for order in bench.processes[1].orders if isinstance(order, Vet)]
        assert second == ["silent 1", "silent 2", "die"]
        until(lambda: bench.service.poll(spec("silent 1")) is not None)
        assert bench.outcome("a") == passed("a")


def test_a_process_that_never_works_ends_in_refusals_not_in_a_loop() -> None:
    with running() as bench:
        for number in range(6):
            outcome = bench.outcome(f"die {number}")
            assert isinstance(outcome, Refused)
            assert not outcome.is_final
        assert len(bench.processes) <= 6
        assert bench.outcome("a") == Refused("crash", "the compile process cannot be started", is_final=False)


def test_a_process_that_cannot_be_started_again() -> None:
    bench = Bench()

    def fail() -> ThreadedProcess:
        raise OSError("no more processes")

    bench.service._start = fail
    assert isinstance(bench.outcome("die"), Refused)
    assert bench.outcome("a") == Refused("crash", "the compile process cannot be started", is_final=False)
    bench.service.close()


class ScriptedStore:
    def __init__(self) -> None:
        self.kept: dict[GrammarSpec, VettingOutcome] = {}

    def load(self, wanted: GrammarSpec) -> VettingOutcome | None:
        return self.kept.get(wanted)

    def save(self, wanted: GrammarSpec, outcome: VettingOutcome) -> None:
        self.kept[wanted] = outcome


def test_what_the_store_knows_is_not_asked() -> None:
    store = ScriptedStore()
    with running(store=store) as bench:
        for source in ("a", "refuse grammar", "refuse time"):
            bench.outcome(source)
    assert set(store.kept) == {spec("a"), spec("refuse grammar")}, "a time-out is not kept"
    with running(store=store) as bench:
        assert bench.outcome("a") == passed("a")
        assert bench.outcome("refuse grammar") == Refused("grammar", "no")
        assert bench.asked() == []
        counters = bench.service.counters()
    assert (counters.stored_hits, counters.vetted, counters.refused) == (2, 0, {})


def test_one_who_waits_is_woken_once_for_each_outcome() -> None:
    woken = threading.Semaphore(0)
    with running(on_finished=woken.release) as bench:
        for source in ("a", "b", "refuse grammar"):
            bench.service.submit(spec(source))
        for _ in range(3):
            assert woken.acquire(timeout=PATIENCE_S)
        assert not woken.acquire(timeout=0.02)
        bench.service.submit(spec("silent"))
    assert not woken.acquire(timeout=0.02), "not after close"


def test_frames_come_in_any_pieces() -> None:
    reading, writing = socket.socketpair()
    messages = [to_frame(Answer(number, passed("x" * number * 50), 0.0, 0.0)) for number in range(20)]
    data = b"".join(messages)
    buffer = FrameBuffer()
    got: list[bytes] = []
    for begin in range(0, len(data), 7):
        writing.sendall(data[begin : begin + 7])
        assert buffer.read(reading.fileno())
        got += buffer.frames()
    assert [msgspec.msgpack.decode(frame, type=Answer).job for frame in got] == list(range(20))
    writing.sendall(b"\xff" * 8)
    buffer.read(reading.fileno())
    with pytest.raises(FrameError, match="a frame of"):
        buffer.frames()
