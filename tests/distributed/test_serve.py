"""``lockstep serve`` on 2 x 2 ranks, asked by the real ``openai`` client over real HTTP."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from command_line import LOCKSTEP, ROOT, run, wait_until
from http_server import Server, serving, write_chat_model
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from launch.environment import API_KEY
from launch.exit_codes import ExitCode

pytestmark = pytest.mark.long(45)

USER = [{"role": "user", "content": "One two"}]
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Rome", "Oslo"]}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "stop-it", "parameters": NOTHING}},
]
NO_BLANKS = {"max_whitespace": 0}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = write_chat_model(tmp_path_factory.mktemp("chat-model"))
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("first-key\nsecond-key\n")
    options = ("--model", str(model), "--tp", "2", "--pp", "2", "--served-model-name", "tiny")
    limits = ("--max-body-bytes", "100000", "--max-requests", "40", "--max-prompts", "30")
    processor = ("--logit-processor", "example_processors:FailsLate")
    environ = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    asked = (*options, *limits, *processor, "--api-key-file", str(keys))
    with serving(*asked, environ=environ, key="second-key") as started:
        yield started


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return server.client()


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with server.http() as plain:
        yield plain


def chat(client: openai.OpenAI, **fields: Any) -> ChatCompletion:
    asked: dict[str, Any] = {"model": "tiny", "messages": USER, "temperature": 0, "max_tokens": 12}
    reply: ChatCompletion = client.chat.completions.create(**(asked | fields))
    return reply


def open_stream(client: openai.OpenAI, **fields: Any) -> openai.Stream[ChatCompletionChunk]:
    asked: dict[str, Any] = {"model": "tiny", "messages": USER, "temperature": 0, "max_tokens": 12, "stream": True}
    stream: openai.Stream[ChatCompletionChunk] = client.chat.completions.create(**(asked | fields))
    return stream


def chat_stream(client: openai.OpenAI, **fields: Any) -> list[ChatCompletionChunk]:
    return list(open_stream(client, **fields))


def text_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(delta.content or "" for delta in deltas)


# What the endpoints answer.


def test_models(client: openai.OpenAI, http: httpx.Client) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "lockstep")
    assert client.models.retrieve("tiny") == model
    abilities = http.get("/v1/models/tiny").json()["capabilities"]
    assert (abilities["tp_size"], abilities["pp_size"], abilities["dtype"]) == (2, 2, "float32")
    assert abilities["versions"]["torch"] is not None
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_health_needs_no_key(server: Server) -> None:
    reply = httpx.get(f"{server.url}/health")
    assert reply.status_code == 200
    assert reply.json()["status"] == "ok"
    assert reply.json()["silent_s"] < 10


def test_completion(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="tiny", prompt="One two", temperature=0, max_tokens=9)
    assert reply.object == "text_completion"
    assert reply.id.startswith("cmpl-")
    assert [choice.finish_reason for choice in reply.choices] == ["length"]
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 9
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 9


def test_chat(client: openai.OpenAI) -> None:
    reply = chat(client)
    message = reply.choices[0].message
    assert (message.role, message.refusal, message.tool_calls) == ("assistant", None, None)
    assert message.content
    assert reply.choices[0].finish_reason == "length"
    assert reply.object == "chat.completion"
    assert "tp2-pp2" in (reply.system_fingerprint or "")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3, "seed": 4, "temperature": 1},
        {"stop": ["e"]},
        {"extra_body": {"regex": "[a-c]{4}-[0-9]{2}"}},
        {"extra_body": {"choice": ["心情 😀", "yes"]}},
        {"response_format": {"type": "json_object"}, "max_tokens": 30, "seed": 3},
        {"logit_bias": {"42": 100}, "max_tokens": 3},
        {"presence_penalty": 1, "frequency_penalty": 1, "top_p": 0.9, "seed": 2**63},
        {"max_tokens": None, "max_completion_tokens": 5},
        {"extra_body": {"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.2, "filter_order": "top_k_first"}, "seed": 1},
    ],
    ids=str,
)
def test_stream_equals_whole_reply(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    whole = chat(client, **fields)
    chunks = chat_stream(client, **fields, stream_options={"include_usage": True})
    assert len({chunk.id for chunk in chunks}) == 1
    for choice in whole.choices:
        assert text_of(chunks, choice.index) == choice.message.content
        ends = [one.finish_reason for chunk in chunks for one in chunk.choices if one.index == choice.index]
        assert [end for end in ends if end] == [choice.finish_reason]
        assert ends[-1] is not None
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    first = [chunk.choices[0].delta.role for chunk in chunks[:1]]
    assert first == ["assistant"]


def test_completion_stream_equals_whole_reply(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": "tiny",
        "prompt": ["One two", [5, 6, 7], "a"],
        "n": 2,
        "seed": 5,
        "max_tokens": 8,
        "logprobs": 2,
    }
    whole = client.completions.create(**fields)
    assert [choice.index for choice in whole.choices] == list(range(6))
    chunks = list(client.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    for choice in whole.choices:
        parts = [one for chunk in chunks for one in chunk.choices if one.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        kept = [part.logprobs for part in parts if part.logprobs is not None]
        assert choice.logprobs is not None
        for column in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            streamed = [item for one in kept for item in getattr(one, column)]
            assert streamed == getattr(choice.logprobs, column)
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 48


def test_prompts_are_those_of_the_command_line(client: openai.OpenAI) -> None:
    one, other = (
        client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=6)
        for prompt in ("ab", [client.post("/../tokenize", cast_to=object, body={"prompt": "ab"})["tokens"]])  # type: ignore[index]
    )
    assert one.choices[0].text == other.choices[0].text


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2, "logprobs": True, "top_logprobs": 2},
        {"tools": TOOLS, "tool_choice": "required", "max_tokens": 200, **NO_BLANKS},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
        {"return_token_ids": True, "prompt_logprobs": 1, "return_support": True, "logprob_token_ids": [7]},
    ],
    ids=["logprobs", "tools", "schema", "extensions"],
)
def test_chat_has_the_shape_of_the_client_s_own_types(http: httpx.Client, fields: dict[str, Any]) -> None:
    """The client itself takes what comes unchecked."""
    body = {"model": "tiny", "messages": USER, "max_tokens": 30, "temperature": 0} | fields
    whole = http.post("/v1/chat/completions", json=body)
    assert ChatCompletion.model_validate_json(whole.content).choices
    asked = body | {"stream": True, "stream_options": {"include_usage": True}}
    chunks = [ChatCompletionChunk.model_validate(event) for event in events_of(http, "/v1/chat/completions", asked)]
    assert len(chunks) > 3


def test_completions_and_models_have_the_shape_of_the_client_s_own_types(http: httpx.Client) -> None:
    body = {"model": "tiny", "prompt": ["One", "two"], "max_tokens": 5, "temperature": 0, "logprobs": 2}
    assert len(Completion.model_validate_json(http.post("/v1/completions", json=body).content).choices) == 2
    events = events_of(http, "/v1/completions", body | {"stream": True, "stream_options": {"include_usage": True}})
    for event in events:
        for choice in event["choices"]:
            # The type knows no choice that goes on; OpenAI's own streams have them as these have.
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        Completion.model_validate(event)
    for card in http.get("/v1/models").json()["data"]:
        Model.model_validate(card)


def events_of(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the events of a stream that came to its end."""
    *events, end = http.post(path, json=body).text.strip().split("\n\n")
    assert end == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


