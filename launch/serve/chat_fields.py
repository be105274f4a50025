"""A request of /v1/chat/completions in the engine's own fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from grammar_sync.spec import GRAMMAR_FIELDS
from launch.serve.errors import HttpError
from launch.serve.fields import CommonFields, refuse_stored
from launch.serve.tools import ToolChoice, ToolFields, ToolUse, calls_or_schema, read_calls, tool_use


class SchemaFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A schema as OpenAI's clients send it.

    Args:
        name: Its name.
        description: What it is for.
        schema: The schema.
        strict: Whether a schema of which a part cannot be enforced is refused; it is where this is left out.
    """

    name: str
    schema: dict[str, Any] | bool
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What form the answer has.

    Args:
        type: Any text, any JSON object, or a value of a schema.
        json_schema: The schema.
    """

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFields | None = None


class ChatFields(CommonFields, frozen=True, kw_only=True):
    """What /v1/chat/completions takes beside the engine's own fields.

    Args:
        messages: The conversation.
        max_completion_tokens: Tokens to generate at most; ``max_tokens`` is its older name.
        response_format: What form the answer has.
        tools: What may be called.
        tool_choice: Which of them may or must be called.
        parallel_tool_calls: Whether several may be called at once.
        logprobs: Whether the logprobs of the tokens are told.
        top_logprobs: Of how many of the likeliest tokens too, 0 to 20.
    """

    messages: Any = None
    max_completion_tokens: int | None = None
    response_format: ResponseFormat | None = None
    tools: tuple[ToolFields, ...] = ()
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: int | None = None


@dataclass(frozen=True)
class ChatJob:
    """What the leader is asked.

    Args:
        fields: The engine's own.
        calls: Whether the output may call tools.
        is_all_or_none: Whether an output that begins as calls do is one, and not an answer.
        param_names: What the client called the engine's fields, and places in them, where it differs.
    """

    fields: dict[str, Any]
    calls: bool
    is_all_or_none: bool
    param_names: Mapping[str, str]


def chat_job(chat: ChatFields, rest: dict[str, Any]) -> ChatJob:
    """Returns what the leader is asked for a request.

    Args:
        chat: The endpoint's fields.
        rest: The others.

    Raises:
        HttpError: Fields contradict each other.
    """
    refuse_stored(chat)
    if chat.messages is None:
        raise HttpError(400, "messages are missing: a list of at least one message is needed", param="messages")
    fields = rest | {"messages": read_calls(chat.messages)}
    names: dict[str, str] = {}
    if chat.max_completion_tokens is not None:
        if rest.get("max_tokens") not in (None, chat.max_completion_tokens):
            message = f"max_tokens is {rest['max_tokens']} and max_completion_tokens {chat.max_completion_tokens}"
            raise HttpError(400, f"{message}: give one of them", param="max_completion_tokens")
        fields["max_tokens"] = chat.max_completion_tokens
        names["max_tokens"] = "max_completion_tokens"
    if chat.top_logprobs is not None and not chat.logprobs:
        raise HttpError(400, "top_logprobs is given, but logprobs is not true", param="top_logprobs")
    if chat.logprobs:
        fields["logprobs"] = chat.top_logprobs or 0
        names["logprobs"] = "top_logprobs"
    use = tool_use(chat.tools, chat.tool_choice, parallel=chat.parallel_tool_calls)
    fields |= _grammar(chat, use, rest, names)
    if use is not None:
        fields["tools"] = use.tools
    schema, _ = _schema(chat.response_format)
    is_all_or_none = use is not None and (not use.may_answer or schema is not None)
    return ChatJob(fields, use is not None, is_all_or_none, names)


def _grammar(chat: ChatFields, use: ToolUse | None, rest: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Returns the grammar fields that follow from response_format and tools."""
    found: dict[str, Any] = {}
    schema, strict = _schema(chat.response_format)
    if use is not None:
        given = [name for name in GRAMMAR_FIELDS if rest.get(name)]
        if given:
            raise HttpError(400, f"{given[0]} is given together with tools that may be called", param=given[0])
        names["structural_tag"] = "tools"
        if use.is_strict is not None:
            strict = use.is_strict if strict is None else use.is_strict and strict
        or_schema = schema is not None and use.may_answer
        names |= use.places(or_schema=or_schema)
        form = calls_or_schema(use, schema) if or_schema else use.output
        found["structural_tag"] = {"type": "structural_tag", "format": form}
    elif schema is not None and chat.response_format is not None:
        names |= {"json_schema": "response_format", "json_object": "response_format"}
        is_object = chat.response_format.type == "json_object"
        found |= {"json_object": True} if is_object else {"json_schema": schema}
    if strict is not None and rest.get("strict") is None:
        found["strict"] = strict
    return found


def _schema(form: ResponseFormat | None) -> tuple[Any, bool | None]:
    """Returns the schema of an answer, None for any text, and whether it is strict, if that is said."""
    if form is not None and form.type != "json_schema" and form.json_schema is not None:
        message = f"response_format.json_schema is given, but response_format.type is {form.type}"
        raise HttpError(400, message, param="response_format")
    if form is None or form.type == "text":
        return None, None
    if form.type == "json_object":
        return {"type": "object"}, None
    if form.json_schema is None:
        message = "response_format.json_schema is missing: an object with name and schema is needed"
        raise HttpError(400, message, param="response_format")
    return form.json_schema.schema, form.json_schema.strict
