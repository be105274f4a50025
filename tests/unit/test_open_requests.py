"""What the front side takes of each request: in order and once, over epochs, whatever comes twice or is cut off."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.front.open_requests import OpenRequests, RequestStart
from runtime.messages import (
    Accepted,
    Detokenize,
    Detokenized,
    ErrorInfo,
    Finished,
    PromptInfo,
    Rejected,
    RequestMessage,
    Settled,
    Submit,
    TokenDelta,
    TokenInfo,
    Tokenize,
    Tokenized,
    Usage,
)

SETTLED = Settled(seed=2**64 - 1, prompt_tokens=4, max_tokens=9)
USAGE = Usage(4, 2, 6)
REFUSAL = ErrorInfo("invalid_request", "no")


def told(token_id: int) -> TokenInfo:
    return TokenInfo(token_id, f"t{token_id}", -0.5)


@dataclass(frozen=True)
class Script:
    """What a request's leader would say undisturbed: ids of each choice, and of how many prompt tokens it tells."""

    choices: tuple[tuple[int, ...], ...]
    prompt_tokens: int | None = None


@dataclass
class Heard:
    """What the reader of a request has."""

    accepted: int = 0
    prompt: list[TokenInfo] = field(default_factory=list)
    prompt_parts: int = 0
    ids: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)


class ScriptedLeader:
    """Says what a script has left for a request as it was submitted, in random pieces."""

    def __init__(self, start: Submit, script: Script, draw: st.DataObject) -> None:
        self.start = start
        self.script = script
        self.draw = draw

    def messages(self) -> Iterator[RequestMessage]:
        number, resume = self.start.request_id, self.start.resume
        yield Accepted(number, len(self.script.choices), SETTLED)
        told_tokens = 0 if resume is None else resume.prompt_tokens
        if self.script.prompt_tokens is not None:
            whole = [told(token) for token in range(self.script.prompt_tokens)]
            if not whole:
                yield PromptInfo(number, [])
            while told_tokens < len(whole):
                size = self.draw.draw(st.integers(1, 3))
                yield PromptInfo(number, whole[told_tokens : told_tokens + size], told_tokens)
                told_tokens += size
        at = {
            index: 0 if resume is None else len(resume.choices[index].token_ids)
            for index in range(len(self.script.choices))
            if resume is None or not resume.choices[index].is_finished
        }
        while at:
            index = self.draw.draw(st.sampled_from(sorted(at)))
            ids = self.script.choices[index]
            if at[index] == len(ids):
                yield Finished(number, index, "stop", USAGE)
                del at[index]
                continue
            size = self.draw.draw(st.integers(1, 3))
            piece = list(ids[at[index] : at[index] + size])
            yield TokenDelta(number, index, "".join(map(chr, piece)), piece, start=at[index])
            at[index] += len(piece)


ids = st.lists(st.integers(65, 90), max_size=8).map(tuple)
scripts = st.builds(
    Script, st.lists(ids, min_size=1, max_size=3).map(tuple), st.none() | st.integers(min_value=0, max_value=6)
)


@settings(deadline=None, max_examples=100)
@given(st.lists(scripts, min_size=1, max_size=4), st.data())
def test_requests_are_taken_in_order_and_once_over_all_epochs(plans: list[Script], data: st.DataObject) -> None:
    requests = OpenRequests()
    starts = [Submit(number, f'{{"n": {number}}}') for number in range(len(plans))]
    requests.add(starts)
    heard = {number: Heard() for number in range(len(plans))}
    aborted: set[int] = set()
    asked: dict[int, Submit] = {start.request_id: start for start in starts}
    for epoch in range(20):
        streams = {number: ScriptedLeader(start, plans[number], data).messages() for number, start in asked.items()}
        said: list[RequestMessage] = []
        left = data.draw(st.integers(0, 12)) if epoch < 19 else 10_000
        while streams and left:
            left -= 1
            action = data.draw(st.sampled_from(("say", "say", "say", "repeat", "abort")))
            if action == "abort" and data.draw(st.integers(0, 9)) == 0:
                number = data.draw(st.sampled_from(range(len(plans))))
                was_open = number not in aborted and len(heard[number].ends) < len(plans[number].choices)
                assert requests.abort([number]) == ([number] if was_open else [])
                aborted |= {number} if was_open else set()
            elif action == "repeat" and said:
                message = data.draw(st.sampled_from(said))
                assert requests.take(message) == [], "a message was taken twice"
            else:
                number = data.draw(st.sampled_from(sorted(streams)))
                saying = next(streams[number], None)
                if saying is None:
                    del streams[number]
                    continue
                said.append(saying)
                for news in requests.take(saying):
                    note(heard[number], news)
                # While some are tried one by one, others wait for it.
                due = requests.due()
                assert set(due.aborted) <= aborted
                for start in due.messages:
                    assert isinstance(start, Submit)
                    check_resume(start, heard[start.request_id])
                    streams[start.request_id] = ScriptedLeader(start, plans[start.request_id], data).messages()
        again = requests.resubmission()
        assert set(again.aborted) <= aborted
        assert all(isinstance(one, Submit) for one in again.messages)
        asked = {one.request_id: one for one in again.messages if isinstance(one, Submit)}
        # What ranks never answered, time and again, is taken to be what ends them.
        aborted |= {one.request_id for one in again.ended}
        assert not aborted & set(asked)
        for number, start in asked.items():
            check_resume(start, heard[number])
    assert not asked
    assert len(requests) == 0
    for number, plan in enumerate(plans):
        if number not in aborted:
            one = heard[number]
            assert one.accepted == 1
            assert sorted(one.ends) == list(range(len(plan.choices)))
            assert [tuple(one.ids.get(index, ())) for index in range(len(plan.choices))] == list(plan.choices)
            assert all(one.text[index] == "".join(map(chr, one.ids[index])) for index in one.ids)
            assert one.prompt == [told(token) for token in range(plan.prompt_tokens or 0)]
            assert one.prompt_parts >= (plan.prompt_tokens is not None)