class Animal(BaseModel):
    kind: Literal["cat", "dog"]
    legs: Literal[2, 4]


def test_t25_parse(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tiny", "messages": USER, "max_tokens": 90, "response_format": Animal}
    parsed = client.chat.completions.parse(**fields, extra_body={"max_whitespace": 1})
    animal = parsed.choices[0].message.parsed
    assert isinstance(animal, Animal)
    with client.chat.completions.stream(**fields, extra_body={"max_whitespace": 1}) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Animal)
    grammar = (parsed.choices[0].model_extra or {})["grammar"]
    assert grammar["engine"] in ("xgrammar", "llguidance")
    assert "not_enforced" not in grammar


def test_parse_of_a_cut_output(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="tiny", messages=USER, max_tokens=2, response_format=Animal)  # type: ignore[arg-type]


def test_a_schema_that_cannot_be_enforced(client: openai.OpenAI) -> None:
    items = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    schema = {"type": "object", "properties": {"a": items}, "required": ["a"]}

    def form(**strict: bool) -> dict[str, Any]:
        return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, **strict}}

    for asked in (form(), form(strict=True)):
        with pytest.raises(openai.BadRequestError, match="/properties/a") as refused:
            chat(client, response_format=asked)
        assert (refused.value.param, refused.value.code) == ("response_format", "grammar_error")
        with pytest.raises(openai.BadRequestError, match="/properties/a"):
            chat_stream(client, response_format=asked)
    reply = chat(client, response_format=form(strict=False))
    assert (reply.choices[0].model_extra or {})["grammar"]["not_enforced"]


