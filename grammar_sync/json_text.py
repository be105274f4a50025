"""JSON as clients write it, of which nothing is dropped."""

from __future__ import annotations

import json
from typing import Any

_SHOWN_CHARACTERS = 80


class DuplicateKeyError(ValueError):
    """An object has a key twice: one of the two values would be lost.

    Args:
        key: The key.
    """

    def __init__(self, key: str) -> None:
        text = repr(key)
        told = text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."
        super().__init__(f"the key {told} stands twice in one object")
        # A lone surrogate cannot be sent on.
        self.key = key[:_SHOWN_CHARACTERS].encode(errors="replace").decode()


def parse_json(text: str | bytes) -> Any:
    """Returns what JSON text says.

    Raises:
        DuplicateKeyError: An object in it has a key twice.
        ValueError: It is no JSON.
        RecursionError: It is nested too deeply.
    """
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise DuplicateKeyError(name)
            seen.add(name)
    return fields
