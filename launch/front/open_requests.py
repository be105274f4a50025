"""What was taken of every request under way, so that new ranks can go on where those that are gone left it.

Tokens are taken in order and once, whatever comes twice. It knows no socket and no clock.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from runtime.messages import (
    Accepted,
    ChoiceProgress,
    Detokenize,
    Detokenized,
    ErrorInfo,
    Finished,
    PromptInfo,
    Rejected,
    RequestMessage,
    Resume,
    Settled,
    Submit,
    TokenDelta,
    Tokenize,
    Tokenized,
    Usage,
)

RequestStart = Submit | Tokenize | Detokenize
_LOG = logging.getLogger(__name__)


class Resubmission(NamedTuple):
    """What new ranks are asked, and who asks for nothing any more.

    Attributes:
        messages: One for each request under way, in the order in which they came.
        aborted: The requests whose abort nobody answered: they are not under way any more.
    """

    messages: list[RequestStart]
    aborted: list[int]


@dataclass(slots=True)
class _Choice:
    token_ids: list[int] = field(default_factory=list)
    is_finished: bool = False


@dataclass(slots=True)
class _Open:
    start: RequestStart
    settled: Settled | None = None
    choices: list[_Choice] = field(default_factory=list)
    prompt_tokens: int = 0
    is_prompt_told: bool = False
    is_aborted: bool = False


class OpenRequests:
    """The requests under way, and how far each came."""

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, starts: Sequence[RequestStart]) -> None:
        """Takes in requests that are being sent for the first time."""
        self._open |= {start.request_id: _Open(start) for start in starts}

    def abort(self, request_ids: Sequence[int]) -> list[int]:
        """Notes that requests are to end; returns those that are under way. Nobody resumes them."""
        known = [one for one in request_ids if one in self._open and not self._open[one].is_aborted]
        for request_id in known:
            self._open[request_id].is_aborted = True
        return known

    def resubmission(self) -> Resubmission:
        """Returns what to ask of new ranks."""
        aborted = [request_id for request_id, request in self._open.items() if request.is_aborted]
        for request_id in aborted:
            del self._open[request_id]
        return Resubmission([_resumed(request) for request in self._open.values()], aborted)

    def take(self, message: RequestMessage) -> list[RequestMessage]:
        """Returns what is new in a message: itself, a part of it, or nothing.

        A message that does not follow what came before ends its request with an error, and so does the refusal of a
        request that was accepted before.
        """
        request = self._open.get(message.request_id)
        if request is None:
            return []
        match message:
            case Accepted():
                news = self._accepted(request, message)
            case PromptInfo():
                news = self._prompt(request, message)
            case TokenDelta():
                news = self._delta(request, message)
            case Finished():
                news = self._finished(request, message)
            case Rejected() | Tokenized() | Detokenized():
                news = self._answered(request, message)
        return news

    def _accepted(self, request: _Open, message: Accepted) -> list[RequestMessage]:
        if request.settled is not None:
            return []
        request.settled = message.settled
        request.choices = [_Choice() for _ in range(message.choices)]
        return [message]

    def _answered(self, request: _Open, message: Rejected | Tokenized | Detokenized) -> list[RequestMessage]:
        if isinstance(message, Rejected) and request.settled is not None:
            return self._failed(message.request_id, request, message.error)
        del self._open[message.request_id]
        return [message]

    def _prompt(self, request: _Open, message: PromptInfo) -> list[RequestMessage]:
        told = request.prompt_tokens
        if message.start > told:
            return self._out_of_order(request, f"prompt token {message.start + 1} after {told}")
        fresh = message.tokens[told - message.start :]
        if not fresh and request.is_prompt_told:
            return []
        request.is_prompt_told = True
        request.prompt_tokens += len(fresh)
        return [msgspec.structs.replace(message, tokens=fresh, start=told)]

    def _delta(self, request: _Open, message: TokenDelta) -> list[RequestMessage]:
        if message.index >= len(request.choices):
            return self._out_of_order(request, f"choice {message.index} of {len(request.choices)}")
        choice = request.choices[message.index]
        have, end = len(choice.token_ids), message.start + len(message.token_ids)
        if choice.is_finished or (message.start < have and end <= have):
            return []
        if message.start != have:
            return self._out_of_order(
                request, f"tokens {message.start} to {end} of choice {message.index} after {have} of them"
            )
        choice.token_ids += message.token_ids
        return [message]

    def _finished(self, request: _Open, message: Finished) -> list[RequestMessage]:
        if message.index >= len(request.choices):
            return self._out_of_order(request, f"the end of choice {message.index} of {len(request.choices)}")
        choice = request.choices[message.index]
        if choice.is_finished:
            return []
        choice.is_finished = True
        if all(one.is_finished for one in request.choices):
            del self._open[message.request_id]
        return [message]

    def _out_of_order(self, request: _Open, what: str) -> list[RequestMessage]:
        request_id = request.start.request_id
        _LOG.error("request %d: the leader told of %s", request_id, what)
        error = ErrorInfo("internal_error", f"the leader told of {what}")
        if request.settled is None:
            del self._open[request_id]
            return [Rejected(request_id, error)]
        return self._failed(request_id, request, error)

    def _failed(self, request_id: int, request: _Open, error: ErrorInfo) -> list[RequestMessage]:
        """Ends the open choices of a request that was accepted."""
        del self._open[request_id]
        prompt = 0 if request.settled is None else request.settled.prompt_tokens
        return [
            Finished(
                request_id,
                index,
                "error",
                Usage(prompt, len(choice.token_ids), prompt + len(choice.token_ids)),
                error,
            )
            for index, choice in enumerate(request.choices)
            if not choice.is_finished
        ]


def _resumed(request: _Open) -> RequestStart:
    if not isinstance(request.start, Submit) or request.settled is None:
        return request.start
    choices = [ChoiceProgress(list(choice.token_ids), choice.is_finished) for choice in request.choices]
    return msgspec.structs.replace(request.start, resume=Resume(request.settled, choices, request.prompt_tokens))
