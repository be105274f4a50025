"""A request that brings ranks down is found among others, which all go on, whatever came when."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from launch.front.open_requests import OpenRequests, RequestStart
from launch.front.quarantine import SHARED_FAULTS, Quarantine
from runtime.messages import Accepted, Finished, Rejected, RequestMessage, Settled, Submit, TokenDelta, Tokenize, Usage

SETTLED = Settled(seed=1, prompt_tokens=1, max_tokens=99)
USAGE = Usage(1, 1, 2)


@dataclass
class Ranks:
    """Ranks that step every request that they were asked by a token, as far as they have room.

    A request of ``poison`` ends them when it is about to have so many tokens. What they say arrives, but for the last
    ``lag`` messages of each request.
    """

    poison: dict[int, int]
    lengths: dict[int, int]
    room: int
    lag: int
    have: dict[int, int] = field(default_factory=dict)

    def ask(self, start: RequestStart) -> RequestMessage:
        assert isinstance(start, Submit)
        self.have[start.request_id] = 0 if start.resume is None else len(start.resume.choices[0].token_ids)
        return Accepted(start.request_id, 1, SETTLED)

    def at_work(self) -> list[int]:
        return list(self.have)[: self.room]

    def step(self) -> list[RequestMessage] | None:
        """Returns what they say; None when they are lost."""
        if any(self.have[one] == self.poison.get(one) for one in self.at_work()):
            return None
        said: list[RequestMessage] = []
        for one in self.at_work():
            self.have[one] += 1
            number = self.have[one] - 1 - self.lag
            if number >= 0:
                said.append(TokenDelta(one, 0, "x", [number], start=number))
            if self.have[one] == self.lengths[one] + self.lag:
                said.append(Finished(one, 0, "length", USAGE))
                del self.have[one]
        return said


def run(poison: dict[int, int], lengths: dict[int, int], room: int, lag: int) -> tuple[dict[int, str], int]:
    """Returns how each request ended, and how many faults that took; new requests come while others run."""
    requests, ends, faults, now = OpenRequests(), dict[int, str](), 0, 0

    def hear(messages: list[RequestMessage]) -> None:
        for message in messages:
            for news in requests.take(message):
                note(news)

    def note(news: RequestMessage) -> None:
        if isinstance(news, Finished):
            ends[news.request_id] = news.finish_reason
            assert (news.error is None) == (news.finish_reason == "length")
        elif isinstance(news, Rejected):
            ends[news.request_id] = news.error.code

    ranks = Ranks(poison, lengths, room, lag)
    waiting = list(lengths)
    while len(ends) < len(lengths):
        now += 1
        assert now < 10_000
        if waiting:
            number = waiting.pop(0)
            for refusal in requests.add([Submit(number, f'{{"n": {number}}}')]):
                note(refusal)
        hear([ranks.ask(start) for start in requests.due().messages])
        said = ranks.step()
        if said is not None:
            hear(said)
            continue
        faults += 1
        at_work, ranks = ranks.at_work(), Ranks(poison, lengths, room, lag)
        messages, _, ended = requests.resubmission(at_work, "killed")
        for end in ended:
            note(end)
        hear([ranks.ask(start) for start in messages])
    assert len(requests) == 0
    return ends, faults


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(1, 12), st.integers(1, 12), st.integers(0, 3))
def test_a_poisonous_request_ends_alone(data: st.DataObject, count: int, room: int, lag: int) -> None:
    lengths = {number: data.draw(st.integers(1, 40)) for number in range(count)}
    culprit = data.draw(st.integers(0, count - 1))
    at = data.draw(st.integers(0, lengths[culprit] - 1))
    ends, faults = run({culprit: at}, lengths, room, lag)
    assert ends.pop(culprit) == "error"
    assert set(ends.values()) <= {"length"}
    assert faults <= SHARED_FAULTS + 2, "fewer than are survived by default"


@settings(deadline=None, max_examples=30)
@given(st.data(), st.integers(2, 8), st.integers(1, 8))
def test_several_end_alone_too(data: st.DataObject, count: int, room: int) -> None:
    lengths = {number: data.draw(st.integers(1, 30)) for number in range(count)}
    culprits = data.draw(st.sets(st.integers(0, count - 1), min_size=2))
    ends, faults = run({one: data.draw(st.integers(0, lengths[one] - 1)) for one in culprits}, lengths, room, 1)
    assert {number for number, end in ends.items() if end == "error"} == culprits
    assert {end for number, end in ends.items() if number not in culprits} <= {"length"}
    assert faults <= (SHARED_FAULTS + 2) * len(culprits)


def test_what_ended_ranks_is_not_taken_again_and_ends_all_that_ask_for_it() -> None:
    requests = OpenRequests()
    twins: list[RequestStart] = [Submit(1, '{"a": 1, "id": "x"}'), Submit(2, "{}"), Submit(3, '{"id": "y", "a": 1}')]
    assert requests.add(twins) == []
    assert requests.due().messages == twins
    for _ in range(SHARED_FAULTS - 1):
        assert requests.resubmission({1, 2, 3}, "killed").messages == twins
        assert requests.suspects == 0
    assert requests.resubmission({1, 2, 3}, "killed").messages == twins[:1]
    assert requests.suspects == 3
    messages, _, ended = requests.resubmission({1}, "rank 1 failed: killed")
    assert [(type(one), one.request_id) for one in ended] == [(Rejected, 1), (Rejected, 3)]
    assert all(isinstance(one, Rejected) and "rank 1 failed: killed" in one.error.message for one in ended)
    assert messages == twins[1:2]
    (refused,) = requests.add([Submit(4, '{"a": 1}')])
    assert isinstance(refused, Rejected)
    assert refused.error.code == "quarantined"
    assert requests.add([Submit(5, '{"a": 1}', score=True), Tokenize(6, '{"a": 1}')]) == [], (
        "they ask for something else"
    )


def test_those_that_only_waited_are_never_suspected() -> None:
    requests = OpenRequests()
    starts: list[RequestStart] = [Submit(number, str(number)) for number in range(20)]
    requests.add(starts)
    requests.due()
    for _ in range(SHARED_FAULTS):
        requests.resubmission({0, 1}, "killed")
    assert requests.suspects == 2


def test_faults_before_ranks_begin_with_the_tried_one_are_not_its_doing() -> None:
    requests = OpenRequests()
    requests.add([Submit(number, str(number)) for number in range(3)])
    requests.due()
    for _ in range(SHARED_FAULTS):
        requests.resubmission({0, 1}, "killed")
    assert requests.suspects == 2
    for _ in range(10):
        # An operator kills rank after rank as soon as they are up.
        messages, aborted, ended = requests.resubmission((), "killed")
        assert [one.request_id for one in messages] == [0], "it is still the one that is tried"
        assert (aborted, ended) == ([], [])
    assert [one.request_id for one in requests.resubmission({0}, "killed").ended] == [0]


def test_one_that_is_aborted_is_tried_no_more() -> None:
    requests = OpenRequests()
    requests.add([Submit(number, str(number)) for number in range(4)])
    requests.due()
    for _ in range(SHARED_FAULTS):
        asked = requests.resubmission(range(4), "killed").messages
    assert [one.request_id for one in asked] == [0]
    assert requests.abort([1, 3]) == [1, 3]
    requests.take(Accepted(0, 1, SETTLED))
    assert requests.due() == ([], [1, 3])
    requests.take(Finished(0, 0, "stop", USAGE))
    assert [one.request_id for one in requests.due().messages] == [2]
    assert requests.suspects == 1


def test_a_fault_that_the_tried_one_had_no_part_in_blames_nobody() -> None:
    quarantine = Quarantine()
    for _ in range(SHARED_FAULTS):
        assert quarantine.fault([1, 2]) is None
    assert quarantine.admitted([1, 2, 3]) == [1]
    assert quarantine.fault([]) is None, "it was not at work yet"
    assert quarantine.admitted([1, 2, 3]) == [1]
    quarantine.passed()
    assert quarantine.admitted([2, 3]) == [2]
    assert quarantine.fault([1, 2]) is None, "it was not alone"
    assert quarantine.admitted([1, 2, 3]) == [2]
    assert quarantine.fault([2]) == 2
    assert quarantine.admitted([1, 3]) == [1, 3]
