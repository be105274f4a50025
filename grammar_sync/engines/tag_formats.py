"""The formats that structural tags are made of, and the fields that each has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from grammar_sync.engines.prepared import CompileError
from grammar_sync.schema.document import pointer

_TAGGED: Final = ("tags", "at_least_one", "stop_after_first")
FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "any_text": ("excludes", "max_tokens", "max_chars"),
    "any_tokens": ("exclude_tokens", "max_tokens"),
    "const_string": ("value",),
    "dispatch": ("rules", "loop", "excludes"),
    "exclude_token": ("exclude_tokens",),
    "grammar": ("grammar", "syntax"),
    "json_schema": ("json_schema", "style", "any_order", "max_whitespace_cnt", "excludes"),
    "optional": ("content",),
    "or": ("elements",),
    "plus": ("content",),
    "qwen_xml_parameter": ("json_schema",),
    "regex": ("pattern",),
    "repeat": ("min", "max", "content"),
    "sequence": ("elements",),
    "star": ("content",),
    "tag": ("begin", "content", "end"),
    "tags_with_separator": (*_TAGGED, "separator"),
    "token": ("token",),
    "token_dispatch": ("rules", "loop", "exclude_tokens"),
    "token_triggered_tags": (*_TAGGED, "trigger_tokens", "exclude_tokens"),
    "triggered_tags": (*_TAGGED, "triggers", "excludes"),
}
"""The fields of each format beside its ``type``."""

_XML_ALONE: Final[Mapping[str, tuple[object, ...]]] = {
    "any_order": (None, False),
    "max_whitespace_cnt": (None,),
    "excludes": (None, []),
}
"""Fields that mean nothing to a schema of JSON, with the values that say nothing."""


def checked_kind(part: Mapping[str, Any], path: str, *, expected: str | None = None) -> str:
    """Returns the type of a format, which has no field that it does not know.

    Args:
        part: The format.
        path: Where it stands.
        expected: Its type where it says none.

    Raises:
        CompileError: It has such a field, or is of no known type.
    """
    kind = part.get("type", expected)
    if not isinstance(kind, str) or kind not in FIELDS:
        told = "missing" if kind is None else repr(kind)[:80]
        raise CompileError(f"{pointer(path, 'type')} is {told}, expected one of {', '.join(FIELDS)}")
    check_fields(part, path, f"a format of type {kind}", ("type", *FIELDS[kind]))
    if kind == "json_schema" and part.get("style", "json") == "json":
        for name, silent in _XML_ALONE.items():
            if part.get(name) not in silent:
                raise CompileError(f"{pointer(path, name)} cannot be enforced for JSON; the request has max_whitespace")
    return kind


def check_fields(part: Mapping[str, Any], path: str, what: str, known: tuple[str, ...]) -> None:
    """Checks that an object has no other fields.

    Raises:
        CompileError: It has.
    """
    for name in part:
        if name not in known:
            raise CompileError(f"{pointer(path, name[:80])} is no field of {what}: these are {', '.join(known)}")
