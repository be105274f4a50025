"""The OpenAPI document: written from the types that requests are read into and replies made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from grammar_sync.spec import GRAMMAR_FIELDS, GRAMMAR_OPTION_FIELDS
from launch.serve.chat_fields import ChatFields
from launch.serve.completions import CompletionFields
from launch.serve.errors import ErrorReply
from launch.serve.journaled import MAX_KEY
from launch.serve.replies import (
    ChatChunk,
    ChatCompletion,
    Completion,
    DetokenizeReply,
    HealthReply,
    ModelCard,
    ModelList,
    RanksReply,
    ScoreReply,
    TokenizeReply,
)
from launch.serve.score import REFUSED, ScoreFields
from launch.serve.tokens import DetokenizeFields, TokenizeFields
from runtime.scheduling_fields import SCHEDULING_FIELDS
from runtime.thinking_fields import THINKING_FIELDS
from sampler.params import SamplingParams

_REFERENCE: Final = "#/components/schemas/{name}"
_MESSAGES: Final[dict[str, Any]] = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {
            "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
            "content": {"type": "string"},
        },
        "required": ["role", "content"],
    },
}
_IDEMPOTENCY_KEY: Final[dict[str, Any]] = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "The request outlives the server, and whoever asks again with this key gets the same answer",
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY, "pattern": "^[!-~]( *[!-~])*$"},
}
_ERROR_STATUSES: Final = (400, 401, 404, 408, 413, 422, 429, 500, 503)


@dataclass(frozen=True)
class Described:
    """An endpoint's types.

    Args:
        fields: What it takes itself.
        reply: What it answers.
        stream: What an event of its stream is; None when it has none.
        takes_engine_fields: Whether it takes the engine's own fields too.
        refused: Those of them that it does not.
    """

    fields: type[msgspec.Struct]
    reply: type[msgspec.Struct]
    stream: type[msgspec.Struct] | None = None
    takes_engine_fields: bool = True
    refused: tuple[str, ...] = ()


COMPLETION: Final = Described(CompletionFields, Completion, Completion)
CHAT: Final = Described(ChatFields, ChatCompletion, ChatChunk)
SCORE: Final = Described(ScoreFields, ScoreReply, refused=REFUSED)
TOKENIZE: Final = Described(TokenizeFields, TokenizeReply, takes_engine_fields=False)
DETOKENIZE: Final = Described(DetokenizeFields, DetokenizeReply, takes_engine_fields=False)
_REPLIES: Final = (
    *(Completion, ChatCompletion, ChatChunk, ScoreReply, TokenizeReply, DetokenizeReply),
    *(ModelCard, ModelList, RanksReply, HealthReply, ErrorReply),
)
_ALL: Final = (
    *(one.fields for one in (COMPLETION, CHAT, SCORE, TOKENIZE, DETOKENIZE)),
    SamplingParams,
    *_REPLIES,
)


def request_of(described: Described, *, is_kept: bool = False) -> dict[str, Any]:
    """Returns what an endpoint's request is, for the operation of the document.

    Args:
        described: The endpoint's types.
        is_kept: Whether a journal keeps requests that have a key.
    """
    schema = {"$ref": _REFERENCE.format(name=_request_name(described))}
    body = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
    return body | ({"parameters": [_IDEMPOTENCY_KEY]} if is_kept else {})


def reply(
    kind: type[msgspec.Struct], *, streams: bool = False, is_kept: bool = False, also: tuple[int, ...] = ()
) -> dict[int | str, dict[str, Any]]:
    """Returns an endpoint's responses, for the operation of the document.

    Args:
        kind: What it answers.
        streams: Whether it may also be a stream of events.
        is_kept: Whether a journal keeps requests that have a key.
        also: Statuses that have the same form as an answer.
    """
    content: dict[str, Any] = {"application/json": {"schema": _schema_of(kind)}}
    if streams:
        # The document has no way to say that the data of events is JSON, but for the last event's.
        content["text/event-stream"] = {}
    responses: dict[int | str, dict[str, Any]] = {
        status: {"description": "An error", "content": {"application/json": {"schema": _schema_of(ErrorReply)}}}
        for status in (*_ERROR_STATUSES, *((507,) if is_kept else ()))
    }
    return responses | {status: {"description": "The answer", "content": content} for status in (200, *also)}


def describe(app: FastAPI, model_name: str) -> Callable[[], dict[str, Any]]:
    """Returns what writes the document of an application, the types of this module in it.

    Args:
        app: The application.
        model_name: The only one that requests may name.
    """

    def document() -> dict[str, Any]:
        if not app.openapi_schema:
            written = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schemas = written.setdefault("components", {}).setdefault("schemas", {})
            schemas |= _components(model_name)
            app.openapi_schema = written
        return app.openapi_schema

    return document


def _components(model_name: str) -> dict[str, Any]:
    _, components = msgspec.json.schema_components(_ALL, ref_template=_REFERENCE)
    engine = components.pop("SamplingParams")["properties"]
    others = (*GRAMMAR_FIELDS, *GRAMMAR_OPTION_FIELDS, *SCHEDULING_FIELDS, *THINKING_FIELDS)
    for described in (COMPLETION, CHAT, SCORE, TOKENIZE, DETOKENIZE):
        own = components.pop(described.fields.__name__)
        properties = own["properties"]
        if described.takes_engine_fields:
            properties = {name: {} for name in others} | engine | properties
            properties = {name: one for name, one in properties.items() if name not in described.refused}
        named: dict[str, Any] = {"model": {"enum": [model_name]}}
        if "messages" in properties:
            named["messages"] = _MESSAGES
        components[_request_name(described)] = {
            **own,
            "title": _request_name(described),
            "properties": properties | named,
            "additionalProperties": False,
        }
    return components


def _request_name(described: Described) -> str:
    return described.fields.__name__.replace("Fields", "Request")


def _schema_of(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(name=kind.__name__)}