# Tools.


@pytest.mark.parametrize("named", ["get_weather", "stop-it"])
def test_named_tool(client: openai.OpenAI, named: str) -> None:
    choice = {"type": "function", "function": {"name": named}}
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 150, "extra_body": NO_BLANKS}
    reply = chat(client, **fields)
    assert reply.choices[0].finish_reason == "tool_calls"
    assert reply.choices[0].message.content is None
    (call,) = reply.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == named
    arguments = json.loads(call.function.arguments)
    assert arguments == {} if named == "stop-it" else arguments["city"] in ("Rome", "Oslo")
    deltas = [
        one
        for chunk in chat_stream(client, **fields)
        for choice in chunk.choices
        for one in choice.delta.tool_calls or ()
    ]
    assert [(one.id is not None, one.function and one.function.name) for one in deltas[:1]] == [(True, named)]
    assert "".join(one.function.arguments or "" for one in deltas if one.function) == call.function.arguments
    assert {one.index for one in deltas} == {0}


def test_required_tools_one_at_a_time(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    reply = chat(client, **fields, max_tokens=150, extra_body=NO_BLANKS)
    assert len(reply.choices[0].message.tool_calls or []) == 1


def test_tools_that_may_be_called_and_those_that_may_not(client: openai.OpenAI) -> None:
    for choice in ("auto", "none"):
        reply = chat(client, tools=TOOLS, tool_choice=choice)
        assert reply.choices[0].message.content
        assert reply.choices[0].message.tool_calls is None
    plain = chat(client)
    assert chat(client, tools=TOOLS, tool_choice="none").choices[0].message.content == plain.choices[0].message.content


def test_tools_beside_a_schema(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    reply = chat(client, tools=TOOLS, response_format=form, max_tokens=200, extra_body=NO_BLANKS)
    message = reply.choices[0].message
    if message.tool_calls:
        json.loads(message.tool_calls[0].function.arguments)  # type: ignore[union-attr]
    else:
        assert json.loads(message.content or "")["a"] in (1, 2)


def test_a_conversation_with_calls(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "21 degrees"},
    ]
    assert chat(client, messages=messages, tools=TOOLS).choices[0].message.content
    call["function"] = {"name": "get_weather", "arguments": '{"city": '}
    with pytest.raises(openai.BadRequestError, match=r"messages\[1\].tool_calls\[0\].function.arguments"):
        chat(client, messages=messages, tools=TOOLS)


# Logprobs (scenario T18).


def test_chat_logprobs(client: openai.OpenAI) -> None:
    reply = chat(client, logprobs=True, top_logprobs=5, extra_body={"return_token_ids": True})
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 12 == len((reply.choices[0].model_extra or {})["token_ids"])
    for entry in logprobs.content:
        assert entry.logprob == entry.top_logprobs[0].logprob == max(top.logprob for top in entry.top_logprobs)
        assert len(entry.top_logprobs) == 5
        assert entry.bytes is None or bytes(entry.bytes).decode() == entry.token
    streamed = [
        one
        for chunk in chat_stream(client, logprobs=True, top_logprobs=5)
        for choice in chunk.choices
        if choice.logprobs is not None
        for one in choice.logprobs.content or ()
    ]
    assert streamed == logprobs.content


def test_t18_logprobs_of_a_constrained_choice(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 5, "extra_body": {"regex": "(yes|no)"}}
    raw = chat(client, **fields).choices[0].logprobs
    fields["extra_body"] |= {"logprobs_mode": "processed"}
    processed = chat(client, **fields).choices[0].logprobs
    assert raw is not None
    assert processed is not None
    for entry in processed.content or ():
        # What the grammar forbids has the finite floor, so that JSON can hold it.
        assert all(top.logprob >= -9999.0 for top in entry.top_logprobs)
    assert (processed.content or [])[0].logprob > (raw.content or [])[0].logprob


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
    ],
    ids=str,
)
def test_t18_logprobs_out_of_range(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, **fields)
    assert refused.value.param == param


