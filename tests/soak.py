"""Loads a server with streams of every kind for a while, and notes whether any of them was disturbed."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import statistics
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
from command_line import wait_until
from http_server import Server

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "kind": {"enum": ["cat", "dog"]}},
    "required": ["name", "kind"],
}
BAD: tuple[dict[str, Any], ...] = ({"temperature": -1}, {"prompt": ""}, {"n": 0}, {"top_p": 2}, {"stop": ["x"] * 17})
FINISHED = re.compile(r'^lockstep:requests_finished_total\{finish_reason="(\w+)"\} (\S+)', re.MULTILINE)
RECEIVED = re.compile(r"^lockstep:requests_received_total (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class SoakLoad:
    """Who asks at the same time; of the streams, those that are cut and those that are read slowly.

    Args:
        streams: All streams; every other is constrained.
        cut: Streams whose clients leave.
        slow: Streams whose clients read slowly.
        bad: Clients whose requests are wrong.
        requests: Different requests of those that are not cut, at most 16.
    """

    streams: int = 64
    cut: int = 10
    slow: int = 5
    bad: int = 5
    requests: int = 16


@dataclass
class Soaked:
    """What came of it.

    Attributes:
        finished: Streams that came to their end.
        cut: Streams that clients left.
        refused: Requests that were refused as they should be.
        wrong: What went wrong.
        memory: Of each process, its resident bytes from second to second.
    """

    finished: int = 0
    cut: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)
    memory: dict[int, list[int]] = field(default_factory=dict)

    def growth(self) -> dict[int, float]:
        """Returns by how much of itself each process grew, from the first third after the warm-up to the last."""
        grown = {}
        for pid, sizes in self.memory.items():
            warm = sizes[len(sizes) * 2 // 5 :]
            third = max(1, len(warm) // 3)
            grown[pid] = statistics.median(warm[-third:]) / statistics.median(warm[:third]) - 1
        return grown


def bodies() -> list[dict[str, Any]]:
    """Returns sixteen requests: every other constrained, half of them greedy, half drawn with seeds."""
    found: list[dict[str, Any]] = []
    for number in range(16):
        body: dict[str, Any] = {"prompt": f"{number} " * (1 + number), "max_tokens": 20 + 2 * number}
        body |= {"temperature": 0} if number % 4 < 2 else {"temperature": 0.9, "seed": number, "top_p": 0.95}
        if number % 2 == 0:
            body |= {"ignore_eos": True}
        else:
            body |= {"json_schema": SCHEMA} if number % 8 < 4 else {"regex": f"[a-d]{{{8 + number}}}"}
        found.append(body)
    return found


def soak(server: Server, load: SoakLoad, seconds: float) -> Soaked:
    """Returns what came of so many seconds of load, after each request was answered once by itself."""
    return asyncio.run(_Soak(server, load).run(seconds))


def check_counters(server: Server, load: SoakLoad, soaked: Soaked, before: tuple[float, Counter[str]]) -> None:
    """Fails unless the server counted since ``before`` what its clients did, and nothing is under way."""
    with server.http() as http:
        wait_until(lambda: http.get("/health").json()["open_requests"] == 0, 20, "the last cut stream to end")
    received, ended = counted(server)
    received -= before[0]
    ended.subtract(before[1])
    assert received == sum(ended.values())
    assert (ended["abort"], ended["rejected"], ended["error"]) == (soaked.cut, soaked.refused, 0)
    # Each request was answered once by itself before.
    assert ended["stop"] + ended["length"] == soaked.finished + load.requests


def counted(server: Server) -> tuple[float, Counter[str]]:
    """Returns the requests that a server received, and those that ended by reason."""
    with server.http() as http:
        text = http.get("/metrics").text
    received = RECEIVED.search(text)
    assert received is not None, text
    return float(received[1]), Counter({reason: int(float(value)) for reason, value in FINISHED.findall(text)})


class _Soak:
    def __init__(self, server: Server, load: SoakLoad) -> None:
        self._server = server
        self._load = load
        self._bodies = [body | {"model": server.model, "stream": True} for body in bodies()[: load.requests]]
        self._alone: list[tuple[str, str]] = []
        self._soaked = Soaked()
        self._until_s = 0.0

    async def run(self, seconds: float) -> Soaked:
        # What a slow reader does not read soon stands in nobody's buffers.
        narrow = httpx.AsyncHTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)])
        named: dict[str, Any] = {
            "base_url": self._server.url,
            "headers": {"Authorization": f"Bearer {self._server.key}"},
            "timeout": 120,
        }
        async with (
            httpx.AsyncClient(**named, limits=httpx.Limits(max_connections=None)) as http,
            httpx.AsyncClient(**named, transport=narrow) as slow,
        ):
            self._alone = [await self._read(http, body) for body in self._bodies]
            self._until_s = time.monotonic() + seconds
            load = self._load
            plain = load.streams - load.cut - load.slow
            watch = asyncio.create_task(self._watch_memory())
            await asyncio.gather(
                *(self._finish(http, number, 0.0) for number in range(plain)),
                *(self._finish(slow, number, 0.02) for number in range(load.slow)),
                *(self._cut(http, number) for number in range(load.cut)),
                *(self._be_refused(http, number) for number in range(load.bad)),
            )
            watch.cancel()
        return self._soaked

    async def _finish(self, http: httpx.AsyncClient, number: int, pause_s: float) -> None:
        turn = number
        while time.monotonic() < self._until_s:
            which = turn % len(self._bodies)
            try:
                came = await self._read(http, self._bodies[which], pause_s)
            except (httpx.HTTPError, AssertionError) as error:
                self._soaked.wrong.append(f"request {which}: {error!r}")
            else:
                self._soaked.finished += 1
                if came != self._alone[which]:
                    self._soaked.wrong.append(f"request {which}: {came} instead of {self._alone[which]}")
            # Odd steps: every client asks for all of them in time, each in an order of its own.
            turn += 2 * (number % 8) + 1

    async def _cut(self, http: httpx.AsyncClient, number: int) -> None:
        turn = number
        body = self._bodies[0] | {"max_tokens": 900, "logprobs": 1}
        if number % 2:
            body = self._bodies[1] | {"max_tokens": 900, "regex": "[a-z]{890}", "json_schema": None}
        while time.monotonic() < self._until_s:
            turn += 1
            events = 0
            async with http.stream("POST", "/v1/completions", json=body) as reply:
                async for line in reply.aiter_lines():
                    events += line.startswith("data: {")
                    if events > turn % 7:
                        break
            self._soaked.cut += 1

    async def _be_refused(self, http: httpx.AsyncClient, number: int) -> None:
        turn = number
        while time.monotonic() < self._until_s:
            turn += 1
            reply = await http.post(
                "/v1/completions", json=self._bodies[turn % len(self._bodies)] | BAD[turn % len(BAD)]
            )
            self._soaked.refused += 1
            if reply.status_code != 400:
                self._soaked.wrong.append(f"a bad request: {reply.status_code} {reply.text[:200]}")
            await asyncio.sleep(0.1)

    async def _read(self, http: httpx.AsyncClient, body: dict[str, Any], pause_s: float = 0.0) -> tuple[str, str]:
        """Returns a stream's text and how it ended."""
        text, ended = "", ""
        async with http.stream("POST", "/v1/completions", json=body) as reply:
            assert reply.status_code == 200, await reply.aread()
            async for line in reply.aiter_lines():
                if pause_s:
                    await asyncio.sleep(pause_s)
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    (choice,) = event["choices"]
                    text += choice["text"]
                    ended += choice["finish_reason"] or ""
        return text, ended

    async def _watch_memory(self) -> None:
        processes = self._server.command.family()
        while True:
            for process in processes:
                # One that vets grammars may have been replaced.
                with suppress(psutil.NoSuchProcess):
                    self._soaked.memory.setdefault(process.pid, []).append(process.memory_info().rss)
            await asyncio.sleep(1)
