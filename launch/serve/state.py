"""What the endpoints share."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from launch.front.engine_client import EngineClient, Submission
from launch.front.metrics import EngineMetrics
from launch.options import EngineOptions, HttpOptions
from launch.serve.errors import HttpError


@dataclass(frozen=True)
class ServerState:
    """The engine behind the server, and how it may be used.

    Args:
        client: The engine.
        metrics: What is counted of it.
        engine: How it was started.
        http: How the server answers.
        model_name: What clients call the model.
        version: Of Lockstep.
        created: When the server started, in Unix seconds.
    """

    client: EngineClient
    metrics: EngineMetrics
    engine: EngineOptions
    http: HttpOptions
    model_name: str
    version: str
    created: int

    @property
    def fingerprint(self) -> str:
        """What may change an output beside the request."""
        ready = self.client.ready
        return f"lockstep-{self.version}-tp{ready.tp_size}-pp{ready.pp_size}-{ready.dtype}"

    def new_reply(self, prefix: str) -> ReplyHead:
        """Returns the head of a new reply, numbered by the server alone."""
        return ReplyHead(f"{prefix}-{secrets.token_hex(12)}", int(time.time()), self.model_name, self.fingerprint)

    def check_model(self, name: str | None) -> None:
        """Returns if a request names this model, or none.

        Raises:
            HttpError: It names another.
        """
        if name is not None and name != self.model_name:
            message = f"the model {name[:200]!r} does not exist here; there is {self.model_name!r}"
            raise HttpError(404, message, param="model", code="model_not_found")

    def submit(self, bodies: Sequence[str], *, score: bool = False, stream: bool = False) -> Submission:
        """Submits the prompts of a request.

        Raises:
            HttpError: They are too many, for a request or beside what is under way.
            EngineClosedError, RanksFailedError: The engine takes no requests.
        """
        most = min(self.http.max_prompts, self.http.max_requests)
        if len(bodies) > most:
            message = f"prompt has {len(bodies)} prompts: at most {most} are taken in one request"
            raise HttpError(400, message, param="prompt")
        if self.client.open_requests + len(bodies) > self.http.max_requests:
            message = f"{self.client.open_requests} prompts are under way, at most {self.http.max_requests} may be"
            raise HttpError(429, message, code="queue_full", headers={"Retry-After": "1"})
        return self.client.submit(bodies, score=score, buffered=self.http.stream_buffer if stream else None)


@dataclass(frozen=True)
class ReplyHead:
    """What every reply and every chunk of a stream begins with.

    Args:
        id: The server's own.
        created: Unix seconds.
        model: The model's name.
        system_fingerprint: What may change an output beside the request.
    """

    id: str
    created: int
    model: str
    system_fingerprint: str