def test_t18_logprobs_are_those_before_the_support_is_cut(client: openai.OpenAI) -> None:
    for mode in ("raw", "processed"):
        fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 5, "temperature": 0.5, "seed": 3}
        cut, whole = (
            chat(client, **fields, max_tokens=1, top_p=top_p, extra_body={"logprobs_mode": mode}).choices[0].logprobs
            for top_p in (0.3, 1)
        )
        assert cut is not None
        assert whole is not None
        assert (cut.content or [])[0].top_logprobs == (whole.content or [])[0].top_logprobs
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="tiny", prompt="a", max_tokens=1, logprobs=21)
    assert refused.value.param == "logprobs"


def test_t18_logprobs_without_the_likeliest(client: openai.OpenAI) -> None:
    logprobs = chat(client, logprobs=True).choices[0].logprobs
    assert logprobs is not None
    assert [entry.top_logprobs for entry in logprobs.content or ()] == [[]] * 12


# Requests that are refused.


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
    assert reply.json()["error"]["param"] == "prompt"


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


def open_requests(server: Server) -> int:
    count: int = httpx.get(f"{server.url}/health").json()["open_requests"]
    return count


# Streams that end early (scenarios T23, T25).


def test_t25_a_client_that_leaves(server: Server, client: openai.OpenAI) -> None:
    steady: dict[str, Any] = {}

    def run_steady() -> None:
        steady["beside"] = chat(client, max_tokens=60).choices[0].message.content

    fields: dict[str, Any] = {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}
    alone = chat(client, max_tokens=60).choices[0].message.content
    beside = threading.Thread(target=run_steady)
    with open_stream(client, **fields) as stream:
        beside.start()
        chunks = iter(stream)
        next(chunks)
        next(chunks)
    wait_until(lambda: open_requests(server) <= 1, 5, "the stream to be aborted")
    beside.join()
    assert steady["beside"] == alone
    with pytest.raises(openai.APITimeoutError):
        chat(client.with_options(timeout=0.3), **fields, n=20)
    wait_until(lambda: open_requests(server) == 0, 5, "the request to be aborted")


def exhaust(stream: Iterator[ChatCompletionChunk], taken: list[ChatCompletionChunk]) -> None:
    for chunk in stream:
        taken.append(chunk)  # noqa: PERF402 - what came before an error counts


