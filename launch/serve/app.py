"""The application: which path is answered by what.

Other parts of the program mount what they answer (metrics, the state of ranks, a page) as routers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from launch.serve import chat, completions, models, score, tokens
from launch.serve.errors import ENGINE_ERRORS, HttpError, answer_http_error
from launch.serve.guard import Guard
from launch.serve.journaled import Answer, JournaledAnswers
from launch.serve.keys import ApiKeys
from launch.serve.openapi import CHAT, COMPLETION, DETOKENIZE, SCORE, TOKENIZE, Described, describe, reply, request_of
from launch.serve.replies import HealthReply, ModelCard, ModelList
from launch.serve.state import ServerState

_KEPT: Final = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/score"})
"""What a journal keeps."""


def create_app(
    state: ServerState, keys: ApiKeys, routers: Sequence[APIRouter] = (), journal: JournaledAnswers | None = None
) -> FastAPI:
    """Returns the application.

    Args:
        state: What the endpoints share.
        keys: The keys that clients must give.
        routers: More endpoints, asked after these.
        journal: Keeps requests and answers; None when nobody wants them kept.
    """
    app = FastAPI(title="Lockstep", version=state.version, docs_url=None, redoc_url=None)
    for kind in (HttpError, HTTPException, *ENGINE_ERRORS):
        app.add_exception_handler(kind, answer_http_error)
    app.add_middleware(Guard, keys=keys, max_body_bytes=state.http.max_body_bytes)
    app.include_router(_router(state, journal))
    for router in routers:
        app.include_router(router)
    app.openapi = describe(app, state.model_name)  # type: ignore[method-assign] # the framework's documented way to change the document
    return app


def _router(state: ServerState, journal: JournaledAnswers | None) -> APIRouter:
    router = APIRouter()

    @router.get("/health", responses=reply(HealthReply, also=(503,)), response_class=Response)
    async def health() -> Response:
        """Says whether the engine answers."""
        return models.health(state)

    @router.get("/v1/models", responses=reply(ModelList), response_class=Response)
    async def list_models() -> Response:
        """Lists the model."""
        return models.models(state)

    @router.get("/v1/models/{name:path}", responses=reply(ModelCard), response_class=Response)
    async def retrieve_model(name: str) -> Response:
        """Tells about the model."""
        return models.model(state, name)

    for path, answer, about in (
        ("/v1/completions", completions.answer, COMPLETION),
        ("/v1/chat/completions", chat.answer, CHAT),
        ("/v1/score", score.answer, SCORE),
        ("/tokenize", tokens.tokenize, TOKENIZE),
        ("/detokenize", tokens.detokenize, DETOKENIZE),
    ):
        plain: Answer = partial(answer, state)
        # Questions for ids and texts are answered at once, and the same each time.
        kept = journal if path in _KEPT else None
        _post(router, path, plain if kept is None else kept.wrap(path, plain), about, is_kept=kept is not None)
    return router


def _post(router: APIRouter, path: str, answer: Answer, about: Described, *, is_kept: bool) -> None:
    async def endpoint(request: Request) -> Response:
        return await answer(request)

    router.post(
        path,
        name=path.strip("/").replace("/", "_"),
        responses=reply(about.reply, streams=about.stream is not None, is_kept=is_kept),
        openapi_extra=request_of(about, is_kept=is_kept),
        response_class=Response,
    )(endpoint)
