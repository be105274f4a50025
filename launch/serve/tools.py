"""Tools: what an output may be when it may call them, and the calls in an output."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from launch.serve.errors import HttpError
from runtime.tool_prompt import CALL_END, TOOL_CALL_START, call_begin
from sampler.shown_value import shown

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_BEGIN: Final = re.compile(re.escape(TOOL_CALL_START) + r'\n\{"name": "(?P<name>[^"]*)", "arguments": ')
_NAMED: Final = re.compile(re.escape(TOOL_CALL_START) + r'\n\{"name": "(?P<name>[^"]*)"')
_ANY_OBJECT: Final = {"type": "object"}
_ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_FIELDS: Final = ("name", "tool_call_id")
_MESSAGE_FIELDS: Final = (
    *("role", "content", *_TEXT_FIELDS, "tool_calls", "reasoning_content", "reasoning"),
    # What assistant messages have when a client sends back what it got.
    *("refusal", "annotations", "audio", "function_call", "parsed"),
)


class FunctionFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function that may be called.

    Args:
        name: Letters, digits, ``_``, ``.`` and ``-``, at most 64.
        description: What it does, for the model.
        parameters: The schema of its arguments.
        strict: Whether a schema of which a part cannot be enforced is refused.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool: a function."""

    function: FunctionFields
    type: Literal["function"] = "function"