def test_t25_an_error_in_mid_stream(client: openai.OpenAI, http: httpx.Client) -> None:
    calls = [{"name": "FailsLate", "args": {"after": 3}}]
    fields: dict[str, Any] = {"extra_body": {"logit_processors": calls, "ignore_eos": True}}
    with pytest.raises(openai.APIError, match="logit processor FailsLate failed: RuntimeError: broken") as broken:
        chat_stream(client, **fields)
    assert broken.value.code == "sampling_error"
    taken: list[ChatCompletionChunk] = []
    stream = iter(open_stream(client, **fields, logprobs=True))
    with pytest.raises(openai.APIError):
        exhaust(stream, taken)
    assert sum(len(choice.logprobs.content or ()) for one in taken for choice in one.choices if choice.logprobs) == 3
    body = {"messages": USER, "max_tokens": 9, "stream": True} | fields["extra_body"]
    events = http.post("/v1/chat/completions", json=body).text.strip().split("\n\n")
    assert json.loads(events[-1].removeprefix("data: "))["error"]["type"] == "invalid_request_error"
    with pytest.raises(openai.UnprocessableEntityError):
        chat(client, **fields)


@pytest.mark.parametrize("stop", [["DEFGHIJ"], ["b,c"], ["😀"]], ids=str)
def test_t23_stop_strings_over_several_tokens(client: openai.OpenAI, stop: list[str]) -> None:
    body = "ABCDEFGHIJK a,b,c,d 😀 end"
    fields: dict[str, Any] = {"stop": stop, "extra_body": {"choice": [body]}, "max_tokens": 60}
    whole = chat(client, **fields).choices[0]
    assert whole.message.content == body[: body.index(stop[0])]
    assert whole.finish_reason == "stop"
    chunks = chat_stream(client, **fields, logprobs=True)
    assert text_of(chunks) == whole.message.content
    told = chat(client, **fields, logprobs=True).choices[0].logprobs
    assert told is not None
    assert [
        one for chunk in chunks for choice in chunk.choices if choice.logprobs for one in choice.logprobs.content or ()
    ] == told.content
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert not any("\N{REPLACEMENT CHARACTER}" in text for text in texts)


def test_t23_text_that_only_began_like_a_stop_string_is_released(client: openai.OpenAI) -> None:
    body = "ABCDEFG"
    fields: dict[str, Any] = {"stop": ["CDEX", "FGH"], "extra_body": {"choice": [body]}, "max_tokens": 60}
    whole = chat(client, **fields).choices[0]
    assert (whole.message.content, whole.finish_reason) == (body, "stop")
    assert text_of(chat_stream(client, **fields)) == body


def test_a_grammar_that_is_cut(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"extra_body": {"regex": "[a-c]{20}"}, "max_tokens": 4}
    cut = chat(client, **fields).choices[0]
    assert cut.finish_reason == "length"
    assert re.fullmatch("[a-c]{1,19}", cut.message.content or "")
    assert text_of(chat_stream(client, **fields)) == cut.message.content


def test_every_event_has_a_finish_reason(http: httpx.Client) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": USER, "max_tokens": 3, "stream": True, "n": 2}),
        ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 3, "stream": True}),
    ):
        choices = [choice for event in events_of(http, path, body) for choice in event["choices"]]
        assert all("finish_reason" in choice for choice in choices)
        assert [choice["finish_reason"] for choice in choices].count("length") == 2


def test_t23_a_prompt_that_ends_in_half_a_character(client: openai.OpenAI, http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"prompt": "😀"}).json()["tokens"]
    assert len(ids) == 4
    fields: dict[str, Any] = {"model": "tiny", "prompt": [ids[:2]], "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**fields).choices[0].text
    parts = [choice.text for chunk in client.completions.create(**fields, stream=True) for choice in chunk.choices]
    assert "".join(parts) == whole


# A mixed batch (scenario T12), texts and tokens.


def test_t12_rows_of_a_mixed_batch(client: openai.OpenAI) -> None:
    jobs: list[dict[str, Any]] = [
        {"max_tokens": 20},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}, "max_tokens": 60},
        {"max_tokens": 30, "extra_body": {"ignore_eos": True}},
        {"extra_body": {"regex": "[a-c]{10}-[0-9]{9}"}, "max_tokens": 40},
        {"messages": [{"role": "user", "content": "a longer prompt that joins later " * 3}], "max_tokens": 20},
    ]
    alone = [chat(client, **job).choices[0] for job in jobs]
    together: dict[int, Any] = {}

    def run(index: int) -> None:
        together[index] = chat(client, **jobs[index]).choices[0]

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(jobs))]
    for thread in threads[:-1]:
        thread.start()
    # A row has left, the others have moved up, and a prefill joins them.
    threads[1].join()
    threads[-1].start()
    for thread in threads:
        thread.join()
    for index, choice in enumerate(alone):
        assert together[index].message.content == choice.message.content
        assert together[index].finish_reason == choice.finish_reason


