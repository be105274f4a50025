"""A request's body: JSON, and of its fields those that HTTP itself means something by.

All other fields go to the leader as they are, which knows the names and ranges of its own: they are checked once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec
from starlette.requests import ClientDisconnect, Request

from grammar_sync.json_text import DuplicateKeyError, parse_json
from launch.serve.errors import HttpError
from sampler.shown_value import kind_of, shown

Fields = TypeVar("Fields", bound=msgspec.Struct)
_STEP = re.compile(r"(?:^|\.)([A-Za-z_]\w*)|\[(\d+)\]")
_PLACE = re.compile(r"^(?P<what>.*) - at `\$\.?(?P<place>.*)`$", re.DOTALL)


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a stream ends.

    Args:
        include_usage: Whether a last chunk tells the tokens used.
        include_obfuscation: Taken, and without effect.
    """

    include_usage: bool = False
    include_obfuscation: bool = False


class CommonFields(msgspec.Struct, frozen=True, kw_only=True):
    """What every endpoint that generates takes beside the engine's own fields.

    Args:
        model: The model's name.
        stream: Whether tokens are sent as they come.
        stream_options: How the stream ends.
        return_token_ids: Whether each choice tells its token ids.
        user: Taken, and without effect; so are the three below.
        metadata: Likewise.
        safety_identifier: Likewise.
        prompt_cache_key: Likewise; requests with the same beginning share their KV entries anyway.
        store: Whether the output is kept; nothing is, so only false is taken.
    """

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: bool = False


async def read_body(request: Request) -> bytes:
    """Returns a request's body.

    Raises:
        HttpError: Its client left before it was whole.
    """
    try:
        return await request.body()
    except ClientDisconnect:
        # Nobody reads it.
        raise HttpError(400, "the client left before the body was whole") from None


async def read_object(request: Request) -> dict[str, Any]:
    """Returns the JSON object that is a request's body.

    Raises:
        HttpError: It is none, or its client left before it was whole.
    """
    body = await read_body(request)
    try:
        value = parse_json(body)
    except RecursionError:
        raise HttpError(400, "the body is nested too deeply") from None
    except DuplicateKeyError as error:
        raise HttpError(400, f"the body is ambiguous: {error}", param=error.field) from None
    except ValueError as error:
        raise HttpError(400, f"the body is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise HttpError(400, f"the body is {kind_of(value)}: an object is needed")
    return value


def take(fields: dict[str, Any], kind: type[Fields]) -> tuple[Fields, dict[str, Any]]:
    """Returns the fields that ``kind`` has, checked, and the others.

    A null of its own is as good as none. The others keep theirs: of them the leader knows the names.

    Raises:
        HttpError: One has the wrong type, or is unknown within a field.
    """
    names = kind.__struct_fields__
    own = {name: value for name, value in fields.items() if name in names and value is not None}
    rest = {name: value for name, value in fields.items() if name not in names}
    if "id" in rest:
        raise HttpError(400, "unknown field id: the server numbers requests itself", param="id")
    try:
        return msgspec.convert(own, kind), rest
    except msgspec.ValidationError as error:
        raise _shown(str(error), own, kind) from None


def as_body(fields: dict[str, Any]) -> str:
    """Returns the text that the leader is sent.

    Raises:
        HttpError: It is nested too deeply.
    """
    try:
        return json.dumps(fields)
    except RecursionError:
        raise HttpError(400, "the body is nested too deeply") from None


def refuse_stored(common: CommonFields) -> None:
    """Refuses what no server without a database can do.

    Raises:
        HttpError: The request wants its output stored, or stream options without a stream.
    """
    if common.store:
        raise HttpError(400, "store is true: nothing is stored here", param="store")
    if common.stream_options is not None and not common.stream:
        raise HttpError(400, "stream_options are given, but stream is not true", param="stream_options")


def _shown(message: str, fields: dict[str, Any], kind: type[msgspec.Struct]) -> HttpError:
    """Returns what a client is told: the place, what is wrong there, its value, and what is allowed."""
    found = _PLACE.match(message)
    if found is None:
        return HttpError(400, message)
    what, place = found["what"], found["place"]
    steps = _STEP.findall(place)
    if what.startswith(("Expected", "Invalid enum")) and "".join(_written(step) for step in steps) == f".{place}":
        value: Any = fields
        for name, index in steps:
            value = value[name] if name else value[int(index)]
        allowed = _allowed(kind, [name for name, _ in steps if name]) if what.startswith("Invalid enum") else []
        what = f"{what.split(',')[0]}, got {shown(value)}" if what.startswith("Expected `") else what
        if allowed:
            what = f"{shown(value)} is none of {', '.join(allowed)}"
    return HttpError(400, f"{place}: {what}", param=re.split(r"[.\[]", place)[0] or None)


def _written(step: tuple[str, str]) -> str:
    return f".{step[0]}" if step[0] else f"[{step[1]}]"


def _allowed(kind: Any, names: Sequence[str]) -> list[str]:
    """Returns the texts that the field at ``names`` within ``kind`` may be."""
    kinds = [kind]
    for name in names:
        structs = [one for one in kinds if isinstance(one, type) and issubclass(one, msgspec.Struct)]
        hints = [get_type_hints(one) for one in structs]
        kinds = [leaf for hint in hints if name in hint for leaf in _leaves(hint[name])]
    return [one for one in kinds if isinstance(one, str)]


def _leaves(hint: Any) -> list[Any]:
    """Returns the types, and the values of literals, that a type is made of."""
    parts = get_args(hint)
    return [leaf for part in parts for leaf in _leaves(part)] if parts else [hint]
