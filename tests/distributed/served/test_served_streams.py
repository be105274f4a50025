"""Streams that end early over real HTTP, stop strings (scenarios T23, T25), and rows of a mixed batch (T12, T24)."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from chat_requests import (
    SCHEMA,
    USER,
    chat,
    chat_stream,
    events_of,
    open_requests,
    open_stream,
    text_of,
)
from command_line import wait_until
from http_server import Server
from openai.types.chat import ChatCompletionChunk

pytestmark = pytest.mark.long(45)


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
