"""A rank that is killed while drafts are checked costs a pause: the ids are those of a run without speculation."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from command_line import wait_until
from http_server import Server, serving
from tiny_checkpoints import write_tiny_checkpoint

pytestmark = pytest.mark.long(60)

FEW = {"7": 20.0, "9": 19.5, "12": 19.0, "30": 18.0}
BODIES: tuple[dict[str, Any], ...] = (
    {"prompt": "one two one two", "temperature": 0, "logit_bias": FEW, "frequency_penalty": 0.2},
    {"prompt": "three", "temperature": 0.2, "seed": 3, "logit_bias": FEW, "presence_penalty": 0.4},
    {"prompt": "four", "temperature": 0, "regex": "(abc|xy){200,300}"},
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", max_position_embeddings=2048)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    options = ("--tp", "2", "--pp", "1", "--invariant", "--speculate", "ngram:6", "--max-recoveries", "100")
    with serving("--model", str(model), *options) as started:
        yield started


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    with serving("--model", str(model), "--invariant") as plain:
        return answers(plain)


def answers(server: Server) -> list[list[int]]:
    """Returns the ids of all requests, sent together."""
    begun = threading.Barrier(len(BODIES))

    def ask(body: dict[str, Any]) -> list[int]:
        begun.wait(30)
        fields = {"model": server.model, "max_tokens": 600, "ignore_eos": True, "return_token_ids": True}
        with server.http() as http:
            reply = http.post("/v1/completions", json=body | fields, timeout=240)
        assert reply.status_code == 200, reply.text
        token_ids: list[int] = reply.json()["choices"][0]["token_ids"]
        return token_ids

    with ThreadPoolExecutor(len(BODIES)) as pool:
        return list(pool.map(ask, BODIES))


def metric(server: Server, name: str) -> float:
    """Returns a metric; 0 before it was counted."""
    found = re.search(rf"^lockstep:{name} (\S+)", httpx.get(f"{server.url}/metrics").text, re.MULTILINE)
    return 0.0 if found is None else float(found.group(1))


def accepted(server: Server) -> float:
    return metric(server, "spec_decode_accepted_tokens_total")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_among_drafts_costs_no_token(server: Server, expected: list[list[int]], victim: int) -> None:
    assert answers(server) == expected
    wait_until(lambda: accepted(server) > 100, 30, "guesses that were right")
    before = metric(server, "recovery_seconds_count")
    with ThreadPoolExecutor(1) as pool:
        disturbed = pool.submit(answers, server)
        wait_until(lambda: httpx.get(f"{server.url}/health").json()["open_requests"] == len(BODIES), 30, "requests")
        server.command.ranks()[victim].kill()
        assert disturbed.result(300) == expected
    assert metric(server, "recovery_seconds_count") == before + 1
    wait_until(lambda: accepted(server) > 50, 30, "guesses that were right after the recovery")
