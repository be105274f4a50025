"""The HTTP application before an engine that takes nothing: every endpoint answers in OpenAI's form."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi.testclient import TestClient

from launch.front.engine_client import EngineClient
from launch.front.engine_errors import EngineClosedError
from launch.front.metrics import EngineMetrics
from launch.node.rank_processes import RanksFailedError
from launch.options import EngineOptions, HttpOptions
from launch.serve.app import create_app
from launch.serve.journal import Journal
from launch.serve.journaled import JournaledAnswers
from launch.serve.keys import ApiKeys
from launch.serve.state import ServerState
from runtime.client_socket import ClientSocketError


class ClosedEngine:
    """Raises whatever is asked of it."""

    open_requests = 0
    silent_s = 0.0
    failure = None
    is_recovering = False
    ready = SimpleNamespace(tp_size=1, pp_size=1, dtype="float32", max_model_len=10)

    def __init__(self, error: Exception) -> None:
        self._error = error

    def submit(self, *_given: Any, **_named: Any) -> None:
        raise self._error

    async def tokenize(self, _fields: Any) -> None:
        raise self._error

    async def detokenize(self, _fields: Any) -> None:
        raise self._error


def server_state(error: Exception, options: HttpOptions) -> ServerState:
    return ServerState(
        client=cast("EngineClient", ClosedEngine(error)),
        metrics=EngineMetrics(),
        engine=cast("EngineOptions", None),
        http=options,
        model_name="tiny",
        version="0",
        created=0,
    )


def test_more_prompts_than_may_ever_run_are_wrong_and_not_too_many_now() -> None:
    state = server_state(EngineClosedError("closing"), HttpOptions(max_requests=4))
    reply = TestClient(create_app(state, ApiKeys(()))).post("/v1/completions", json={"prompt": ["a"] * 5})
    assert reply.status_code == 400
    assert "prompt has 5 prompts: at most 4 are taken" in reply.json()["error"]["message"]


def test_the_document_tells_of_keys_where_requests_are_kept(tmp_path: Path) -> None:
    state, keys = server_state(EngineClosedError("closing"), HttpOptions()), ApiKeys(())
    journal = JournaledAnswers(Journal(tmp_path / "journal", keep_s=60.0, limit_bytes=1 << 20))
    for kept in (None, journal):
        paths = create_app(state, keys, journal=kept).openapi()["paths"]
        headers = {
            path: [it["name"] for it in one.get("post", {}).get("parameters", [])] for path, one in paths.items()
        }
        told = {path for path, names in headers.items() if "Idempotency-Key" in names}
        wanted = set() if kept is None else {"/v1/completions", "/v1/chat/completions", "/v1/score"}
        assert told == wanted
        assert {path for path in paths if "507" in paths[path].get("post", {}).get("responses", {})} == wanted
    document = create_app(state, keys).openapi()["components"]["schemas"]
    assert "seed" not in document["ScoreRequest"]["properties"]
    assert "seed" in document["ChatRequest"]["properties"]


def test_head_is_answered_as_get_without_a_body() -> None:
    http = TestClient(create_app(server_state(EngineClosedError("closing"), HttpOptions()), ApiKeys(())))
    for path in ("/health", "/v1/models/other", "/openapi.json", "/nowhere"):
        assert http.head(path).status_code == http.get(path).status_code, path
    assert http.head("/v1/completions").status_code == 405


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RanksFailedError("rank 2 failed", 4), "engine_failed"),
        (ClientSocketError("no leader"), "engine_failed"),
        (EngineClosedError("closing"), "closing"),
    ],
    ids=["ranks", "socket", "closed"],
)
def test_an_engine_that_takes_no_requests(error: Exception, code: str) -> None:
    http = TestClient(create_app(server_state(error, HttpOptions()), ApiKeys(())))
    messages = [{"role": "user", "content": "a"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/chat/completions", {"messages": messages, "stream": True}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/score", {"prompt": "a"}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        reply = http.post(path, json=body)
        assert reply.status_code == 503, (path, reply.text)
        assert reply.json()["error"] == {"message": str(error), "type": "server_error", "param": None, "code": code}
        assert ("retry-after" in reply.headers) == (code == "closing")
