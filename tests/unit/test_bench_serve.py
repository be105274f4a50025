"""``lockstep bench serve``: its requests, its clients against a server that says what it is told to, its figures."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from msgspec import structs
from rich.console import Console

from launch.bench import serve
from launch.bench.serve_load import LoadClient, Reply, StreamError
from launch.bench.serve_report import ServeReport, is_good, tpot_s
from launch.bench.serve_workload import LoadRequest, digest_of, load_requests
from launch.cli.parse import UsageError, parse_command
from launch.commands import BenchServeCommand

URL = "http://127.0.0.1:8000/v1"
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}


def command(*options: str) -> BenchServeCommand:
    parsed = parse_command(["bench", "serve", URL, *options])
    assert isinstance(parsed, BenchServeCommand)
    return parsed


# The requests.


def test_a_seed_says_all_requests_and_when_they_come() -> None:
    asked = command("--rate", "5", "--requests", "40", "--seed", "3")
    requests = load_requests(asked, "m")
    assert requests == load_requests(asked, "m")
    assert digest_of(requests) != digest_of(load_requests(structs.replace(asked, seed=4), "m"))
    closed = load_requests(command("--requests", "40", "--seed", "3"), "m")
    assert digest_of(closed) == digest_of(requests)
    assert all(one.due_s is None for one in closed)


def test_arrivals_are_a_poisson_process() -> None:
    times = [one.due_s or 0.0 for one in load_requests(command("--rate", "5", "--requests", "2000"), "m")]
    gaps = [after - before for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert times == sorted(times)
    assert mean == pytest.approx(0.2, rel=0.1)
    # Of an exponential distribution the deviation is the mean.
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.15)


def test_shares_are_kept_and_change_nothing_else() -> None:
    def bodies(*options: str) -> list[dict[str, Any]]:
        return [one.body for one in load_requests(command("--requests", "400", *options), "m")]

    mixed, plain, bare = bodies(), bodies("--constrained", "0"), bodies("--constrained", "0", "--prefixed", "0")
    constrained = [body for body in mixed if "response_format" in body]
    assert 150 < len(constrained) < 250
    schemas = {json.dumps(body["response_format"]["json_schema"]["schema"]) for body in constrained}
    assert len(schemas) == 4
    for schema in schemas:
        Draft202012Validator.check_schema(json.loads(schema))
    assert not [body for body in plain if "response_format" in body]
    assert [body for body in mixed if "response_format" not in body] == [
        other for body, other in zip(mixed, plain, strict=True) if "response_format" not in body
    ]
    long = [body for body in plain if len(body["messages"][0]["content"].split()) > 100]
    assert 150 < len(long) < 250
    assert len({" ".join(body["messages"][0]["content"].split()[:128]) for body in long}) == 4
    for body, without in zip(plain, bare, strict=True):
        assert body["messages"][0]["content"].endswith(without["messages"][0]["content"])
        assert body["seed"] == without["seed"]


def test_outputs_go_on_where_asked() -> None:
    requests = load_requests(command("--ignore-eos", "--requests", "20"), "m")
    assert all(("ignore_eos" in one.body) == (one.schema is None) for one in requests)


# The clients.


def event(*, text: str = "", finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]} | more, ensure_ascii=False).encode() + b"\r\n\r\n"


DONE = b"data: [DONE]\n\n"
HALVES = event(text='b "c"')
STREAMS: Mapping[str, tuple[bytes, ...]] = {
    # What parts lines elsewhere parts no events, nor does what the network parts.
    "good": (
        event(text="a\u2028\x85"),
        HALVES[:40],
        HALVES[40:] + event(finish="stop", usage={"completion_tokens": 9}),
        DONE,
    ),
    "json": (event(text='{"a"'), event(text=": 1}") + event(finish="stop") + DONE),
    "cut": (event(text="a"),),
    "unfinished": (event(text="a") + DONE,),
    "fails": (event(text="a") + b'data: {"error": {"message": "a rank died"}}\n\n',),
    "garbled": (event(text="a") + b"data: {]\n\n",),
    "odd": (b"data: [1]\n\n",),
    "whole": (b'{"choices": []}',),
    "wrong": (event(text='{"a": 3}') + event(finish="stop") + DONE,),
    "text": (event(text="so") + event(finish="stop") + DONE,),
    "short": (event(text='{"a": ') + event(finish="length") + DONE,),
}
_OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


class ScriptedServer:
    """Answers by the model's name; counts the requests that are under way."""

    def __init__(self) -> None:
        self.most = 0
        self._now = 0
        self.heads: list[bytes] = []

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._now += 1
        self.most = max(self.most, self._now)
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
        body = json.loads(await reader.readexactly(int(lengths[0]))) if lengths else {"model": "models"}
        name = body["model"]
        if name == "late":
            await asyncio.sleep(30)
        elif name == "full":
            writer.write(b'HTTP/1.1 429 Busy\r\nConnection: close\r\n\r\n{"error": "queue_full"}')
        elif name == "models" and not head.startswith(b"GET /v1/"):
            writer.write(b"HTTP/1.1 404 Not Found\r\nConnection: close\r\n\r\n{}")
        elif name == "models":
            writer.write(b'HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{"data": [{"id": "first"}]}')
        elif name != "gone":
            writer.write(_OK)
            for part in STREAMS[name]:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.02)
        self._now -= 1
        writer.close()


