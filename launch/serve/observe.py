"""What can be seen of a running engine: /metrics, /v1/ranks, and the page at /."""

from __future__ import annotations

from importlib.resources import files
from typing import Any, Final

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from launch.serve.generation import json_response
from launch.serve.openapi import reply
from launch.serve.replies import RankReply, RanksReply
from launch.serve.state import ServerState
from runtime.engine_statistics import HeardRank

_METRICS: Final[dict[int | str, dict[str, Any]]] = {
    200: {"description": "The metrics", "content": {"text/plain": {"schema": {"type": "string"}}}}
}
_PAGE_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def observe_router(state: ServerState) -> APIRouter:
    """Returns the endpoints."""
    router = APIRouter()
    page = files("launch.serve").joinpath("page.html").read_bytes()

    @router.get("/metrics", responses=_METRICS, response_class=Response)
    async def metrics() -> Response:
        """Tells the metrics in Prometheus' text format."""
        return Response(state.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/v1/ranks", responses=reply(RanksReply), response_class=Response)
    async def ranks() -> Response:
        """Tells where every rank is."""
        return json_response(_ranks(state))

    @router.get("/", include_in_schema=False)
    async def show_page() -> Response:
        """Shows ranks, curves and a playground."""
        return Response(page, media_type="text/html; charset=utf-8", headers=_PAGE_HEADERS)

    return router


def _ranks(state: ServerState) -> RanksReply:
    client = state.client
    heard = [] if client.statistics is None else client.statistics.ranks
    return RanksReply(
        tp_size=client.ready.tp_size,
        pp_size=client.ready.pp_size,
        epoch=client.ready.epoch,
        data=[_rank(one, client.statistics_age_s) for one in heard],
        faults=list(client.faults),
    )


def _rank(heard: HeardRank, age_s: float) -> RankReply:
    one = heard.state
    return RankReply(
        rank=one.rank,
        stage=one.stage,
        tp_rank=one.tp_rank,
        step=one.step,
        digest=one.digest,
        step_age_s=round(one.step_age_s + heard.heard_age_s + age_s, 3),
        heartbeat_age_s=round(heard.heard_age_s + age_s, 3),
        busy_steps=one.busy_steps,
        last_step_s=one.last_step_s,
        mean_step_s=one.busy_s / one.busy_steps if one.busy_steps else 0.0,
        wait_share=one.wait_s / one.busy_s if one.busy_s else 0.0,
        skew_s=heard.skew_s,
        resident_bytes=one.resident_bytes,
    )
