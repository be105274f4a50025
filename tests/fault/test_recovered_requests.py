"""Ranks are killed under open requests: all of them end, and not a byte differs from a run in which nobody died."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from command_line import LOCKSTEP, Running, running, wait_until
from http_server import Server, serving
from tiny_checkpoints import write_tiny_checkpoint

from launch.exit_codes import ExitCode

pytestmark = pytest.mark.long(60)

TOKENS = 90
REQUESTS: list[dict[str, Any]] = [
    {"prompt": f"One two {number}", "max_tokens": TOKENS, "temperature": 1.0, "seed": number, "ignore_eos": True}
    for number in range(4)
] + [
    {"prompt": "a", "max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, "repetition_penalty": 1.2},
    {"prompt": "b", "max_tokens": TOKENS, "seed": 3, "regex": "[a-z ]{200}"},
    {"prompt": "c", "max_tokens": TOKENS, "seed": 4, "json_schema": {"type": "array", "items": {"type": "string"}}},
    {"prompt": "d", "max_tokens": TOKENS, "seed": 5, "n": 2, "logprobs": 1, "ignore_eos": True},
]
OPTIONS = ("--tp", "2", "--pp", "2", "--invariant", "--max-recoveries", "20")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", seed=4)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with serving("--model", str(model), *OPTIONS) as started:
        yield started


class Streams:
    """Streams of all requests, read by a thread each."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._tokens = [0] * len(REQUESTS)
        self._lock = threading.Lock()

    @property
    def tokens(self) -> int:
        """How many tokens came."""
        with self._lock:
            return sum(self._tokens)

    def read(self, number: int) -> dict[int, dict[str, Any]]:
        """Returns all that a stream tells of each choice."""
        choices: dict[int, dict[str, Any]] = {}
        body = {"stream": True, "return_token_ids": True} | REQUESTS[number]
        with httpx.stream("POST", f"{self._server.url}/v1/completions", json=body, timeout=120) as response:
            assert response.status_code == 200, response.read()
            lines = [line for line in self._noted(response.iter_lines(), number) if line.startswith("data: {")]
        for line in lines:
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                one = choices.setdefault(choice["index"], {"text": "", "ids": [], "logprobs": [], "reason": None})
                one["text"] += choice["text"]
                one["ids"] += choice.get("token_ids") or []
                one["logprobs"] += (choice.get("logprobs") or {}).get("token_logprobs", [])
                one["reason"] = choice["finish_reason"] or one["reason"]
        return choices

    def _noted(self, lines: Iterator[str], number: int) -> Iterator[str]:
        for line in lines:
            with self._lock:
                self._tokens[number] += line.startswith("data: {")
            yield line


def kill(command: Running, rank: int) -> None:
    wait_until(lambda: rank in command.ranks(), 30, f"rank {rank}")
    command.ranks()[rank].send_signal(signal.SIGKILL)


def health(server: Server) -> str:
    status: str = httpx.get(f"{server.url}/health").json()["status"]
    return status


def test_streams_go_on_when_each_rank_is_killed_in_turn(server: Server) -> None:
    """Scenario: SIGKILL of each rank under 8 streams → all finish, equal to the undisturbed run."""
    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        expected = list(pool.map(Streams(server).read, range(len(REQUESTS))))
        streams = Streams(server)
        reading = [pool.submit(streams.read, number) for number in range(len(REQUESTS))]
        for rank in range(4):
            wait_until(lambda least=(rank + 1) * 70: streams.tokens >= least, 60, "tokens to come")
            kill(server.command, rank)
            server.command.wait_for_message(f"rank {rank} (stage {rank // 2}, tensor-parallel rank {rank % 2})", 60)
            wait_until(lambda: health(server) == "ok", 60, "the ranks to be recovered")
        assert not all(one.done() for one in reading), "the kills came too late to show anything"
        outputs = [one.result(120) for one in reading]
    assert outputs == expected
    assert all(choice["reason"] in {"stop", "length"} for output in outputs for choice in output.values())
    metrics = httpx.get(f"{server.url}/metrics").text
    assert re.search(r"^lockstep:recovery_seconds_count 4\.0$", metrics, re.MULTILINE)
    assert re.search(r"^lockstep:requests_unfinished 0\.0$", metrics, re.MULTILINE)


def test_generate_goes_on_when_a_rank_is_killed(model: Path) -> None:
    bodies = [{"prompt": "first", "max_tokens": 5, "seed": 9}, *REQUESTS]
    lines = "".join(json.dumps({"id": number} | body) + "\n" for number, body in enumerate(bodies)).encode()
    command = (*LOCKSTEP, "generate", "--model", str(model), *OPTIONS, "--input", "-", "--format", "jsonl")
    results = []
    for victim in (None, 0):
        with running(*command, stdin=lines) as started:
            if victim is not None:
                started.wait_for_output('"id":0,', 60)
                kill(started, victim)
                line = started.wait_for_message("recovered in", 60)
                assert line.startswith("lockstep: rank 0 (stage 0, tensor-parallel rank 0) failed in step ")
            outcome = started.wait(120)
            assert outcome.returncode == ExitCode.OK, outcome.stderr
            started.check_nothing_left()
            results.append([without_cost(record) for record in outcome.records()])
    assert results[0] == results[1]
    assert len(results[0]) == len(bodies) + 1


def without_cost(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != "grammar"}