@pytest.mark.parametrize("size", [2, 3, 7, 9, 33])
def test_t24_a_prompt_alone_and_in_a_batch(client: openai.OpenAI, size: int) -> None:
    prompts = [f"{number} One two" for number in range(-(-size // 3) if size == 33 else size)]
    fields: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 8}
    alone = client.completions.create(**fields, prompt=prompts[0]).choices[0].text
    reply = client.completions.create(**fields, prompt=prompts, n=size // len(prompts))
    assert len(reply.choices) == size
    assert reply.choices[0].text == alone


def test_tokenize_and_back(http: httpx.Client) -> None:
    reply = http.post("/tokenize", json={"prompt": "One two 😀"}).json()
    assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"])
    assert reply["max_model_len"] == 2048
    assert http.post("/detokenize", json={"tokens": reply["tokens"]}).json() == {"prompt": "One two 😀"}
    messages = http.post("/tokenize", json={"messages": USER}).json()
    text = http.post("/detokenize", json={"tokens": messages["tokens"]}).json()["prompt"]
    assert text == "<user>One two\n<assistant>"
    for path, body in (("/tokenize", {}), ("/tokenize", {"prompt": "a", "x": 1}), ("/detokenize", {"tokens": [999]})):
        assert http.post(path, json=body).status_code == 400


def test_score(http: httpx.Client, client: openai.OpenAI) -> None:
    generated = client.completions.create(
        model="tiny", prompt="One two", temperature=0, max_tokens=5, logprobs=0, extra_body={"return_token_ids": True}
    ).choices[0]
    prompt = http.post("/tokenize", json={"prompt": "One two"}).json()["tokens"]
    ids = (generated.model_extra or {})["token_ids"]
    reply = http.post("/v1/score", json={"prompt": [[*prompt, *ids], "a b"], "prompt_logprobs": 2}).json()
    first, second = reply["data"]
    assert (first["index"], second["index"]) == (0, 1)
    assert first["prompt_logprobs"][0] is None
    scored = [entry["logprob"] for entry in first["prompt_logprobs"][-5:]]
    assert generated.logprobs is not None
    assert scored == pytest.approx(generated.logprobs.token_logprobs, abs=1e-4)
    assert reply["usage"]["prompt_tokens"] == len(prompt) + 5 + second["usage"]["prompt_tokens"]
    assert http.post("/v1/score", json={"prompt": "a", "regex": "a"}).status_code == 400


@pytest.mark.parametrize(
    "field",
    [{"max_tokens": 5}, {"stop": "x"}, {"seed": 1}, {"top_p": 0.5}, {"min_p": 0}, {"filter_order": "joint"}, {"n": 2}],
    ids=str,
)
def test_a_score_refuses_what_only_generating_has(http: httpx.Client, field: dict[str, Any]) -> None:
    reply = http.post("/v1/score", json={"prompt": "a"} | field)
    (name,) = field
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, name), reply.text
    assert http.post("/v1/score", json={"prompt": "a", name: None}).status_code == 200


def test_extensions_in_a_reply(client: openai.OpenAI) -> None:
    asked = {"prompt_logprobs": 1, "logprob_token_ids": [7], "return_support": True, "return_token_ids": True}
    choice = client.completions.create(
        model="tiny", prompt="One two", max_tokens=2, seed=1, extra_body=asked | {"top_k": 3}
    ).choices[0]
    extra = choice.model_extra or {}
    assert extra["prompt_logprobs"][0] is None
    assert len(extra["token_ids"]) == 2
    assert choice.logprobs is not None
    told = choice.logprobs.model_extra or {}
    assert [named["token_id"] for entry in told["named_logprobs"] for named in entry] == [7, 7]
    assert all(len(support["token_ids"]) == 3 for support in told["supports"])


def test_the_document(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/score", "/tokenize", "/detokenize"):
        assert "post" in document["paths"][path]
    chat_fields = document["components"]["schemas"]["ChatRequest"]
    assert {"temperature", "regex", "tools", "messages", "priority"} <= chat_fields["properties"].keys()
    assert chat_fields["additionalProperties"] is False


def test_the_load_generator(server: Server, tmp_path: Path) -> None:
    """Every request it sends is served; what it counts is what the server's own metrics count."""
    before = generated_tokens(server)
    figures = tmp_path / "figures.json"
    load = ("--requests", "10", "--concurrency", "5", "--prompt-words", "4", "--prefix-words", "16")
    command = (*LOCKSTEP, "bench", "serve", f"{server.url}/v1", *load, "--max-tokens", "60", "--json", str(figures))
    outcome = run(*command, environ={API_KEY: server.key})
    assert outcome.returncode == 0, outcome.stderr + outcome.stdout
    report = json.loads(figures.read_text())
    assert (report["model"], report["errors"]) == ("tiny", {})
    assert report["all"]["finished"] == 10 == report["plain"]["finished"] + report["constrained"]["finished"]
    assert report["all"]["output_tokens"] == generated_tokens(server) - before
    for name in ("first_token", "inter_token", "per_token", "end_to_end"):
        spread = report["constrained"][name]
        assert 0 < spread["median_ms"] <= spread["p90_ms"] <= spread["p99_ms"]
    assert "10 of 10" in outcome.stdout


def generated_tokens(server: Server) -> float:
    with server.http() as http:
        text = http.get("/metrics").text
    (line,) = [line for line in text.splitlines() if line.startswith("lockstep:generation_tokens_total ")]
    return float(line.split()[1])


def test_the_load_generator_tells_errors(server: Server) -> None:
    address = f"{server.url}/v1"
    wrong = run(*LOCKSTEP, "bench", "serve", address, environ={API_KEY: "third-key"})
    assert (wrong.returncode, "401" in wrong.message) == (ExitCode.USAGE, True), wrong.stderr
    load = ("--model", "other", "--requests", "3", "--rate", "50")
    failed = run(*LOCKSTEP, "bench", "serve", address, *load, environ={API_KEY: server.key})
    assert failed.returncode == ExitCode.REQUESTS_FAILED
    assert "3 x http_404: " in failed.stdout
    assert "model_not_found" in failed.stdout


@pytest.mark.parametrize(
    ("phases", "least"),
    [
        (("--phases", "fuzzing", "--max-examples", "8", "--generation-deterministic"), 50),
        pytest.param(
            ("--phases", "coverage,fuzzing", "--max-examples", "150"),
            2000,
            marks=[pytest.mark.sweep, pytest.mark.timeout(1900)],
        ),
    ],
    ids=["few", "many"],
)
def test_replies_to_anything_are_as_documented(
    server: Server, phases: tuple[str, ...], least: int, tmp_path: Path
) -> None:
    """Requests made from the document, right and wrong: no fault of the program, no reply that it does not tell of."""
    checks = (
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_schema_conformance",
    )
    command = (sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--no-color")
    options = (
        "--header",
        f"Authorization: Bearer {server.key}",
        "--checks",
        ",".join(checks),
        "--request-timeout",
        "60",
    )
    outcome = subprocess.run(
        [*command, *options, *phases], cwd=tmp_path, capture_output=True, text=True, timeout=1800, check=False
    )
    assert outcome.returncode == 0, outcome.stdout[-4000:]
    cases = re.search(r"(\d+) generated, (\d+) passed", outcome.stdout)
    assert cases is not None
    assert int(cases[1]) == int(cases[2]) >= least, outcome.stdout[-4000:]
    assert httpx.get(f"{server.url}/health").json()["status"] == "ok"
