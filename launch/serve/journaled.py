"""Requests that outlive the server: with an ``Idempotency-Key``, what is asked and answered is in a journal.

The server works for such a request whether its client waits or not, and goes on with it when it is started again. Who
sends the same key gets the same answer, once there is one.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from grammar_sync.json_text import parse_json
from launch.front.engine_process import print_line
from launch.serve.errors import ENGINE_ERRORS, HttpError, http_error
from launch.serve.fields import read_body
from launch.serve.generation import CLIENT_LEFT, unless_client_leaves
from launch.serve.journal import Answered, Asked, Dropped, Journal

Answer = Callable[[Request], Awaitable[Response]]
Result = TypeVar("Result")
_KEY: Final = "idempotency-key"
MAX_KEY: Final = 255
_FINAL: Final = frozenset({200, 400, 404, 422})
"""What would be the same if it were asked again."""

_GOES_ON: Final = frozenset({"closing", "engine_failed"})
"""Why a server leaves a request to the next one."""

_TRY_AGAIN_S: Final = 0.5


@dataclass(frozen=True)
class _Job:
    """A request that is worked at, for however many clients wait."""

    digest: bytes
    task: asyncio.Task[Response]


class JournaledAnswers:
    """Answers that are kept. Used within one event loop, as ``async with``; leaving ends what is under way.

    Args:
        journal: Where; used by one thread of this object alone, and closed by it.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._answers: dict[str, Answer] = {}
        self._jobs: dict[bytes, _Job] = {}

    def wrap(self, path: str, answer: Answer) -> Answer:
        """Returns what answers requests to ``path``: ``answer``, and the journal for those that have a key."""
        self._answers[path] = answer

        async def journaled(request: Request) -> Response:
            key = request.headers.get(_KEY)
            return await answer(request) if key is None else await self._answer(path, key, request)

        return journaled

    async def __aenter__(self) -> Self:
        """Goes on with what the journal has no answer to."""
        unfinished = [asked for asked in await self._do(self._journal.unfinished) if asked.path in self._answers]
        for asked in unfinished:
            self._begin(asked, is_known=True)
        if unfinished:
            print_line(f"the journal has {len(unfinished)} requests without an answer: they go on")
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ends what is under way: the next server goes on with it."""
        tasks = [job.task for job in self._jobs.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._thread.shutdown()
        self._journal.close()

    async def _answer(self, path: str, key: str, request: Request) -> Response:
        """Answers a request with a key.

        Raises:
            HttpError: It is wrong, failed, or is another one than the key's.
        """
        if not (0 < len(key) <= MAX_KEY and key.isascii() and key.isprintable()):
            raise HttpError(400, f"Idempotency-Key: 1 to {MAX_KEY} printable ASCII characters are needed", param=_KEY)
        body = await read_body(request)
        fields = _fields(body)
        if isinstance(fields, dict) and fields.get("stream"):
            raise HttpError(400, "a request with an Idempotency-Key is answered as a whole: no stream", param="stream")
        # Nobody gets an answer by guessing the key of somebody who has another API key.
        owner = request.headers.get("authorization", "")
        request_id, digest = _digest(owner, key), _digest(path, body)
        job = self._jobs.get(request_id)
        if job is None:
            job = self._begin(Asked(request_id, path, _seeded(path, fields, body), digest), is_known=False)
        elif job.digest != digest:
            raise _other_request()
        reply = await unless_client_leaves(request, _waited(job.task), {})
        return Response(status_code=CLIENT_LEFT) if reply is None else reply

    def _begin(self, asked: Asked, *, is_known: bool) -> _Job:
        job = _Job(asked.digest, asyncio.create_task(self._work(asked, is_known=is_known)))
        self._jobs[asked.id] = job

        def forget(task: asyncio.Task[Response]) -> None:
            del self._jobs[asked.id]
            if not task.cancelled():
                # Its client may have left.
                task.exception()

        job.task.add_done_callback(forget)
        return job

    async def _work(self, asked: Asked, *, is_known: bool) -> Response:
        """Returns the reply to a request: the journal's, or else one that is kept from now on.

        Raises:
            HttpError: The key was another request's, or the journal cannot be written.
        """
        known = None if is_known else await self._do(self._journal.digest_of, asked.id)
        if known is not None:
            if known != asked.digest:
                raise _other_request()
            answered = await self._do(self._journal.answer_to, asked.id)
            if answered is not None:
                return _response(answered, {"Idempotent-Replayed": "true"})
            asked = await self._do(self._journal.asked, asked.id)
        elif not is_known:
            try:
                await self._do(self._journal.write, asked)
            except OSError as error:
                message = f"the journal cannot be written, so the request is not taken: {error.strerror}"
                raise HttpError(507, message, code="journal_failed") from error
        status, body, refusal = await self._reply(asked, is_patient=is_known)
        answered = Answered(asked.id, status, body, time.time())
        try:
            if status in _FINAL:
                await self._do(self._journal.write, answered)
            elif refusal is None or refusal.reply.error.code not in _GOES_ON:
                await self._do(self._journal.write, Dropped(asked.id))
        except OSError as error:
            print_line(f"the journal cannot be written, an answer is not kept: {error.strerror}")
        return _response(answered, {} if refusal is None else refusal.headers)

    async def _reply(self, asked: Asked, *, is_patient: bool) -> tuple[int, bytes, HttpError | None]:
        """Returns status and body of the reply to a request, and the error if it is one."""
        while True:
            try:
                response = await self._answers[asked.path](_request(asked))
                return response.status_code, bytes(response.body), None
            except (HttpError, *ENGINE_ERRORS) as error:
                refusal = http_error(error)
            if not is_patient or refusal.status != 429:
                return refusal.status, bytes(refusal.response().body), refusal
            # An earlier server took it: it waits until there is room.
            await asyncio.sleep(_TRY_AGAIN_S)

    async def _do(self, work: Callable[..., Result], *args: Any) -> Result:
        """Returns what ``work`` does in the journal's thread, which waits for the disk."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)


def _request(asked: Asked) -> Request:
    """Returns a request as the server had it; its client never leaves."""
    messages: list[Message] = [{"type": "http.request", "body": asked.body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": "POST", "path": asked.path, "headers": [], "query_string": b""}
    return Request(scope, receive)


def _response(answered: Answered, headers: dict[str, str]) -> Response:
    return Response(answered.body, answered.status, headers=headers, media_type="application/json")


async def _waited(task: asyncio.Task[Response]) -> Response:
    return await asyncio.shield(task)


def _other_request() -> HttpError:
    message = "this Idempotency-Key was given with another request: path and body must be the same"
    return HttpError(422, message, param=_KEY, code="idempotency_mismatch")


def _fields(body: bytes) -> object:
    """Returns what a body says; None when it cannot be read, of which the endpoint tells."""
    with suppress(ValueError, RecursionError):
        return parse_json(body)
    return None


def _seeded(path: str, fields: object, body: bytes) -> bytes:
    """Returns a body that gives the same output each time it is asked for, as far as a seed can have it so."""
    if path.endswith("/score") or not isinstance(fields, dict) or fields.get("seed") is not None:
        return body
    return json.dumps(fields | {"seed": secrets.randbits(63)}).encode()


def _digest(*parts: str | bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=32)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()
