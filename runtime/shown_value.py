"""How a client's value is shown in a message about it."""

from __future__ import annotations

_SHOWN_BITS = 128
_SHOWN_CHARACTERS = 80


def shown(value: object) -> str:
    """Returns a client's value as a message may show it: short, whatever it is."""
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."
