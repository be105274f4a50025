"""Requests that are refused over real HTTP."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai
import pytest
from chat_requests import (
    SCHEMA,
    TOOLS,
    USER,
    chat,
    open_requests,
)
from command_line import wait_until
from http_server import Server

pytestmark = pytest.mark.long(45)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"temprature": 1}, "temprature", "temperature"),
        ({"id": "x"}, "id", "unknown field"),
        ({"id": None}, "id", "unknown field"),
        ({"temprature": None}, "temprature", "temperature"),
        ({"response_format": {"type": "text", "temprature": None}}, "response_format", "temprature"),
        ({"temperature": -0.1}, "temperature", "0 to"),
        ({"top_p": 0}, "top_p", "0"),
        ({"seed": 2**64}, "seed", "18446744073709551615"),
        ({"n": 0}, "n", "1 to 128"),
        ({"max_tokens": 0}, "max_tokens", "1"),
        ({"max_completion_tokens": 2047, "max_tokens": 2047}, "max_completion_tokens", "possible"),
        ({"max_completion_tokens": 5, "max_tokens": 6}, "max_completion_tokens", "give one"),
        ({"stream": "yes"}, "stream", "bool"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"store": True}, "store", "nothing is stored"),
        ({"stop": ["x"] * 17}, "stop", "16"),
        ({"logit_bias": {"320": 1}}, "logit_bias", "320"),
        ({"regex": "("}, "regex", "0"),
        ({"regex": "a", "choice": ["b"]}, "choice", "at most one"),
        ({"response_format": {"type": "xml"}}, "response_format", "xml"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "missing"),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "response_format", "schema"),
        ({"response_format": {"type": "json_schema", "json_schema": SCHEMA}}, "response_format", "unknown"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex", "at most one"),
        ({"tools": TOOLS, "regex": "a"}, "regex", "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "stop-it"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "repeats"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "A-Z"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": None}, "messages", "missing"),
        ({"messages": [{"content": "x"}]}, "messages", "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "text"),
        ({"messages": [{"role": "user", "content": "a b " * 2000}]}, "messages", "tokens"),
        ({"prompt": "x"}, "messages", "exactly one"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "0"),
        ({"stop": "\ud800"}, "stop", "surrogate"),
        ({"thinking_budget": 3}, "thinking_budget", "--reasoning-marker"),
    ],
    ids=lambda value: str(value)[:40].encode(errors="replace").decode() if isinstance(value, dict) else "",
)
def test_refused(http: httpx.Client, fields: dict[str, Any], param: str, message: str) -> None:
    body = {"model": "tiny", "messages": USER, "max_tokens": 2} | fields
    reply = http.post("/v1/chat/completions", content=json.dumps(body))
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert message in error["message"]


def test_null_is_as_good_as_nothing(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()["components"]["schemas"]
    least: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": USER, "max_completion_tokens": 2, "temperature": 0},
        "/v1/completions": {"prompt": "a", "max_tokens": 2, "best_of": 1, "temperature": 0},
        "/v1/score": {"prompt": "a"},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [70]},
    }
    names = ("Chat", "Completion", "Score", "Tokenize", "Detokenize")
    for (path, body), name in zip(least.items(), names, strict=True):
        nulls = dict.fromkeys(document[f"{name}Request"]["properties"])
        asked = {field: value for field, value in (nulls | body).items() if field != "prompt_tokens"}
        bare, full = http.post(path, json=body), http.post(path, json=asked)
        assert (bare.status_code, full.status_code) == (200, 200), full.text
        own = {"id", "created"}
        assert {key: value for key, value in full.json().items() if key not in own} == {
            key: value for key, value in bare.json().items() if key not in own
        }
        refused = http.post(path, json=body | {"tempratur": None})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tempratur"), path


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], 5, [1.5], [320], [[-1]], ["a", ""], [True], {}], ids=str)
def test_refused_prompts(http: httpx.Client, prompt: Any) -> None:
    reply = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == "prompt"
    assert re.match(r"(prompt\b(?!_)|exactly one of prompt)", error["message"]), "not by another name"
    if prompt in (["a", ""], [[-1]]):
        assert error["message"].startswith(f"prompt[{len(prompt) - 1}]")


@pytest.mark.parametrize("field", [{"echo": True}, {"suffix": "x"}, {"best_of": 2}, {"best_of": 2, "n": 3}], ids=str)
def test_refused_fields_of_completions(http: httpx.Client, field: dict[str, Any]) -> None:
    reply = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1} | field)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, next(iter(field)))


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"a"', b"nul", b'{"a": NaN}', b"\xff", b"[" * 5000, b'{"a":' * 5000]
)
def test_bodies_that_are_no_object(http: httpx.Client, body: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/score", "/tokenize", "/detokenize"):
        reply = http.post(path, content=body)
        assert reply.status_code == 400, (path, reply.text)
        assert reply.json()["error"]["message"]


def test_errors_by_class(server: Server, client: openai.OpenAI, http: httpx.Client) -> None:
    with pytest.raises(openai.AuthenticationError):
        chat(server.client("third-key"))
    assert chat(server.client("first-key")).choices
    with pytest.raises(openai.NotFoundError) as missing:
        chat(client, model="gpt-4")
    assert missing.value.code == "model_not_found"
    assert http.get("/nowhere").json()["error"]["code"] == "not_found"
    assert http.get("/v1/completions").status_code == 405
    with pytest.raises(openai.APIStatusError) as large:
        chat(client, messages=[{"role": "user", "content": "x" * 100_000}])
    assert large.value.status_code == 413
    chunked = (b"x" * 10_000 for _ in range(20))
    assert http.post("/v1/completions", content=chunked).status_code == 413
    with pytest.raises(openai.BadRequestError, match="at most 30"):
        client.completions.create(model="tiny", prompt=["a"] * 31)
    with pytest.raises(openai.UnprocessableEntityError) as nothing:
        chat(client, extra_body={"allowed_token_ids": [5], "banned_token_ids": [5]})
    assert nothing.value.code == "sampling_error"


def test_more_requests_than_the_queue_takes(server: Server, client: openai.OpenAI) -> None:
    with client.completions.create(
        model="tiny", prompt=["a"] * 30, max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as full:
            client.completions.create(model="tiny", prompt=["a"] * 11, max_tokens=1)
        assert full.value.response.headers["retry-after"] == "1"
        assert client.completions.create(model="tiny", prompt=["a"] * 3, max_tokens=1).choices
    wait_until(lambda: open_requests(server) == 0, 10, "the stream that was closed to end")
