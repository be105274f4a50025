"""The requests of ``lockstep bench serve``: a seed says all of them, and when they come."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from launch.commands import BenchServeCommand

_PREFIXES: Final = 4
_SCHEMAS: Final = 4
_WORD_LIST: Final = (
    "amber anchor apple autumn barley beacon birch bridge bronze candle canyon carbon castle cedar cliff cloud "
    "copper coral cotton crane desert dragon ember falcon field forest garden glacier granite harbor hazel "
    "helmet island ivory jasmine juniper kettle lantern lemon lilac linen lotus maple marble meadow mirror "
    "mountain nectar oak ocean olive orchid otter palace pearl pepper pine planet prairie quartz rabbit raven "
    "river saddle sage salmon sapphire shadow silver sparrow spruce stone summer swallow temple thistle thunder "
    "tiger timber topaz tower tulip valley velvet violin walnut water willow winter zephyr"
)
_WORDS: Final = tuple(_WORD_LIST.split())


@dataclass(frozen=True)
class LoadRequest:
    """A request.

    Attributes:
        body: What is sent.
        due_s: When, from the start; None = as soon as a client is free.
        schema: What its output must satisfy; None when it is plain text.
    """

    body: dict[str, Any]
    due_s: float | None
    schema: dict[str, Any] | None


def load_requests(command: BenchServeCommand, model: str) -> list[LoadRequest]:
    """Returns the requests, in the order in which they are sent.

    Neither rate nor concurrency changes what they ask.

    Args:
        command: How many, and of which kinds.
        model: The model's name.
    """
    source, clock = (np.random.default_rng([command.seed, stream]) for stream in range(2))
    prefixes = [_words(source, command.prefix_words) for _ in range(_PREFIXES)]
    schemas = [_schema(source) for _ in range(_SCHEMAS)]
    times = [None] * command.requests if command.rate is None else _poisson(clock, command.requests, command.rate)
    requests = []
    for due_s in times:
        # Each draws as much whatever it becomes, so that a share changes the requests that it is about alone.
        is_constrained, is_prefixed = source.random() < command.constrained, source.random() < command.prefixed
        schema, prefix = schemas[source.integers(_SCHEMAS)], prefixes[source.integers(_PREFIXES)]
        words = f"{prefix} " if is_prefixed and prefix else ""
        words += _words(source, command.prompt_words)
        seed = int(source.integers(2**31))
        task = "Describe a place in these words, as JSON" if is_constrained else "Tell a story in these words"
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": f"{words}. {task}."}],
            "max_tokens": command.max_tokens,
            "temperature": 0.7,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if is_constrained:
            named = {"name": "place", "strict": True, "schema": schema}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        elif command.ignore_eos:
            body["ignore_eos"] = True
        requests.append(LoadRequest(body, due_s, schema if is_constrained else None))
    return requests


def digest_of(requests: Sequence[LoadRequest]) -> str:
    """Returns what is equal for equal requests, whenever they come."""
    return hashlib.sha256(msgspec.json.encode([one.body for one in requests])).hexdigest()[:16]


def _words(source: np.random.Generator, count: int) -> str:
    return " ".join(_WORDS[index] for index in source.integers(len(_WORDS), size=count))


def _schema(source: np.random.Generator) -> dict[str, Any]:
    """Returns a schema as strict modes take it: every property required, no other allowed, no bounds."""
    names = [_WORDS[index] for index in source.choice(len(_WORDS), size=8, replace=False)]
    fields: dict[str, Any] = {
        names[0]: {"type": "string", "enum": names[4:]},
        names[1]: {"type": "boolean"},
        names[2]: {"type": "object", "properties": {names[3]: {"type": "string", "enum": names[2:6]}}},
    }
    fields[names[2]] |= {"required": [names[3]], "additionalProperties": False}
    return {"type": "object", "properties": fields, "required": names[:3], "additionalProperties": False}


def _poisson(clock: np.random.Generator, count: int, rate: float) -> list[float]:
    gaps = clock.exponential(1.0 / rate, size=count)
    gaps[:1] = 0.0
    return [float(one) for one in np.cumsum(gaps)]
