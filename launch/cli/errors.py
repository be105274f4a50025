"""What is wrong with an option of the command line, said as it is said of a request's field."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter, ValidationError
from typer import BadParameter
from typer.core import TyperArgument, TyperOption
from typer.exceptions import TyperException

from sampler.shown_value import shown

_KINDS = {"integer": "an integer", "number": "a number"}


def worded(error: TyperException) -> str:
    """Returns an error of the command line; where a value is at fault with its option and what is allowed."""
    cause = error.__cause__
    if not isinstance(error, BadParameter) or not isinstance(cause, ValidationError):
        return error.format_message()
    option, fault = error.param, cause.errors(include_url=False)[0]
    if not isinstance(option, TyperOption | TyperArgument):
        return error.format_message()
    given, (_, is_choice, choices) = fault["input"], fault["msg"].partition(" is not one of ")
    adapter = getattr(option.get_runtime_param(), "adapter", None)
    allowed = _range(adapter.json_schema()) if isinstance(adapter, TypeAdapter) else None
    if is_choice:
        allowed = " or ".join(choices.rstrip(".").rsplit(", ", 1))
    elif allowed is None or fault["loc"]:
        return error.format_message()
    is_number = isinstance(given, str) and not fault["type"].endswith("parsing") and not is_choice
    return f"{option.opts[0]} must be {allowed}, not {given if is_number else shown(given)}"


def _range(schema: dict[str, Any]) -> str | None:
    """Returns the numbers that a JSON Schema allows, in words; None for what is no number."""
    kind = _KINDS.get(schema.get("type", ""))
    if kind is None:
        return None
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is None:
        return kind if high is None else f"{kind} of at most {high}"
    return f"{kind} of at least {low}" if high is None else f"{kind} from {low} to {high}"
