"""From a submission to a response: whole, or as a stream of server-sent events; a client that leaves ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from launch.front.engine_client import Submission
from launch.front.engine_output import RequestOutput, gathered, raise_failure
from launch.serve.errors import ENGINE_ERRORS, http_error
from runtime.messages import RequestMessage

Result = TypeVar("Result")
CLIENT_LEFT = 499
"""The status that nobody reads any more."""
_LAST_WORD_S = 1.0


class Assembler(Protocol):
    """What makes the replies of one request, in the form of its endpoint."""

    def whole(self, outputs: Sequence[RequestOutput]) -> msgspec.Struct:
        """Returns the reply, all outputs being done."""

    def chunks(self, position: int, message: RequestMessage, /) -> Iterable[msgspec.Struct]:
        """Returns the events of a message of the prompt at ``position``."""

    def last_chunks(self) -> Iterable[msgspec.Struct]:
        """Returns the events after the last message."""


def json_response(reply: msgspec.Struct, status: int = 200) -> Response:
    """Returns a reply as JSON."""
    return Response(msgspec.json.encode(reply), status, media_type="application/json")


async def whole_response(
    request: Request, submission: Submission, assembler: Assembler, param_names: Mapping[str, str]
) -> Response:
    """Returns the whole reply, once it is there.

    Raises:
        HttpError: A prompt was refused or failed, or the engine did.
    """
    outputs = await unless_client_leaves(request, gathered(submission), param_names)
    return Response(status_code=CLIENT_LEFT) if outputs is None else json_response(assembler.whole(outputs))


async def stream_response(
    request: Request, submission: Submission, assembler: Assembler, param_names: Mapping[str, str]
) -> Response:
    """Returns the reply as a stream, once its first token is there; what fails until then has a status of its own.

    Raises:
        HttpError: A prompt was refused or failed, or the engine did.
    """
    started = await unless_client_leaves(request, _started(submission), param_names)
    if started is None:
        submission.abort()
        return Response(status_code=CLIENT_LEFT)
    return EventStream(submission, _events(submission, assembler, param_names))


class EventStream(Response):
    """A stream of server-sent events that ends with its submission, its client, or a client too slow to read it.

    Args:
        submission: What is streamed.
        events: The events, encoded.
    """

    media_type = "text/event-stream"

    def __init__(self, submission: Submission, events: AsyncIterator[bytes]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._submission = submission
        self._events = events

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events; returns early when the client left or does not read."""
        writing = asyncio.ensure_future(self._write(send))
        others = [
            asyncio.ensure_future(_client_left(receive)),
            asyncio.ensure_future(self._submission.wait_for_failure()),
        ]
        try:
            await asyncio.wait([writing, *others], return_when=asyncio.FIRST_COMPLETED)
            if not writing.done() and others[1].done():
                # The writer may be at the point of telling the client so; one that cannot write is given up.
                await asyncio.wait([writing], timeout=_LAST_WORD_S)
            if writing.done():
                writing.result()
        finally:
            self._submission.abort()
            for task in (writing, *others):
                task.cancel()
            await asyncio.gather(writing, *others, return_exceptions=True)

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _events(submission: Submission, assembler: Assembler, param_names: Mapping[str, str]) -> AsyncIterator[bytes]:
    try:
        async for position, message in submission:
            raise_failure(message)
            for chunk in assembler.chunks(position, message):
                yield _event(chunk)
        for chunk in assembler.last_chunks():
            yield _event(chunk)
        yield b"data: [DONE]\n\n"
    except ENGINE_ERRORS as error:
        yield _event(http_error(error, param_names).reply)


def _event(chunk: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


async def _started(submission: Submission) -> bool:
    await submission.wait_for_output()
    return True


async def unless_client_leaves(
    request: Request, work: Coroutine[None, None, Result], param_names: Mapping[str, str]
) -> Result | None:
    """Returns what ``work`` does, or None when the client left before.

    Raises:
        HttpError: A prompt was refused or failed, or the engine did.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_client_left(request.receive))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    except ENGINE_ERRORS as error:
        raise http_error(error, param_names) from error
    finally:
        for task in (working, leaving):
            task.cancel()
        with suppress(asyncio.CancelledError):
            await leaving
        await asyncio.gather(working, return_exceptions=True)


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
