"""Tools in a prompt: how calls are written, and messages with tools for templates that know none.

A call is written as a JSON object with name and arguments on a line between ``<tool_call>`` and ``</tool_call>``, as
the Hermes and Qwen families were trained to. What a server makes of a model's output, and what a model without a
template for tools is told, follow from this one form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

TOOL_CALL_START = "<tool_call>"
TOOL_CALL_END = "</tool_call>"


def call_begin(name: str) -> str:
    """Returns what stands before the arguments of a call of ``name``."""
    return f'{TOOL_CALL_START}\n{{"name": {json.dumps(name)}, "arguments": '


CALL_END = f"}}\n{TOOL_CALL_END}"
"""What stands behind the arguments of a call; no JSON value holds it, since line ends in strings are escaped."""


def speaks_of_tools(messages: Any, tools: Any) -> bool:
    """Returns whether a template must know of tools to render these."""
    calls = isinstance(messages, list) and any(
        isinstance(message, dict) and message.get("tool_calls") for message in messages
    )
    return calls or bool(tools)


def messages_for_plain_template(messages: Any, tools: Sequence[Mapping[str, Any]] | None) -> Any:
    """Returns messages that a template without tools can take: signatures in the system message, calls as text.

    What is no list of objects is returned as it is; the template's own checks refuse it.
    """
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return messages
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    instruction = (
        f"You may call one or more functions. Their signatures are:\n<tools>\n{signatures}\n</tools>\n"
        "Write each call as a JSON object with the function's name and arguments:\n"
        f'{TOOL_CALL_START}\n{{"name": <function>, "arguments": <object>}}\n{TOOL_CALL_END}'
    )
    if plain and plain[0].get("role") == "system" and isinstance(plain[0].get("content"), str):
        head = {**plain[0], "content": f"{plain[0]['content']}\n\n{instruction}"}
        return [head, *plain[1:]]
    return [{"role": "system", "content": instruction}, *plain]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    texts = [content] if isinstance(content := message.get("content"), str) and content else []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            return message
        arguments = json.dumps(function.get("arguments"), ensure_ascii=False)
        texts.append(f"{call_begin(str(function.get('name')))}{arguments}{CALL_END}")
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return rest | {"content": "\n".join(texts)}
