"""Sends the requests of ``lockstep bench serve`` to a server, and notes when their tokens came."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
from jsonschema import Draft202012Validator

from launch.bench.serve_workload import LoadRequest

_TEXT_FIELDS: Final = ("content", "reasoning_content", "reasoning")
_MAX_MESSAGE: Final = 300


class StreamError(RuntimeError):
    """What a server sent is no stream of a chat completion.

    Args:
        kind: Its class.
        message: What came.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass
class Reply:
    """What came of a request; times in seconds from the start of the load.

    Attributes:
        request: The request.
        due_s: When it was to be sent.
        token_times_s: When each event with text came.
        end_s: When all of it was there, or it failed.
        completion_tokens: As the server counts, else the events with text.
        text: All text but reasoning.
        finish_reason: The server's; None when none came.
        error: Class of the error; empty when there was none.
        message: What is known of the error.
    """

    request: LoadRequest
    due_s: float
    token_times_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    completion_tokens: int = 0
    text: str = ""
    finish_reason: str | None = None
    error: str = ""
    message: str = ""


class LoadClient:
    """Clients of one server.

    Args:
        url: Where its endpoints are, ``/v1`` and all.
        key: The key that it asks for; empty when it asks for none.
        timeout_s: How long a request may take.
    """

    def __init__(self, url: str, key: str, timeout_s: float) -> None:
        self._http = httpx.AsyncClient(
            base_url=url.rstrip("/"),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            # The whole request has the same, from earlier on: that one is what passes.
            timeout=timeout_s,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )
        self._timeout_s = timeout_s
        self._start_s = 0.0

    async def close(self) -> None:
        """Closes its connections."""
        await self._http.aclose()

    async def locate(self) -> None:
        """Takes ``/v1`` where the address has no path and the server knows no models there, as OpenAI's servers do.

        Raises:
            httpx.HTTPError, TimeoutError: It cannot be asked.
        """
        if self._http.base_url.path.strip("/"):
            return
        async with asyncio.timeout(self._timeout_s):
            response = await self._http.get("/models")
        if response.status_code == httpx.codes.NOT_FOUND:
            self._http.base_url = self._http.base_url.join("/v1")

    async def first_model(self) -> str:
        """Returns the name of the first model that the server lists.

        Raises:
            StreamError: It lists none.
            httpx.HTTPError, TimeoutError: It cannot be asked.
        """
        async with asyncio.timeout(self._timeout_s):
            response = await self._http.get("/models")
        response.raise_for_status()
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise StreamError("no_model", f"{response.url} lists no model: {response.text[:_MAX_MESSAGE]}") from error

    async def run(self, requests: Sequence[LoadRequest], concurrency: int | None) -> list[Reply]:
        """Returns what came of each request, in order, once all have ended.

        Args:
            requests: The requests.
            concurrency: How many are under way at once; None = each is sent when it is due.
        """
        self._start_s = time.perf_counter()
        if concurrency is None:
            return list(await asyncio.gather(*(self._ask(one) for one in requests)))
        replies: dict[int, Reply] = {}
        waiting = iter(enumerate(requests))

        async def work() -> None:
            for number, request in waiting:
                replies[number] = await self._ask(request)

        await asyncio.gather(*(work() for _ in range(concurrency)))
        return [replies[number] for number in range(len(requests))]

    async def _ask(self, request: LoadRequest) -> Reply:
        if request.due_s is not None:
            await asyncio.sleep(self._start_s + request.due_s - time.perf_counter())
        reply = Reply(request, self._now_s() if request.due_s is None else request.due_s)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._read(reply)
        except TimeoutError:
            reply.error, reply.message = "timeout", f"not done in {self._timeout_s:g} s"
        except httpx.HTTPError as error:
            reply.error, reply.message = "connection", f"{type(error).__name__}: {error}"
        except StreamError as error:
            reply.error, reply.message = error.kind, str(error)
        reply.end_s = self._now_s()
        return reply

    async def _read(self, reply: Reply) -> None:
        body = json.dumps(reply.request.body)
        headers = {"Content-Type": "application/json"}
        async with self._http.stream("POST", "/chat/completions", content=body, headers=headers) as response:
            if response.status_code != httpx.codes.OK:
                text = (await response.aread()).decode(errors="replace")
                raise StreamError(f"http_{response.status_code}", text[:_MAX_MESSAGE])
            events, is_done = 0, False
            async for data in _events(response):
                events += 1
                is_done = data == b"[DONE]"
                if not is_done:
                    self._take(reply, data)
        if not events:
            raise StreamError("no_stream", "the reply has no event")
        if reply.finish_reason is None or not is_done:
            raise StreamError("cut_stream", f"the stream ended after {len(reply.token_times_s)} events with text")
        _check_output(reply)

    def _take(self, reply: Reply, data: bytes) -> None:
        try:
            chunk = json.loads(data)
            if chunk.get("error") is not None:
                raise StreamError("error_event", json.dumps(chunk["error"])[:_MAX_MESSAGE])
            usage = chunk.get("usage") or {}
            for choice in chunk["choices"]:
                self._take_choice(reply, choice)
            reply.completion_tokens = usage.get("completion_tokens", reply.completion_tokens)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise StreamError("malformed_event", f"{error!r}: {data[:_MAX_MESSAGE]!r}") from error

    def _take_choice(self, reply: Reply, choice: dict[str, Any]) -> None:
        delta = choice.get("delta") or {}
        if any(delta.get(name) for name in _TEXT_FIELDS):
            reply.token_times_s.append(self._now_s())
            reply.completion_tokens += 1
        reply.text += delta.get("content") or ""
        reply.finish_reason = choice.get("finish_reason") or reply.finish_reason

    def _now_s(self) -> float:
        return time.perf_counter() - self._start_s


def _check_output(reply: Reply) -> None:
    """Returns if a constrained output that ended by itself is what was asked for.

    Raises:
        StreamError: It is not.
    """
    if reply.request.schema is None or reply.finish_reason != "stop":
        return
    try:
        value = json.loads(reply.text)
    except ValueError as error:
        raise StreamError("invalid_output", f"no JSON ({error}): {reply.text[:_MAX_MESSAGE]}") from error
    if not Draft202012Validator(reply.request.schema).is_valid(value):
        raise StreamError("invalid_output", f"not of its schema: {reply.text[:_MAX_MESSAGE]}")


async def _events(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yields the data of server-sent events, each of one line, whatever else than line feeds a text may hold."""
    held = b""
    async for part in response.aiter_bytes():
        *lines, held = (held + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[len(b"data:") :].strip()
