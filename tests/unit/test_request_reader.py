"""Long prompts are read beside the step loop: in order, and no sequence that runs waits for them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from leader_bench import EOS, Bench, ByteTokenizer, script_of

from runtime.messages import (
    Abort,
    Accepted,
    EndSequence,
    Rejected,
    Shutdown,
    StopRanks,
    Submit,
    Tokenize,
    Tokenized,
)
from runtime.request_builder import Request, RequestBuilder
from runtime.request_limits import RequestLimits
from runtime.request_reader import RequestReader

LONG = "x" * 10_000
SOON_S = 20.0


class SlowTokenizer(ByteTokenizer):
    """Takes a long text only once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_read = threading.Event()
        self.threads: list[bool] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.threads.append(threading.current_thread() is threading.main_thread())
        if len(text) >= len(LONG):
            assert self.may_read.wait(SOON_S)
        return super().encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        assert not skip_special_tokens
        return bytes(ids).decode()


@pytest.fixture
def tokenizer() -> Iterator[SlowTokenizer]:
    slow = SlowTokenizer()
    yield slow
    slow.may_read.set()


@pytest.fixture
def bench(tokenizer: SlowTokenizer) -> Bench:
    made = Bench()
    made.scripts = {number: script_of("next") for number in range(20)}
    limits = RequestLimits(257, 40_000, 100_000, 4096)
    made.leader._reader = RequestReader(RequestBuilder(tokenizer, limits), tokenizer, made.socket.wake)
    return made


def ids_of(bench: Bench, kind: type[Accepted] | type[Rejected] | type[Tokenized]) -> list[int]:
    return [message.request_id for message in bench.socket.sent if isinstance(message, kind)]


def step_until_read(bench: Bench, tokenizer: SlowTokenizer, *, began: bool = True) -> None:
    """Lets long texts be read; steps each time that the leader is woken, until nothing is left to read."""
    tokenizer.may_read.set()
    if not began:
        bench.step()
    while bench.leader._reader._unread:
        assert bench.socket.woken.wait(SOON_S)
        bench.socket.woken.clear()
        bench.step()


def test_a_stream_goes_on_while_a_long_prompt_is_read(bench: Bench, tokenizer: SlowTokenizer) -> None:
    bench.scripts = {0: script_of("abcdefghij"), 1: script_of("long"), 2: script_of("late")}
    bench.submit(7)
    bench.step()
    bench.submit(8, prompt=LONG)
    bench.submit(9)
    for _ in range(5):
        bench.step()
    assert bench.text(7) == "abcdef"
    # Who came later is not taken sooner.
    assert ids_of(bench, Accepted) == [7]
    step_until_read(bench, tokenizer)
    bench.run()
    assert ids_of(bench, Accepted) == [7, 8, 9]
    assert [bench.text(one) for one in (7, 8, 9)] == ["abcdefghij", "long", "late"]
    assert len(bench.added[1].prompt_token_ids) == len(LONG)
    # The long text, and what came behind it, were read elsewhere.
    assert tokenizer.threads == [True, False, False]


def test_short_requests_are_read_at_once(bench: Bench, tokenizer: SlowTokenizer) -> None:
    for number in range(20):
        bench.submit(number)
    bench.step()
    assert ids_of(bench, Accepted) == list(range(20))
    assert tokenizer.threads == [True] * 20
    assert not bench.socket.woken.is_set()


def test_many_short_ones_do_not_hold_up_a_step_together(bench: Bench, tokenizer: SlowTokenizer) -> None:
    for number in range(20):
        bench.submit(number, prompt="y" * 1000)
    bench.step()
    # The thread may have read others since.
    assert tokenizer.threads.count(True) == 8
    assert len(ids_of(bench, Accepted)) >= 8
    step_until_read(bench, tokenizer)
    assert ids_of(bench, Accepted) == list(range(20))


def test_a_request_aborted_before_it_was_read(bench: Bench, tokenizer: SlowTokenizer) -> None:
    bench.submit(1, prompt=LONG, n=2)
    bench.submit(2)
    bench.step()
    bench.socket.inbox.append(Abort(1))
    bench.step()
    assert bench.socket.sent == []
    step_until_read(bench, tokenizer)
    bench.run()
    assert [bench.finished(1, index).finish_reason for index in range(2)] == ["abort", "abort"]
    assert bench.finished(2).finish_reason == "stop"


def test_a_number_that_waits_to_be_read_is_under_way(bench: Bench, tokenizer: SlowTokenizer) -> None:
    bench.submit(1, prompt=LONG)
    bench.submit(1)
    bench.step()
    (rejected,) = bench.socket.sent
    assert isinstance(rejected, Rejected)
    assert rejected.error.param == "request_id"
    step_until_read(bench, tokenizer)
    assert ids_of(bench, Accepted) == [1]


def test_questions_and_errors_come_in_order(bench: Bench, tokenizer: SlowTokenizer) -> None:
    bench.socket.inbox += [
        Tokenize(1, json.dumps({"prompt": LONG})),
        Submit(2, json.dumps({"prompt": LONG, "temperature": -1})),
        Tokenize(3, json.dumps({"prompt": "ab"})),
        Submit(4, json.dumps({"prompt": LONG * 5})),
    ]
    bench.step()
    assert bench.socket.sent == []
    step_until_read(bench, tokenizer)
    assert [type(message) for message in bench.socket.sent] == [Tokenized, Rejected, Tokenized, Rejected]
    first, second, third, fourth = bench.socket.sent
    assert isinstance(first, Tokenized)
    assert first.request_id == 1
    assert len(first.token_ids) == len(first.tokens) == len(LONG)
    assert isinstance(second, Rejected)
    assert (second.request_id, second.error.param) == (2, "temperature")
    assert third == Tokenized(3, [97, 98], ["a", "b"])
    assert isinstance(fourth, Rejected)
    assert "50000 tokens" in fourth.error.message


def test_a_fault_while_reading_is_the_rank_s(bench: Bench, tokenizer: SlowTokenizer, monkeypatch: Any) -> None:
    def fail(*_: Any, **__: Any) -> Request:
        raise MemoryError("no room")

    bench.submit(1, prompt=LONG)
    tokenizer.may_read.set()
    monkeypatch.setattr(RequestBuilder, "parse", fail)
    with pytest.raises(MemoryError):
        step_until_read(bench, tokenizer, began=False)


def test_leaving_waits_for_nobody(bench: Bench, tokenizer: SlowTokenizer) -> None:
    bench.submit(0)
    bench.submit(1, prompt=LONG)
    bench.step()
    bench.socket.inbox.append(Shutdown())
    actions = bench.step()
    assert [type(action) for action in actions] == [EndSequence, StopRanks]
    tokenizer.may_read.set()
    # Nobody reads what was heard since, and nobody is woken.
    bench.submit(2)
    assert bench.step() == []
    assert not bench.socket.woken.wait(0.2)
    assert EOS not in bench.token_ids(0)
