"""A server that is killed in the midst of a request that is in its journal answers it when it is started again."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import httpx
from command_line import LOCKSTEP, running, wait_until
from http_server import serving
from tiny_checkpoints import write_tiny_checkpoint

BODY = {"prompt": "one two", "max_tokens": 150, "ignore_eos": True, "temperature": 1.0, "seed": 11, "logprobs": 1}
PATH = "/v1/completions"
KEY = {"Idempotency-Key": "job-1"}


def test_a_killed_server_answers_later(tmp_path: Path) -> None:
    model = write_tiny_checkpoint(tmp_path / "tiny", "llama", max_position_embeddings=1024)
    options = ("--model", str(model), "--threads-per-rank", "1", "--invariant", "--journal", str(tmp_path / "journal"))
    failures: list[httpx.HTTPError] = []
    with running(*LOCKSTEP, "serve", "--port", "0", *options) as command:
        url = command.wait_for_message("serving ", 180).rsplit(" at ", 1)[1].removesuffix("/v1")

        def ask() -> None:
            try:
                httpx.post(url + PATH, json=BODY, headers=KEY, timeout=100)
            except httpx.HTTPError as error:
                failures.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: tokens(url) > 3, 60, "tokens")
        command.process.kill()
        asking.join(20)
        assert failures, "the server died before it answered"
        wait_until(lambda: not command.family(), 20, "all its processes to end")
    journal = tmp_path / "journal" / "journal"
    journal.write_bytes(journal.read_bytes() + b"\xa7rec half a rec")
    with serving(*options) as server, server.http() as http:
        stderr = (server.command.folder / "stderr").read_text()
        assert "the journal's last 15 bytes, a record half written, were cut off" in stderr
        assert "the journal has 1 requests without an answer: they go on" in stderr
        headers = {**KEY, "Authorization": ""}
        reply = http.post(PATH, json=BODY, headers=headers)
        assert reply.status_code == 200
        undisturbed = http.post(PATH, json=BODY)
        assert outcome(reply.json()) == outcome(undisturbed.json())
        again = http.post(PATH, json=BODY, headers=headers)
        assert again.content == reply.content
        assert again.headers["idempotent-replayed"] == "true"
        assert http.post(PATH, json=BODY | {"seed": 12}, headers=headers).status_code == 422


def tokens(url: str) -> float:
    found = re.search(
        r"^lockstep:generation_tokens_total (\S+)", httpx.get(url + "/metrics", timeout=60).text, re.MULTILINE
    )
    return float(found.group(1)) if found else 0.0


def outcome(reply: dict[str, Any]) -> tuple[Any, Any]:
    return reply["choices"], reply["usage"]
