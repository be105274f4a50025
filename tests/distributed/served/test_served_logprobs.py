"""Logprobs over real HTTP (scenario T18)."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from chat_requests import (
    chat,
    chat_stream,
)

pytestmark = pytest.mark.long(45)


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
