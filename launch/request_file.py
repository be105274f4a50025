"""Requests of an offline batch: from the command line, a JSONL file or stdin."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgspec

from grammar_sync.json_text import DuplicateKeyError, parse_json
from grammar_sync.spec import GRAMMAR_FIELDS
from launch.cli.parse import UsageError
from launch.commands import GenerateCommand
from runtime.messages import ErrorInfo
from runtime.thinking_fields import THINKING_FIELDS


@dataclass(frozen=True)
class InputRequest:
    """One request of the input.

    Args:
        user_id: The line's ``id``, whatever it is; ``line-N`` where there is none.
        body: What the leader is sent, a JSON object; None when the line is no request.
        error: What is wrong with the line, if something is.
    """

    user_id: Any
    body: str | None
    error: ErrorInfo | None = None


@dataclass(frozen=True)
class InputLine:
    """One line of a JSONL file.

    Args:
        user_id: The line's ``id``, whatever it is; ``line-N`` where there is none.
        fields: What it holds; None when it is no JSON object.
        error: What is wrong with the line, if something is.
    """

    user_id: Any
    fields: dict[str, Any] | None
    error: ErrorInfo | None = None


def read_requests(command: GenerateCommand) -> Iterator[InputRequest]:
    """Yields the requests in input order, with the command line's defaults where a line does not say.

    Raises:
        UsageError: The input file cannot be read.
    """
    if command.input_file is None:
        for number, prompt in enumerate(command.prompts, 1):
            text: dict[str, Any] = (
                {"messages": [{"role": "user", "content": prompt}]} if command.chat else {"prompt": prompt}
            )
            yield InputRequest(f"prompt-{number}", json.dumps(command.defaults | text))
        return
    for number, line in enumerate(read_lines(command.input_file), 1):
        yield _request(line, number, command.defaults)


def read_lines(name: str) -> Iterator[InputLine]:
    """Yields the lines of a JSONL file (``-``: of stdin) in order, empty ones left out.

    Raises:
        UsageError: The file cannot be read.
    """
    with _open(name) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _parse_line(line, number)


@contextmanager
def _open(name: str) -> Iterator[BinaryIO]:
    if name == "-":
        yield sys.stdin.buffer
        return
    try:
        file = open(name, "rb")  # noqa: PTH123, SIM115
    except OSError as error:
        raise UsageError(f"--input {name}: {error.strerror}") from error
    with file:
        yield file


def _parse_line(line: bytes, number: int) -> InputLine:
    user_id: Any = f"line-{number}"
    try:
        # A byte order mark may stand before the first line.
        value, ambiguity = _parsed(line.decode("utf-8-sig"))
    except RecursionError:
        return InputLine(user_id, None, ErrorInfo("invalid_request", f"line {number} is nested too deeply"))
    except ValueError as error:
        return InputLine(user_id, None, ErrorInfo("invalid_request", f"line {number} is no JSON: {error}"))
    if not isinstance(value, dict):
        message = f"line {number} is no JSON object: {line.decode('utf-8-sig').strip()[:40]}"
        return InputLine(user_id, None, ErrorInfo("invalid_request", message))
    if "id" in value:
        given_id = value["id"]
        try:
            # Neither NaN, nor a lone surrogate, nor an integer beyond 64 bits can be written back.
            json.dumps(given_id, allow_nan=False)
            msgspec.json.encode(given_id)
        except (ValueError, OverflowError, RecursionError) as error:
            message = f"line {number}: its id cannot be echoed: {error}"
            return InputLine(user_id, None, ErrorInfo("invalid_request", message, "id"))
        user_id = given_id
    if ambiguity is not None:
        return InputLine(user_id, None, ErrorInfo("invalid_request", f"line {number}: {ambiguity}", ambiguity.field))
    return InputLine(user_id, value)


def _parsed(text: str) -> tuple[Any, DuplicateKeyError | None]:
    """Returns what JSON text says, of a key that stands twice the last, and what is ambiguous about it."""
    try:
        return parse_json(text), None
    except DuplicateKeyError as error:
        return json.loads(text), error


def _request(line: InputLine, number: int, defaults: dict[str, Any]) -> InputRequest:
    if line.fields is None:
        return InputRequest(line.user_id, None, line.error)
    try:
        return InputRequest(line.user_id, json.dumps(_with_defaults(line.fields, defaults)))
    except RecursionError:
        error = ErrorInfo("invalid_request", f"line {number} is nested too deeply")
        return InputRequest(line.user_id, None, error)


def _with_defaults(fields: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Returns ``fields`` with defaults where it does not say.

    A grammar of its own replaces the default one, and a request that will not think has none of the others' wishes. A
    null says nothing, but stays where there is no default: its name may be unknown.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    # json_object: false is no grammar; json_schema: false is one that nothing matches.
    if any(name in given and not (name == "json_object" and given[name] is False) for name in GRAMMAR_FIELDS):
        defaults = {name: value for name, value in defaults.items() if name not in GRAMMAR_FIELDS}
    if given.get("enable_thinking") is False:
        defaults = {name: value for name, value in defaults.items() if name not in THINKING_FIELDS}
    return fields | defaults | given
