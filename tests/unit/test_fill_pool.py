"""The fill pool: order, failures, and calls that never end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest

from grammar_sync.engines.backend import MatcherError
from grammar_sync.fill_pool import CallState, FillPool

DEADLINE_S = 0.02


class Hung:
    """A call that waits until it is let go."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.ended = threading.Event()

    def __call__(self) -> None:
        self.released.wait(60)
        self.ended.set()


@pytest.fixture
def pool() -> Iterator[FillPool]:
    made = FillPool(deadline_s=DEADLINE_S, max_abandoned=2)
    yield made
    made.close()


def states(pool: FillPool, calls: Sequence[Callable[[], None]]) -> list[CallState]:
    return [result.state for result in pool.wait(pool.submit(calls))]


def failing() -> None:
    raise MatcherError("the engine says no")


def unexpected() -> None:
    raise KeyError("nobody thought of it")


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_calls_run_in_order_and_elsewhere(pool: FillPool) -> None:
    ran: list[tuple[int, int]] = []

    def run(number: int) -> None:
        ran.append((number, threading.get_ident()))

    calls = [partial(run, number) for number in range(40)]
    assert states(pool, calls) == [CallState.DONE] * 40
    assert [number for number, _ in ran] == list(range(40))
    assert threading.get_ident() not in {thread for _, thread in ran}


def test_no_calls(pool: FillPool) -> None:
    assert pool.wait(pool.submit([])) == []


def test_a_batch_runs_while_nobody_waits_for_it(pool: FillPool) -> None:
    done = threading.Event()
    batch = pool.submit([done.set])
    assert done.wait(20)
    assert [result.state for result in pool.wait(batch)] == [CallState.DONE]


def test_a_failure_is_one_call_s_own(pool: FillPool) -> None:
    results = pool.wait(pool.submit([failing, lambda: None]))
    assert [result.state for result in results] == [CallState.FAILED, CallState.DONE]
    assert results[0].message == "the engine says no"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_that_nobody_expected_ends_its_call_and_not_the_batch(pool: FillPool) -> None:
    results = pool.wait(pool.submit([unexpected, lambda: None]))
    assert [result.state for result in results] == [CallState.FAILED, CallState.DONE]
    assert results[0].message == "internal error"
    assert states(pool, [lambda: None]) == [CallState.DONE]


def test_a_hung_call_fails_alone_and_the_others_go_on_in_the_same_batch(pool: FillPool) -> None:
    hung = Hung()
    start = time.monotonic()
    assert states(pool, [lambda: None, hung, lambda: None]) == [CallState.DONE, CallState.LATE, CallState.DONE]
    assert time.monotonic() - start < 10
    assert pool.abandoned == 1
    assert states(pool, [lambda: None]) == [CallState.DONE], "the thread was replaced"
    hung.released.set()
    assert hung.ended.wait(20)
    wait_for(lambda: pool.abandoned == 0)


def test_a_call_that_computes_is_measured_by_its_own_time(pool: FillPool) -> None:
    def compute() -> None:
        end = time.thread_time() + 5 * DEADLINE_S
        while time.thread_time() < end:
            pass

    start = time.thread_time()
    assert states(pool, [compute]) == [CallState.LATE]
    assert time.thread_time() - start < DEADLINE_S, "the waiting thread does not spin"


def test_abandoned_threads_are_bounded(pool: FillPool) -> None:
    first, second = Hung(), Hung()
    assert states(pool, [first, second, lambda: None]) == [CallState.LATE, CallState.LATE, CallState.FAILED]
    assert pool.abandoned == 2
    results = pool.wait(pool.submit([lambda: None]))
    assert [result.state for result in results] == [CallState.FAILED]
    assert "2 mask fills that were given up still run" in results[0].message
    first.released.set()
    wait_for(lambda: pool.abandoned == 1)
    assert states(pool, [lambda: None]) == [CallState.DONE]
    second.released.set()


def test_several_threads_share_a_large_batch() -> None:
    pool = FillPool(threads=3, deadline_s=60)
    met = threading.Barrier(3)

    def meet() -> None:
        met.wait(20)

    calls: list[Callable[[], None]] = [meet, meet, meet, *[lambda: None] * 45]
    assert states(pool, calls) == [CallState.DONE] * 48
    pool.close()


def test_threads_end_when_the_pool_closes() -> None:
    pool = FillPool()
    pool.wait(pool.submit([lambda: None]))
    mine = [thread for thread in threading.enumerate() if thread.name == "mask-fill"]
    assert mine
    pool.close()
    wait_for(lambda: not any(thread.is_alive() for thread in mine if thread is mine[-1]))