class FunctionName(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function, by its name."""

    name: str


class NamedTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tool that must be called."""

    function: FunctionName
    type: Literal["function"] = "function"


ToolChoice = Literal["none", "auto", "required"] | NamedTool


@dataclass(frozen=True)
class ToolUse:
    """What a request wants of tools.

    Args:
        tools: Those that may be called, as the chat template is told of them.
        output: What the output may be, as a format of a structural tag.
        is_strict: Whether what cannot be enforced is refused; None when the request does not say.
        may_answer: Whether it may also be a plain answer.
        positions: Where in the request's tools those stand that may be called.
    """

    tools: list[dict[str, Any]]
    output: dict[str, Any]
    is_strict: bool | None
    may_answer: bool
    positions: tuple[int, ...]

    def places(self, *, or_schema: bool) -> dict[str, str]:
        """Returns, by its place in the grammar, what the client calls a schema in it.

        Args:
            or_schema: Whether the output may be a value of ``response_format`` too.
        """
        start = "structural_tag: /format" + ("/elements/0" if or_schema else "")
        found = {
            f"{start}/tags/{tag}/content/json_schema": f"tools[{position}].function.parameters"
            for tag, position in enumerate(self.positions)
        }
        if or_schema:
            found["structural_tag: /format/elements/1/json_schema"] = "response_format.json_schema.schema"
        return found


def tool_use(tools: Sequence[ToolFields], choice: ToolChoice | None, *, parallel: bool) -> ToolUse | None:
    """Returns what a request wants of tools; None when none may be called.

    Args:
        tools: Those of the request.
        choice: Which may or must be called; None = any may.
        parallel: Whether several may be called at once.

    Raises:
        HttpError: A name is wrong or given twice, parameters are of no object, or the tool that must be called is not
            there.
    """
    names = [tool.function.name for tool in tools]
    for position, name in enumerate(names):
        if not _NAME.fullmatch(name):
            message = f"tools[{position}].function.name is {name[:80]!r}: 1 to 64 of A-Z a-z 0-9 _ . - are needed"
            raise HttpError(400, message, param="tools")
        if name in names[:position]:
            raise HttpError(400, f"tools[{position}].function.name repeats {name!r}", param="tools")
        _check_parameters(tools[position].function.parameters, f"tools[{position}].function.parameters")
    must = choice == "required" or isinstance(choice, NamedTool)
    if not tools:
        if must or choice == "auto":
            raise HttpError(400, "tool_choice is given, but there are no tools", param="tool_choice")
        return None
    if choice == "none":
        return None
    chosen = list(tools)
    if isinstance(choice, NamedTool):
        chosen = [tool for tool in tools if tool.function.name == choice.function.name]
        if not chosen:
            message = f"tool_choice names {choice.function.name[:80]!r}: the tools are {', '.join(names)}"
            raise HttpError(400, message, param="tool_choice")
        parallel = False
    tags = [_tag(tool.function) for tool in chosen]
    form = (
        {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True}
        if must
        else {"type": "triggered_tags", "triggers": [TOOL_CALL_START], "tags": tags, "at_least_one": False}
    )
    said = [tool.function.strict for tool in chosen if tool.function.strict is not None]
    return ToolUse(
        tools=[_told(tool) for tool in tools],
        output=form | {"stop_after_first": not parallel},
        is_strict=all(said) if said else None,
        may_answer=not must,
        positions=tuple(names.index(tool.function.name) for tool in chosen),
    )


def calls_or_schema(use: ToolUse, schema: Any) -> dict[str, Any]:
    """Returns the format of an output that either calls tools or is a value of ``schema``."""
    calls = {**use.output, "type": "tags_with_separator", "separator": "\n", "at_least_one": True}
    calls.pop("triggers", None)
    return {"type": "or", "elements": [calls, {"type": "json_schema", "json_schema": schema}]}


@dataclass(frozen=True)
class CallPart:
    """Part of an output: of its plain text (``call`` is None), or of a call.

    Args:
        call: Which call, counted from 0.
        name: The function, at the call's beginning.
        text: Text, or JSON text of arguments.
    """

    call: int | None = None
    name: str | None = None
    text: str = ""


class CallParser:
    """Finds the calls in an output that comes piece by piece.

    Args:
        is_all_or_none: Whether an output that begins as calls do is one: there is no answer that might.

    Attributes:
        calls: How many there are so far.
        is_cut: Whether the output ended within a call.
    """

    def __init__(self, *, is_all_or_none: bool = False) -> None:
        self.calls = 0
        self.is_cut = False
        self._is_all_or_none = is_all_or_none
        self._has_text = False
        self._held = ""
        self._in_call = False
        self._arguments = ""

    def feed(self, text: str) -> Iterator[CallPart]:
        """Yields what can be told now."""
        self._held += text
        while (part := self._next()) is not None:
            if part.text or part.name is not None:
                yield part

    def finish(self) -> Iterator[CallPart]:
        """Yields what was held back, the output having ended.

        Of a call that was cut before its name was whole nothing can be told: how calls are written is no answer.
        """
        held, self._held = self._held, ""
        begins = self._is_all_or_none and not self._has_text and bool(held)
        self.is_cut = self._in_call or held.startswith(TOOL_CALL_START) or begins
        if not self.is_cut:
            if held:
                yield self._part(held)
        elif not self._in_call:
            begun = _NAMED.match(held)
            if begun is not None:
                yield self._begin(begun["name"])
        elif held and not _is_json(self._arguments):
            # What may begin the end of a call, behind arguments that are not whole, belongs to them.
            yield self._part(held)

    def _next(self) -> CallPart | None:
        if self._in_call:
            end = self._held.find(CALL_END)
            if end < 0:
                return self._release(CALL_END)
            part, self._held = self._part(self._held[:end]), self._held[end + len(CALL_END) :]
            self._in_call = False
            return part
        start = self._held.find(TOOL_CALL_START)
        if start < 0:
            return self._release(TOOL_CALL_START)
        if start > 0:
            part, self._held = self._part(self._held[:start]), self._held[start:]
            return part
        begun = _BEGIN.match(self._held)
        if begun is None:
            return None
        self._held = self._held[begun.end() :]
        return self._begin(begun["name"])

    def _begin(self, name: str) -> CallPart:
        self._in_call = True
        self._arguments = ""
        self.calls += 1
        return CallPart(self.calls - 1, name)

    def _release(self, marker: str) -> CallPart | None:
        """Returns the held text but for an end of it that may begin ``marker``."""
        longest = min(len(marker) - 1, len(self._held))
        kept = next((size for size in range(longest, 0, -1) if self._held.endswith(marker[:size])), 0)
        text, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return self._part(text) if text else None

    def _part(self, text: str) -> CallPart:
        if self._in_call:
            self._arguments += text
            return CallPart(self.calls - 1, None, text)
        # Blanks between two calls only part them.
        told = "" if self.calls and not text.strip() else text
        self._has_text = self._has_text or bool(told)
        return CallPart(text=told)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _check_parameters(schema: dict[str, Any] | None, where: str) -> None:
    if schema is not None and schema.get("type", "object") != "object":
        message = f"{where}/type is {shown(schema['type'])}: arguments are an object, so 'object' is needed, or no type"
        raise HttpError(400, message, param="tools")


def _tag(function: FunctionFields) -> dict[str, Any]:
    # Arguments are an object, whether the schema says so or not.
    content = {"type": "json_schema", "json_schema": _ANY_OBJECT | (function.parameters or {})}
    return {"type": "tag", "begin": call_begin(function.name), "content": content, "end": CALL_END}


def _told(tool: ToolFields) -> dict[str, Any]:
    function = {"name": tool.function.name}
    if tool.function.description is not None:
        function["description"] = tool.function.description
    return {"type": "function", "function": function | {"parameters": tool.function.parameters or _ANY_OBJECT}}


def read_calls(messages: Any) -> Any:
    """Returns messages whose calls have their arguments as objects, as chat templates expect, not as JSON text.

    Raises:
        HttpError: A message has a role or a field that is unknown or of a wrong type, or arguments are no JSON object.
    """
    if not isinstance(messages, list):
        return messages
    return [_read_call(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _check_message(message: dict[str, Any], where: str) -> None:
    if "role" in message and message["role"] not in _ROLES:
        text = f"{where}.role is {shown(message['role'])}: one of {', '.join(_ROLES)} is needed"
        raise HttpError(400, text, param="messages")
    for name, value in message.items():
        if name not in _MESSAGE_FIELDS:
            text = f"{where}: unknown field {name[:80]}: {', '.join(_MESSAGE_FIELDS)} are known"
            raise HttpError(400, text, param="messages")
        if value is not None and name in _TEXT_FIELDS and not isinstance(value, str):
            raise HttpError(400, f"{where}.{name} is {shown(value)}: a string is needed", param="messages")
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise HttpError(400, f"{where}.tool_calls is {shown(calls)}: a list of calls is needed", param="messages")


def _read_call(message: Any, where: str) -> Any:
    if not isinstance(message, dict):
        return message
    _check_message(message, where)
    if message.get("role") == "developer":
        message = {**message, "role": "system"}
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    read = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        place = f"{where}.tool_calls[{index}].function"
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise HttpError(400, f"{place}: an object with name and arguments is needed", param="messages")
        try:
            arguments = json.loads(function.get("arguments", ""))
        except (TypeError, ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise HttpError(400, f"{place}.arguments: the JSON text of an object is needed", param="messages")
        read.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": read}