def note(heard: Heard, news: RequestMessage) -> None:
    match news:
        case Accepted():
            heard.accepted += 1
        case PromptInfo():
            assert news.start == len(heard.prompt)
            heard.prompt += news.tokens
            heard.prompt_parts += 1
        case TokenDelta():
            assert news.index not in heard.ends
            heard.ids.setdefault(news.index, []).extend(news.token_ids)
            heard.text[news.index] = heard.text.get(news.index, "") + news.text
        case Finished():
            assert news.index not in heard.ends
            heard.ends.append(news.index)
        case _:
            raise AssertionError(news)


def check_resume(start: Submit, heard: Heard) -> None:
    """A request goes on exactly behind what its reader has."""
    if not heard.accepted:
        assert start.resume is None
        return
    assert start.resume is not None
    assert start.resume.settled == SETTLED
    assert start.resume.prompt_tokens == len(heard.prompt)
    for index, choice in enumerate(start.resume.choices):
        assert choice.token_ids == heard.ids.get(index, [])
        assert choice.is_finished == (index in heard.ends)


def test_questions_and_refusals_end_with_their_answer() -> None:
    requests = OpenRequests()
    questions: list[RequestStart] = [
        Tokenize(1, "{}"),
        Detokenize(2, "{}"),
        Submit(3, "{}"),
        Submit(4, "{}", score=True),
    ]
    requests.add(questions)
    assert requests.resubmission() == (questions, [], [])
    answers: list[RequestMessage] = [Tokenized(1, [5], ["x"]), Detokenized(2, "x"), Rejected(3, REFUSAL)]
    for answer in answers:
        assert requests.take(answer) == [answer]
        assert requests.take(answer) == []
    assert requests.resubmission() == ([Submit(4, "{}", score=True)], [], [])


def test_a_refusal_of_a_request_that_was_accepted_ends_its_open_choices() -> None:
    requests = OpenRequests()
    requests.add([Submit(1, "{}")])
    for message in (Accepted(1, 3, SETTLED), TokenDelta(1, 0, "ab", [1, 2]), Finished(1, 1, "stop", USAGE)):
        assert requests.take(message) == [message]
    assert requests.take(Rejected(1, REFUSAL)) == [
        Finished(1, 0, "error", Usage(4, 2, 6), REFUSAL),
        Finished(1, 2, "error", Usage(4, 0, 4), REFUSAL),
    ]
    assert len(requests) == 0


@pytest.mark.parametrize(
    ("message", "what"),
    [
        (TokenDelta(1, 0, "c", [3], start=3), "tokens 3 to 4 of choice 0 after 2 of them"),
        (TokenDelta(1, 0, "bc", [2, 3], start=1), "tokens 1 to 3 of choice 0 after 2 of them"),
        (TokenDelta(1, 2, "c", [3]), "choice 2 of 2"),
        (Finished(1, 2, "stop", USAGE), "the end of choice 2 of 2"),
        (PromptInfo(1, [told(1)], start=1), "prompt token 2 after 0"),
    ],
)
def test_a_gap_ends_the_request_and_is_said(message: RequestMessage, what: str) -> None:
    requests = OpenRequests()
    requests.add([Submit(1, "{}"), Submit(2, "{}")])
    for before in (Accepted(1, 2, SETTLED), TokenDelta(1, 0, "ab", [1, 2]), Accepted(2, 1, SETTLED)):
        requests.take(before)
    ends = requests.take(message)
    assert [(one.index, one.finish_reason) for one in ends if isinstance(one, Finished)] == [(0, "error"), (1, "error")]
    assert all(isinstance(one, Finished) and one.error and what in one.error.message for one in ends)
    assert [one.request_id for one in requests.resubmission().messages] == [2], "the others are not touched"


def test_tokens_before_their_request_was_accepted_refuse_it() -> None:
    requests = OpenRequests()
    requests.add([Submit(1, "{}")])
    (refused,) = requests.take(TokenDelta(1, 0, "a", [1]))
    assert isinstance(refused, Rejected)
    assert refused.error.code == "internal_error"
    assert len(requests) == 0


def test_an_abort_is_passed_on_once_and_outlives_no_epoch() -> None:
    requests = OpenRequests()
    requests.add([Submit(1, "{}"), Submit(2, "{}")])
    requests.take(Accepted(1, 1, SETTLED))
    assert requests.abort([1, 7]) == [1]
    assert requests.abort([1]) == []
    late = TokenDelta(1, 0, "a", [1])
    assert requests.take(late) == [late], "until its end its messages count"
    assert requests.resubmission() == ([Submit(2, "{}")], [1], [])
    assert requests.take(Finished(1, 0, "abort", USAGE)) == []
