"""JSON as clients write it, of which nothing is dropped."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

_SHOWN_CHARACTERS = 80


class DuplicateKeyError(ValueError):
    """An object has a key twice: one of the two values would be lost.

    Attributes:
        field: The field of the outermost object that this is about.

    Args:
        key: The key.
        path: Keys and indices that lead to the object, from the outermost one on.
    """

    def __init__(self, key: str, path: Sequence[str | int] = ()) -> None:
        text = repr(key)
        told = text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."
        where = _shown_path(path) if path else "one object"
        super().__init__(f"the key {told} stands twice in {where}")
        outermost = next((part for part in path if isinstance(part, str)), key)
        self.field = _sendable(outermost)


def parse_json(text: str | bytes) -> Any:
    """Returns what JSON text says.

    Raises:
        DuplicateKeyError: An object in it has a key twice.
        ValueError: It is no JSON, or an integer in it has too many digits to be read.
        RecursionError: It is nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except _NotUniqueError:
        raise next(_duplicates(json.loads(text, object_pairs_hook=_Pairs), ())) from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError as error:
        raise ValueError(f"an integer has more than {sys.get_int_max_str_digits()} digits") from error


class _NotUniqueError(Exception):
    """Some object has a key twice; only the whole text tells where."""


class _Pairs(list[tuple[str, Any]]):
    """An object, with everything that stands in it."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise _NotUniqueError
    return fields


def _duplicates(value: object, path: tuple[str | int, ...]) -> Iterator[DuplicateKeyError]:
    """Yields the keys that stand twice in an object of ``value``, those of outer objects first."""
    inner: Iterable[tuple[str | int, object]] = ()
    if isinstance(value, _Pairs):
        seen: set[str] = set()
        for key, _ in value:
            if key in seen:
                yield DuplicateKeyError(key, path)
            seen.add(key)
        inner = value
    elif isinstance(value, list):
        inner = enumerate(value)
    for name, part in inner:
        yield from _duplicates(part, (*path, name))


def _shown_path(path: Sequence[str | int]) -> str:
    shown = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    return _sendable(shown)


def _sendable(text: str) -> str:
    # A lone surrogate cannot be sent on.
    return text[:_SHOWN_CHARACTERS].encode(errors="replace").decode()