def load(
    requests: list[LoadRequest], concurrency: int | None = None, *, path: str = "/v1/"
) -> tuple[list[Reply], ScriptedServer]:
    async def run() -> tuple[list[Reply], ScriptedServer]:
        scripted = ScriptedServer()
        server = await asyncio.start_server(scripted.answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = LoadClient(f"http://127.0.0.1:{port}{path}", "secret", 1.0)
        await client.locate()
        assert await client.first_model() == "first"
        replies = await client.run(requests, concurrency)
        await client.close()
        server.close()
        return replies, scripted

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "schema", "error", "message"),
    [
        ("good", None, "", ""),
        ("json", SCHEMA, "", ""),
        ("short", SCHEMA, "", ""),
        ("wrong", SCHEMA, "invalid_output", "not of its schema"),
        ("text", SCHEMA, "invalid_output", "no JSON"),
        ("cut", None, "cut_stream", "after 1 events"),
        ("unfinished", None, "cut_stream", "after 1 events"),
        ("fails", None, "error_event", "a rank died"),
        ("garbled", None, "malformed_event", "{]"),
        ("odd", None, "malformed_event", "[1]"),
        ("whole", None, "no_stream", "no event"),
        ("full", None, "http_429", "queue_full"),
        ("gone", None, "connection", "RemoteProtocolError"),
        ("late", None, "timeout", "1 s"),
    ],
)
def test_replies_and_their_errors(name: str, schema: dict[str, Any] | None, error: str, message: str) -> None:
    (reply,), scripted = load([LoadRequest({"model": name}, 0.0, schema)])
    assert reply.error == error, reply.message
    assert message in reply.message
    assert reply.end_s > 0
    assert b"authorization: bearer secret" in scripted.heads[-1].lower()
    if name == "good":
        assert reply.text == 'a\u2028\x85b "c"'
        assert (reply.completion_tokens, reply.finish_reason, len(reply.token_times_s)) == (9, "stop", 2)
        assert reply.token_times_s[1] - reply.token_times_s[0] > 0.01


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_an_address_may_leave_out_v1(path: str) -> None:
    (reply,), scripted = load([LoadRequest({"model": "good"}, 0.0, None)], path=path)
    assert reply.error == ""
    assert scripted.heads[-1].startswith(b"POST /v1/chat/completions ")


def test_a_closed_loop_has_so_many_under_way() -> None:
    requests = [LoadRequest({"model": "good"}, None, None) for _ in range(9)]
    replies, scripted = load(requests, 3)
    assert scripted.most == 3
    assert [reply.request for reply in replies] == requests
    assert max(reply.due_s for reply in replies) > 0.05


