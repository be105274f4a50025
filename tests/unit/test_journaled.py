"""Requests with a key: one piece of work and one answer for each, whoever waits, leaves, or asks again later."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from launch.serve.errors import HttpError
from launch.serve.journal import Journal
from launch.serve.journaled import JournaledAnswers

PATH = "/v1/completions"


@dataclass
class Endpoint:
    """Answers with the number of the request and its body, once it may."""

    refusals: list[HttpError] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.bodies.append(body)
        await self.may_answer.wait()
        if self.refusals:
            raise self.refusals.pop(0)
        return Response(json.dumps({"number": len(self.bodies), "body": body}), media_type="application/json")


@dataclass
class Server:
    """What stands between clients and an endpoint."""

    endpoint: Endpoint
    ask: Callable[[Request], Awaitable[Response]]

    def post(self, body: Any, key: str | None, *, owner: str = "") -> asyncio.Task[Response]:
        return asyncio.create_task(self._post(body, key, owner))

    async def _post(self, body: Any, key: str | None, owner: str) -> Response:
        return await self.ask(request(body, key, owner))


def request(body: Any, key: str | None, owner: str = "", *, leaves: bool = False) -> Request:
    headers = [(b"authorization", owner.encode())]
    headers += [] if key is None else [(b"idempotency-key", key.encode("latin-1"))]
    messages: list[Message] = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        if not leaves:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    return Request({"type": "http", "method": "POST", "path": PATH, "headers": headers, "query_string": b""}, receive)


def serve(folder: Path, scenario: Callable[[Server], Awaitable[None]], endpoint: Endpoint | None = None) -> None:
    async def run() -> None:
        behind = endpoint or Endpoint()
        answers = JournaledAnswers(Journal(folder, keep_s=1e6, limit_bytes=1 << 30))
        ask = answers.wrap(PATH, behind.answer)
        async with answers:
            await asyncio.wait_for(scenario(Server(behind, ask)), 20)

    asyncio.run(run())


def told(response: Response) -> Any:
    return json.loads(bytes(response.body))


async def refusal(task: asyncio.Task[Response]) -> tuple[int, str | None]:
    with pytest.raises(HttpError) as caught:
        await task
    return caught.value.status, caught.value.reply.error.code


async def begun(server: Server, count: int) -> None:
    while len(server.endpoint.bodies) < count:
        await asyncio.sleep(0.001)


def test_who_asks_twice_gets_one_answer(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        first, second = server.post({"a": 1}, "k"), server.post({"a": 1}, "k")
        await begun(server, 1)
        assert await refusal(server.post({"a": 2}, "k")) == (422, "idempotency_mismatch")
        server.endpoint.may_answer.set()
        assert told(await first) == told(await second)
        third = await server.post({"a": 1}, "k")
        assert third.body == (await first).body
        assert third.headers["idempotent-replayed"] == "true"
        assert "idempotent-replayed" not in (await first).headers
        assert await refusal(server.post({"a": 2}, "k")) == (422, "idempotency_mismatch")
        assert len(server.endpoint.bodies) == 1
        assert told(await server.post({"a": 1}, None))["number"] == 2, "without a key nothing is kept"
        assert told(await server.post({"a": 1}, "k", owner="Bearer b"))["number"] == 3, "keys are their owner's"

    async def later(server: Server) -> None:
        again = await server.post({"a": 1}, "k")
        assert again.headers["idempotent-replayed"] == "true"
        assert told(again)["number"] == 1
        assert server.endpoint.bodies == []

    serve(tmp_path, scenario)
    serve(tmp_path, later)


def test_what_has_no_answer_goes_on_after_a_restart_with_the_seed_it_had(tmp_path: Path) -> None:
    seeds: list[int] = []

    async def scenario(server: Server) -> None:
        server.post({"a": 1}, "open")
        await begun(server, 1)
        server.post({"a": 1, "seed": 5}, "seeded")
        await begun(server, 2)
        assert (await server.ask(request({"a": 3}, "left", leaves=True))).status_code == 499
        await begun(server, 3)
        seeds.extend(body["seed"] for body in server.endpoint.bodies)

    async def later(server: Server) -> None:
        await begun(server, 3)
        assert [body["seed"] for body in server.endpoint.bodies] == seeds
        waiting = server.post({"a": 3}, "left")
        server.endpoint.may_answer.set()
        assert told(await waiting)["body"] == {"a": 3, "seed": seeds[2]}
        assert told(await server.post({"a": 1, "seed": 5}, "seeded"))["body"]["seed"] == 5
        assert len(server.endpoint.bodies) == 3

    serve(tmp_path, scenario)
    assert seeds[1] == 5
    assert len(set(seeds)) == 3
    serve(tmp_path, later)


@pytest.mark.parametrize(
    ("error", "runs", "runs_later"),
    [
        (HttpError(400, "wrong", code="invalid_request"), 1, 1),
        (HttpError(422, "no token", code="sampling_error"), 1, 1),
        (HttpError(503, "late", code="timeout"), 2, 2),
        (HttpError(429, "full", code="queue_full", headers={"Retry-After": "1"}), 2, 2),
        (HttpError(503, "leaving", code="closing"), 2, 2),
    ],
)
def test_what_is_final_is_kept(tmp_path: Path, error: HttpError, runs: int, runs_later: int) -> None:
    async def scenario(server: Server) -> None:
        server.endpoint.may_answer.set()
        reply = await server.post({"a": 1}, "k")
        assert (reply.status_code, told(reply)["error"]["code"]) == (error.status, error.reply.error.code)
        assert {name: reply.headers[name] for name in error.headers} == error.headers
        again = await server.post({"a": 1}, "k")
        assert len(server.endpoint.bodies) == runs
        assert again.status_code == (error.status if runs == 1 else 200)

    async def later(server: Server) -> None:
        assert (await server.post({"a": 1}, "k")).headers["idempotent-replayed"] == "true"
        assert server.endpoint.bodies == []

    serve(tmp_path, scenario, Endpoint([error]))
    serve(tmp_path, later)


def test_a_server_that_is_full_after_a_restart_asks_until_there_is_room(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        server.post({"a": 1}, "k")
        await begun(server, 1)

    async def later(server: Server) -> None:
        server.endpoint.may_answer.set()
        assert told(await server.post({"a": 1}, "k"))["number"] == 2

    serve(tmp_path, scenario)
    serve(tmp_path, later, Endpoint([HttpError(429, "full")]))


def test_a_full_disk_refuses_the_request_and_a_late_one_costs_only_its_keeping(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = mock.patch("os.pwrite", side_effect=OSError(errno.ENOSPC, "No space left on device"))

    async def scenario(server: Server) -> None:
        with full:
            assert await refusal(server.post({"a": 1}, "k")) == (507, "journal_failed")
        assert server.endpoint.bodies == []
        waiting = server.post({"a": 1}, "k")
        await begun(server, 1)
        with full:
            server.endpoint.may_answer.set()
            assert told(await waiting)["number"] == 1
        assert "an answer is not kept: No space left on device" in capsys.readouterr().err
        assert told(await server.post({"a": 1}, "k"))["body"] == told(await waiting)["body"]

    serve(tmp_path, scenario)


def test_keys_and_requests_that_cannot_be_kept_are_refused(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        for key in ("", "x" * 256, "ä"):
            status, _ = await refusal(server.post({"a": 1}, key))
            assert status == 400
        assert (await refusal(server.post({"stream": True}, "k")))[0] == 400
        assert server.endpoint.bodies == []

    serve(tmp_path, scenario)
