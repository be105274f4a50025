"""What the endpoints answer over real HTTP, asked by the real ``openai`` client."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from chat_requests import (
    NO_BLANKS,
    SCHEMA,
    TOOLS,
    USER,
    chat,
    chat_stream,
    events_of,
    text_of,
)
from http_server import Server
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

pytestmark = pytest.mark.long(45)


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
