"""Outputs of a form over real HTTP: schemas as the ``openai`` client sends them, and calls of tools."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import openai
import pytest
from chat_requests import (
    NO_BLANKS,
    SCHEMA,
    TOOLS,
    USER,
    chat,
    chat_stream,
    text_of,
)
from pydantic import BaseModel

pytestmark = pytest.mark.long(45)


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


def test_a_grammar_that_is_cut(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"extra_body": {"regex": "[a-c]{20}"}, "max_tokens": 4}
    cut = chat(client, **fields).choices[0]
    assert cut.finish_reason == "length"
    assert re.fullmatch("[a-c]{1,19}", cut.message.content or "")
    assert text_of(chat_stream(client, **fields)) == cut.message.content
