"""What was taken of every request under way, so that new ranks can go on where those that are gone left it.

Tokens are taken in order and once, whatever comes twice. Requests that may be what ends ranks are tried one by one
(``launch.front.quarantine``). It knows no socket and no clock.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from launch.front.quarantine import SHARED_FAULTS, Quarantine
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
_PASSED_TOKENS = 8
"""How many tokens beyond what was taken of it a request must come to pass: what ranks had beyond that is fewer."""

_BLAMED_KEPT = 256
_NAMES = frozenset({"id", "user", "metadata"})


class Due(NamedTuple):
    """What the ranks are to be asked now, and who asks for nothing any more.

    Attributes:
        messages: One for each request, in the order in which they came.
        aborted: Requests whose abort nobody will answer: they are not under way any more.
    """

    messages: list[RequestStart]
    aborted: list[int]


class Resubmission(NamedTuple):
    """What new ranks are asked, who asks for nothing any more, and who is not to ask again.

    Attributes:
        messages: One for each request that may go on now, in the order in which they came.
        aborted: Requests whose abort nobody answered: they are not under way any more.
        ended: How requests end that are to blame for the loss of the ranks.
    """

    messages: list[RequestStart]
    aborted: list[int]
    ended: list[RequestMessage]


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
    tokens_before: list[int] = field(default_factory=list)
    """Of each choice, as it was last sent."""


class OpenRequests:
    """The requests under way, and how far each came."""

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        self._unsent: dict[int, None] = {}
        self._quarantine = Quarantine()
        self._blamed: deque[bytes] = deque(maxlen=_BLAMED_KEPT)

    def __len__(self) -> int:
        return len(self._open)

    @property
    def suspects(self) -> int:
        """How many requests may be what ended ranks, and are tried one by one."""
        return self._quarantine.suspects

    def add(self, starts: Sequence[RequestStart]) -> list[RequestMessage]:
        """Takes in requests; returns the answers to those that ended ranks before, which no rank is to see again."""
        refused = [start for start in starts if self._blamed and _digest(start) in self._blamed]
        known = {start.request_id for start in refused}
        fresh = [start for start in starts if start.request_id not in known]
        self._open |= {start.request_id: _Open(start) for start in fresh}
        self._unsent |= dict.fromkeys(start.request_id for start in fresh)
        message = "a request with the same content was ended before: ranks failed again and again while it ran"
        return [Rejected(start.request_id, ErrorInfo("quarantined", message)) for start in refused]

    def abort(self, request_ids: Sequence[int]) -> list[int]:
        """Notes that requests are to end; returns those that are under way. Nobody resumes them."""
        known = [one for one in request_ids if one in self._open and not self._open[one].is_aborted]
        for request_id in known:
            self._open[request_id].is_aborted = True
        return known

    def due(self) -> Due:
        """Returns what to ask of the ranks now: they are there, and hear it."""
        if not self._unsent:
            return Due([], [])
        aborted = [request_id for request_id in self._unsent if self._open[request_id].is_aborted]
        for request_id in aborted:
            self._drop(request_id)
        admitted = self._quarantine.admitted(self._unsent)
        for request_id in admitted:
            del self._unsent[request_id]
        return Due([_resumed(self._open[request_id]) for request_id in admitted], aborted)

    def resubmission(self, at_work: Collection[int] = (), cause: str = "") -> Resubmission:
        """Returns what to ask of new ranks.

        Args:
            at_work: The requests that those before them worked at when they were lost.
            cause: Why they were lost, for the request that is to blame.
        """
        sent = [request_id for request_id in self._open if request_id not in self._unsent]
        aborted = [request_id for request_id in sent if self._open[request_id].is_aborted]
        blamed = self._quarantine.fault([one for one in sent if one in at_work])
        for request_id in aborted:
            self._drop(request_id)
        ended = [] if blamed is None or blamed not in self._open else list(self._end_blamed(blamed, cause))
        for request in self._open.values():
            request.tokens_before = [len(choice.token_ids) for choice in request.choices]
        self._unsent = dict.fromkeys(self._open)
        due = self.due()
        return Resubmission(due.messages, aborted + due.aborted, ended)

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
        if message.request_id == self._quarantine.trial and _has_passed(request):
            self._quarantine.passed()
        return news

    def _drop(self, request_id: int) -> None:
        """Forgets a request: it is not under way any more."""
        del self._open[request_id]
        self._unsent.pop(request_id, None)
        self._quarantine.forget(request_id)

    def _end_blamed(self, blamed: int, cause: str) -> Iterator[RequestMessage]:
        """Yields the ends of a request that is to blame, and of all that ask for the same."""
        digest = _digest(self._open[blamed].start)
        self._blamed.append(digest)
        error = ErrorInfo(
            "quarantined",
            f"ranks failed more than {SHARED_FAULTS} times while this request ran, the last time while it ran by "
            f"itself: {cause}",
        )
        for request_id in [one for one, request in self._open.items() if _digest(request.start) == digest]:
            request = self._open[request_id]
            yield from self._refused(request, error)

    def _accepted(self, request: _Open, message: Accepted) -> list[RequestMessage]:
        if request.settled is not None:
            return []
        request.settled = message.settled
        request.choices = [_Choice() for _ in range(message.choices)]
        return [message]

    def _answered(self, request: _Open, message: Rejected | Tokenized | Detokenized) -> list[RequestMessage]:
        if isinstance(message, Rejected) and request.settled is not None:
            return self._failed(message.request_id, request, message.error)
        self._drop(message.request_id)
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
            self._drop(message.request_id)
        return [message]

    def _out_of_order(self, request: _Open, what: str) -> list[RequestMessage]:
        request_id = request.start.request_id
        _LOG.error("request %d: the leader told of %s", request_id, what)
        return self._refused(request, ErrorInfo("internal_error", f"the leader told of {what}"))

    def _refused(self, request: _Open, error: ErrorInfo) -> list[RequestMessage]:
        """Ends a request, whether it was accepted or not."""
        request_id = request.start.request_id
        if request.settled is None:
            self._drop(request_id)
            return [Rejected(request_id, error)]
        return self._failed(request_id, request, error)

    def _failed(self, request_id: int, request: _Open, error: ErrorInfo) -> list[RequestMessage]:
        """Ends the open choices of a request that was accepted."""
        self._drop(request_id)
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


def _has_passed(request: _Open) -> bool:
    """Returns whether every choice is well beyond where it was when the request was sent to these ranks."""
    before = [*request.tokens_before, *[0] * len(request.choices)]
    return bool(request.choices) and all(
        choice.is_finished or len(choice.token_ids) >= start + _PASSED_TOKENS
        for choice, start in zip(request.choices, before, strict=False)
    )


def _digest(start: RequestStart) -> bytes:
    """Returns a digest of what a request asks for, whatever its sender calls it."""
    fields: object = start.body
    with suppress(ValueError, RecursionError):
        fields = json.loads(start.body)
    if isinstance(fields, dict):
        fields = {name: value for name, value in fields.items() if name not in _NAMES}
    score = isinstance(start, Submit) and start.score
    return hashlib.blake2b(json.dumps([type(start).__name__, score, fields], sort_keys=True).encode()).digest()
