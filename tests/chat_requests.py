"""What tests ask a server of ``lockstep serve``, as the ``openai`` client does."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
from http_server import Server
from openai.types.chat import ChatCompletion, ChatCompletionChunk

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


def events_of(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the events of a stream that came to its end."""
    *events, end = http.post(path, json=body).text.strip().split("\n\n")
    assert end == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def open_requests(server: Server) -> int:
    count: int = httpx.get(f"{server.url}/health").json()["open_requests"]
    return count
