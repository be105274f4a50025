"""How a client's value is shown in a message about it: as JSON has it, not as Python does."""

from __future__ import annotations

import json
import math

_SHOWN_BITS = 128
_SHOWN_CHARACTERS = 80


def shown(value: object) -> str:
    """Returns a client's value as a message may show it: short, whatever it is; texts in single quotation marks."""
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        return f"an integer of {value.bit_length()} bits"
    is_named = value is None or isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value))
    try:
        text = json.dumps(value) if is_named else repr(value)
    except RecursionError:
        return f"{kind_of(value)}, deeply nested"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


def kind_of(value: object) -> str:
    """Returns what kind of JSON value it is, in words."""
    match value:
        case None | bool():
            return shown(value)
        case int():
            return "an integer"
        case float():
            return "a number"
        case str():
            return "a string"
        case dict():
            return "an object"
        case _:
            return "a list"