def test_requests_come_when_they_are_due() -> None:
    requests = [LoadRequest({"model": "good"}, due_s, None) for due_s in (0.0, 0.2, 0.1)]
    replies, _ = load(requests)
    assert [reply.due_s for reply in replies] == [0.0, 0.2, 0.1]
    for reply in replies:
        assert reply.due_s < reply.token_times_s[0] < reply.due_s + 0.9


def test_a_server_without_models() -> None:
    async def ask() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b'HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{"data": []}')
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        client = LoadClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", "", 5.0)
        try:
            await client.first_model()
        finally:
            await client.close()
            server.close()

    with pytest.raises(StreamError, match="lists no model"):
        asyncio.run(ask())


# The figures.


def reply(due_s: float, times: list[float], tokens: int, schema: dict[str, Any] | None = None, **more: Any) -> Reply:
    end_s = times[-1] if times else due_s + 1
    return Reply(LoadRequest({}, due_s, schema), due_s, times, end_s, tokens, "", "stop", **more)


def test_figures_of_a_run() -> None:
    replies = [
        reply(0.0, [0.5, 0.6, 0.9], 5),
        reply(1.0, [1.1, 2.1], 2, SCHEMA),
        reply(1.5, [], 0, error="http_429", message="full"),
        reply(2.0, [4.5], 1),
    ]
    assert [tpot_s(one) for one in replies] == [pytest.approx(0.1), pytest.approx(1.0), None, None]
    asked = command("--ttft-goal", "2", "--tpot-goal", "0.2")
    assert [is_good(one, asked) for one in replies] == [True, False, False, False]
    report = ServeReport.of(asked, "m", "abc", replies)
    assert report.duration_s == pytest.approx(4.5)
    assert [report.requests_per_s, report.good_per_s] == pytest.approx([3 / 4.5, 1 / 4.5])
    assert report.good_share == 0.25
    assert (report.all.requests, report.all.finished, report.all.output_tokens) == (4, 3, 8)
    assert report.all.first_token is not None
    assert report.all.first_token.median_ms == pytest.approx(500)
    assert report.all.inter_token is not None
    assert report.all.inter_token.min_ms == pytest.approx(100)
    assert (report.plain.requests, report.constrained.requests) == (3, 1)
    assert report.constrained.tokens_per_s == pytest.approx(2 / 4.5)
    assert {kind: errors.count for kind, errors in report.errors.items()} == {"http_429": 1}
    document = json.loads(report.document())
    assert document["all"]["end_to_end"]["p99_ms"] == pytest.approx(2500)
    out = io.StringIO()
    report.print(Console(file=out, width=160))
    for part in ("3 of 4", "JSON Schema", "25 %", "1 x http_429: full", "seed 0, requests abc", "8 at once"):
        assert part in out.getvalue()


def test_figures_when_nothing_succeeds() -> None:
    report = ServeReport.of(command("--rate", "2"), "m", "abc", [reply(0.0, [], 0, error="timeout", message="late")])
    assert report.all.first_token is report.all.end_to_end is None
    assert report.good_share == 0
    out = io.StringIO()
    report.print(Console(file=out, width=160))
    assert "Poisson, 2 a second" in out.getvalue()


# The command line.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ftp://x"], "URL is 'ftp://x'"),
        (["127.0.0.1:8000"], "URL is"),
        ([URL, "--rate", "1", "--concurrency", "2"], "--rate and --concurrency"),
        ([URL, "--constrained", "1.5"], "1.5"),
        ([URL, "--rate", "inf"], "from 0.001 to 1000000, not inf"),
        ([URL, "--requests", "0"], "0"),
    ],
)
def test_wrong_options(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_command(["bench", "serve", *arguments])


def test_a_missing_client_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match="pip install httpx"):
        serve.become_load_generator(command(), [])


def test_a_key_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--api-key-file"):
        serve.become_load_generator(command("--api-key-file", str(tmp_path / "none")), [])
