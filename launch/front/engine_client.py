"""The engine as an asynchronous service: requests in, their messages out, each request by itself.

One event loop owns it. It serves the HTTP process and ``Engine``; a reader that does not keep up loses its request,
never the engine's time.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

from launch.front.engine_errors import (
    EngineClosedError,
    RequestFailedError,
    RequestRefusedError,
    SlowReaderError,
    json_fields,
)
from launch.front.engine_link import EngineLink
from launch.front.engine_process import EngineProcess
from launch.front.metrics import EngineMetrics
from launch.front.open_requests import RequestStart
from launch.node.rank_fault import FaultReport
from launch.node.rank_processes import RanksFailedError
from runtime.client_socket import ClientSocketError
from runtime.engine_statistics import EngineStatistics
from runtime.messages import (
    Accepted,
    Detokenize,
    Detokenized,
    EngineReady,
    Finished,
    Rejected,
    RequestMessage,
    Submit,
    TokenDelta,
    Tokenize,
    Tokenized,
)

_WATCH_S = 0.2
Answer = TypeVar("Answer", Tokenized, Detokenized)


class Submission:
    """Requests that were submitted together, and their messages as they come.

    Iterating yields (position, message), position being the request's place among those submitted. It ends when every
    request was refused or all its choices finished.

    Args:
        client: Where they were submitted.
        request_ids: Theirs, in order.
        limit: How many messages may wait to be taken; None = any number.
    """

    def __init__(self, client: EngineClient, request_ids: Sequence[int], limit: int | None) -> None:
        self.request_ids = tuple(request_ids)
        self.failure: Exception | None = None
        self._client = client
        self._limit = limit
        self._waiting: deque[tuple[int, RequestMessage]] = deque()
        self._changed = asyncio.Event()
        self._open_choices: dict[int, int | None] = dict.fromkeys(range(len(self.request_ids)))
        self._failed = asyncio.Event()

    @property
    def is_done(self) -> bool:
        """Whether nothing more will come from the engine."""
        return not self._open_choices or self.failure is not None

    def put(self, position: int, message: RequestMessage) -> None:
        """Takes a message of the request at ``position``; the client calls it."""
        if self._limit is not None and len(self._waiting) >= self._limit:
            self.fail(SlowReaderError(f"{self._limit} messages wait to be read: the reader is too slow"))
            return
        self._waiting.append((position, message))
        match message:
            case Accepted():
                self._open_choices[position] = message.choices
            case Finished():
                left = (self._open_choices.get(position) or 0) - 1
                self._open_choices[position] = left
                if left <= 0:
                    self._close(position)
            case Rejected() | Tokenized() | Detokenized():
                self._close(position)
            case _:
                pass
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """Ends it: readers get ``error`` in place of what they have not taken, the engine stops generating."""
        if self.is_done:
            return
        self.failure = error
        self._waiting.clear()
        self.abort()
        self._changed.set()
        self._failed.set()

    def abort(self) -> None:
        """Has the engine end what has not ended; no more messages come. Done twice it does nothing."""
        open_ids = [self.request_ids[position] for position in self._open_choices]
        self._open_choices.clear()
        self._client.forget(open_ids, abort=True)

    async def wait_for_failure(self) -> None:
        """Returns when it failed; never when it ends otherwise."""
        await self._failed.wait()

    async def wait_for_output(self) -> None:
        """Returns when every request was accepted and the first output, or the end, is there to be taken.

        Raises:
            RequestRefusedError: A request was refused; the others are aborted.
            RequestFailedError: A choice ended with an error, and nothing came before.
            EngineClosedError, RanksFailedError, SlowReaderError: The engine, or this submission, failed.
        """
        while True:
            if self.failure is not None:
                raise self.failure
            accepted = {position for position, message in self._waiting if isinstance(message, Accepted)}
            for position, message in self._waiting:
                if isinstance(message, Rejected):
                    self.abort()
                    raise RequestRefusedError(message.error, position)
                if isinstance(message, TokenDelta | Finished) and len(accepted) == len(self.request_ids):
                    if isinstance(message, Finished) and message.error is not None:
                        self.abort()
                        raise RequestFailedError(message.error)
                    return
            self._changed.clear()
            await self._changed.wait()

    def __aiter__(self) -> Self:
        """Returns itself."""
        return self

    async def __anext__(self) -> tuple[int, RequestMessage]:
        """Returns the next message."""
        while not self._waiting:
            if self.failure is not None:
                raise self.failure
            if self.is_done:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._waiting.popleft()

    def _close(self, position: int) -> None:
        self._open_choices.pop(position, None)
        self._client.forget([self.request_ids[position]], abort=False)


class EngineClient:
    """Submits requests to an engine that is ready, and hands each its messages.

    It is used within one running event loop, as ``async with``; leaving ends all requests, not the engine.

    Args:
        engine: The engine; its socket is the client's alone.
        ready: What its leader said.
        tell: Takes a line that says how ranks were recovered.
        metrics: Told of all that is sent and heard; None when nobody counts.
    """

    def __init__(
        self,
        engine: EngineProcess,
        ready: EngineReady,
        tell: Callable[[str], None],
        metrics: EngineMetrics | None = None,
    ) -> None:
        self.failure: RanksFailedError | None = None
        self.statistics: EngineStatistics | None = None
        self._counted_s = time.monotonic()
        self._engine = engine
        self._link = EngineLink(engine, ready, tell, metrics)
        self._metrics = metrics
        self._ids = itertools.count(1)
        self._open: dict[int, tuple[Submission, int]] = {}
        self._closing: EngineClosedError | None = None
        self._failed = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None

    @property
    def ready(self) -> EngineReady:
        """What the newest leader said."""
        return self._link.ready

    @property
    def is_recovering(self) -> bool:
        """Whether ranks are gone and others are to come: requests wait."""
        return self._link.is_recovering and self.failure is None

    @property
    def faults(self) -> Sequence[FaultReport]:
        """The reports on the latest faults of ranks, the newest last."""
        return self._link.faults

    @property
    def open_requests(self) -> int:
        """How many requests are under way."""
        return len(self._open)

    @property
    def statistics_age_s(self) -> float:
        """How long ago the leader told its statistics, or this client began to listen."""
        return time.monotonic() - self._counted_s

    @property
    def silent_s(self) -> float:
        """How long ago the rank that was silent longest said where it is, or began the step that it is in.

        Ranks say so about once a second, and the leader passes it on as long as it steps.
        """
        if self.statistics is None:
            return self.statistics_age_s
        ages = [max(one.heard_age_s, one.state.step_age_s) for one in self.statistics.ranks]
        return self.statistics_age_s + max(ages, default=0.0)

    async def __aenter__(self) -> Self:
        """Starts listening."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._engine.socket.descriptor, self._receive)
        self._watch = loop.create_task(self._watch_ranks())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends all requests and stops listening."""
        self.refuse_all("the engine was closed")
        asyncio.get_running_loop().remove_reader(self._engine.socket.descriptor)
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch

    def refuse_all(self, why: str) -> None:
        """Ends all requests and takes no more."""
        self._closing = self._closing or EngineClosedError(why)
        self._fail_open(self._closing)

    async def wait_for_failure(self) -> RanksFailedError:
        """Returns why the ranks failed, once they do."""
        await self._failed.wait()
        return self.failure or RanksFailedError("the ranks failed", 1)

    def submit(self, bodies: Sequence[str], *, score: bool = False, buffered: int | None = None) -> Submission:
        """Submits requests.

        Args:
            bodies: Each a JSON object as text, as a line of JSONL input.
            score: Whether to generate nothing and report the logprobs of the given tokens.
            buffered: How many messages may wait to be taken before the requests are ended; None = any number.

        Raises:
            EngineClosedError, RanksFailedError: The engine takes no requests.
        """
        ids = [next(self._ids) for _ in bodies]
        submits = [Submit(one, body, score) for one, body in zip(ids, bodies, strict=True)]
        return self._start(ids, submits, buffered)

    async def tokenize(self, fields: Mapping[str, Any]) -> Tokenized:
        """Returns the ids of a prompt; ``fields`` as in ``Tokenize``.

        Raises:
            RequestRefusedError: A field is wrong.
        """
        return await self._ask(Tokenize(next(self._ids), json_fields(fields)), Tokenized)

    async def detokenize(self, fields: Mapping[str, Any]) -> Detokenized:
        """Returns the text of ids; ``fields`` as in ``Detokenize``.

        Raises:
            RequestRefusedError: A field is wrong.
        """
        return await self._ask(Detokenize(next(self._ids), json_fields(fields)), Detokenized)

    def forget(self, request_ids: Sequence[int], *, abort: bool) -> None:
        """Drops requests that are under way; later messages of theirs are ignored.

        Args:
            request_ids: Theirs; those that are not under way do not count.
            abort: Whether the engine is told to end them.
        """
        known = [one for one in request_ids if self._open.pop(one, None) is not None]
        if abort and self.failure is None:
            self._link.abort(known)
            self._look_again()

    async def _ask(self, question: Tokenize | Detokenize, wanted: type[Answer]) -> Answer:
        _, answer = await anext(self._start([question.request_id], [question], None))
        if isinstance(answer, Rejected):
            raise RequestRefusedError(answer.error)
        if not isinstance(answer, wanted):
            raise ClientSocketError(f"the leader answered {type(answer).__name__}: {wanted.__name__} was asked for")
        return answer

    def _start(self, request_ids: Sequence[int], messages: Sequence[RequestStart], buffered: int | None) -> Submission:
        if self._closing is not None:
            raise self._closing
        if self.failure is not None:
            raise self.failure
        self._link.submit(messages)
        self._look_again()
        submission = Submission(self, request_ids, buffered)
        self._open |= {one: (submission, position) for position, one in enumerate(request_ids)}
        return submission

    def _look_again(self) -> None:
        """Listens soon: the descriptor may have told, before something was sent, of messages that came."""
        asyncio.get_running_loop().call_soon(self._receive)

    def _receive(self) -> None:
        for message in self._link.receive(0):
            if isinstance(message, EngineReady | EngineStatistics):
                # Of new ranks nothing is known yet.
                self.statistics = message if isinstance(message, EngineStatistics) else None
                self._counted_s = time.monotonic()
                continue
            found = self._open.get(message.request_id)
            if found is not None:
                submission, position = found
                submission.put(position, message)

    async def _watch_ranks(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_S)
            self._receive()
            try:
                self._link.check()
            except RanksFailedError as error:
                self.failure = error
                if self._metrics is not None:
                    self._metrics.lost()
                self._fail_open(error)
                self._failed.set()
                return

    def _fail_open(self, error: Exception) -> None:
        for submission in {id(one): one for one, _ in self._open.values()}.values():
            submission.fail(error)
