"""/v1/models and /health: what is served, and whether it answers."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from msgspec import UNSET
from starlette.responses import Response

from grammar_sync.spec import GRAMMAR_FIELDS
from launch.serve.generation import json_response
from launch.serve.replies import HealthReply, ModelCard, ModelList
from launch.serve.state import ServerState

_PACKAGES = ("torch", "xgrammar", "llguidance", "tokenizers", "safetensors", "msgspec", "fastapi")


def models(state: ServerState) -> Response:
    """Answers /v1/models."""
    return json_response(ModelList(data=[_card(state)]))


def model(state: ServerState, name: str) -> Response:
    """Answers /v1/models/NAME.

    Raises:
        HttpError: There is none of that name.
    """
    state.check_model(name)
    return json_response(_card(state))


def health(state: ServerState) -> Response:
    """Answers /health: 200 when every rank said lately that it steps, 503 otherwise."""
    client = state.client
    silent_s = round(client.silent_s, 3)
    if client.failure is not None:
        reply = HealthReply(
            status="failed", silent_s=silent_s, open_requests=client.open_requests, message=str(client.failure)
        )
    elif client.is_recovering:
        reply = HealthReply(
            status="recovering",
            silent_s=silent_s,
            open_requests=client.open_requests,
            message="ranks were lost, others are starting: requests wait for them",
        )
    else:
        is_silent = silent_s > state.http.health_timeout_s
        reply = HealthReply(
            status="silent" if is_silent else "ok",
            silent_s=silent_s,
            open_requests=client.open_requests,
            message="a rank has not stepped for so long" if is_silent else UNSET,
        )
    return json_response(reply, 200 if reply.status == "ok" else 503)


def installed_version(package: str) -> str | None:
    """Returns the version of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _card(state: ServerState) -> ModelCard:
    ready = state.client.ready
    return ModelCard(
        id=state.model_name, created=state.created, max_model_len=ready.max_model_len, capabilities=_abilities(state)
    )


def _abilities(state: ServerState) -> dict[str, Any]:
    ready, engine = state.client.ready, state.engine
    return {
        "versions": {"lockstep": state.version} | {name: installed_version(name) for name in _PACKAGES},
        "tp_size": ready.tp_size,
        "pp_size": ready.pp_size,
        "dtype": ready.dtype,
        "device": ready.device,
        "modes": {
            "audit": engine.audit,
            "post_check": engine.post_check,
            "prefix_cache": engine.prefix_cache,
            "speculate": engine.speculate,
            "grammar_backend": engine.grammar_backend,
        },
        "grammars": list(GRAMMAR_FIELDS),
        "limits": {
            "max_num_seqs": engine.max_num_seqs,
            "max_requests": state.http.max_requests,
            "max_prompts": state.http.max_prompts,
            "max_body_bytes": state.http.max_body_bytes,
        },
        "logit_processors": list(engine.logit_processors),
    }
