"""Reads keywords' values, and says in one line what is wrong with one."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from grammar_sync.engines.prepared import CompileError
from grammar_sync.schema.document import Schema, pointer

_EXCERPT_LENGTH = 60


def wrong(schema: Schema, keyword: str, expected: str) -> CompileError:
    """Returns the error that a keyword's value is not what it must be."""
    text = repr(schema.get(keyword))
    shown = text if len(text) <= _EXCERPT_LENGTH else f"{text[:_EXCERPT_LENGTH]}…"
    return CompileError(f"{pointer(schema.path, keyword)} is {shown}, expected {expected}")


def count(schema: Schema, keyword: str) -> int:
    """Returns a keyword's value as a count.

    Raises:
        CompileError: It is no integer of 0 or more.
    """
    value = schema.get(keyword)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
        raise wrong(schema, keyword, "an integer of 0 or more")
    return int(value)


def number(schema: Schema, keyword: str) -> Fraction:
    """Returns a keyword's value as a number: an integer exactly, another as its shortest decimal text says it.

    Raises:
        CompileError: It is no number.
    """
    value = schema.get(keyword)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong(schema, keyword, "a number")
    return as_fraction(value)


def as_fraction(value: float) -> Fraction:
    """Returns a number: a whole one exactly, as it compares with integers, another as its shortest text says."""
    return Fraction(value) if isinstance(value, int) or value.is_integer() else Fraction(str(value))


def boolean(schema: Schema, keyword: str) -> bool:
    """Returns a keyword's value as true or false.

    Raises:
        CompileError: It is neither.
    """
    value = schema.get(keyword)
    if not isinstance(value, bool):
        raise wrong(schema, keyword, "true or false")
    return value


def text(schema: Schema, keyword: str) -> str:
    """Returns a keyword's value as a text.

    Raises:
        CompileError: It is none.
    """
    value = schema.get(keyword)
    if not isinstance(value, str):
        raise wrong(schema, keyword, "a text")
    return value


def names(schema: Schema, keyword: str) -> tuple[str, ...]:
    """Returns a keyword's value as a list of names.

    Raises:
        CompileError: It is none.
    """
    return name_list(schema, keyword, schema.get(keyword))


def name_list(schema: Schema, keyword: str, value: object) -> tuple[str, ...]:
    """Returns a value inside a keyword's value as a list of names.

    Raises:
        CompileError: It is none.
    """
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise wrong(schema, keyword, "a list of names")
    return tuple(value)


def mapping(schema: Schema, keyword: str) -> dict[str, Any]:
    """Returns a keyword's value as an object.

    Raises:
        CompileError: It is none.
    """
    value = schema.get(keyword)
    if not isinstance(value, dict):
        raise wrong(schema, keyword, "an object")
    return value


def listing(schema: Schema, keyword: str) -> list[Any]:
    """Returns a keyword's value as a list with at least one entry.

    Raises:
        CompileError: It is none.
    """
    value = schema.get(keyword)
    if not isinstance(value, list) or not value:
        raise wrong(schema, keyword, "a non-empty list")
    return value
