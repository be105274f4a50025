"""The server's process: ranks, event loop, listening socket, and how they end."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from contextlib import AsyncExitStack
from types import FrameType
from typing import Final

import uvicorn

from launch.cli.parse import UsageError
from launch.commands import ServeCommand
from launch.environment import API_KEY
from launch.exit_codes import ExitCode
from launch.front.engine_client import EngineClient
from launch.front.engine_process import EngineProcess, print_line, start_or_attach, wait_until_ready
from launch.front.metrics import EngineMetrics
from launch.node.rank_processes import RanksFailedError
from launch.options import HttpOptions
from launch.serve.app import create_app
from launch.serve.journal import Journal
from launch.serve.journal_file import JournalError
from launch.serve.journaled import JournaledAnswers
from launch.serve.keys import ApiKeys, read_keys
from launch.serve.models import installed_version
from launch.serve.observe import observe_router
from launch.serve.state import ServerState
from runtime.messages import EngineReady

_LEAVE_S: Final = 1
_STUCK_CLIENT_MS: Final = 60_000
_IDLE_CONNECTION_S: Final = 75
"""Clients keep idle connections for less: one that the server closed first may be chosen for the next request."""

_BACKLOG: Final = 2048


def run_serve(command: ServeCommand, argv: list[str], front_endpoint: str | None) -> int:
    """Serves until a signal or the end of the ranks; returns the exit code.

    Args:
        command: What to serve.
        argv: The command line, run again by each rank.
        front_endpoint: Where the leader that started this process connects; None when this process starts the ranks.

    Raises:
        UsageError: The address cannot be bound, or a file not be read.
        RanksFailedError: The ranks failed.
    """
    keys = read_keys(command.http.api_key_file, os.environ)
    # Ranks have no use for a secret.
    os.environ.pop(API_KEY, None)
    listener = _listener(command.http)
    journal = _journal(command.http)
    engine = start_or_attach(command.engine, argv, front_endpoint)
    try:
        ready = wait_until_ready(engine, command.engine.start_timeout_s)
        failure = asyncio.run(_serve(command, engine, ready, keys, listener, journal=journal))
    finally:
        engine.stop()
        listener.close()
    if failure is not None:
        raise failure
    return ExitCode.OK


class _Server(uvicorn.Server):
    """A server that ends what is under way, rather than waiting for it, when it is told to leave."""

    def __init__(self, config: uvicorn.Config, client: EngineClient) -> None:
        super().__init__(config)
        self._client = client

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._client.refuse_all("the server is shutting down")


async def _serve(
    command: ServeCommand,
    engine: EngineProcess,
    ready: EngineReady,
    keys: ApiKeys,
    listener: socket.socket,
    *,
    journal: Journal | None,
) -> RanksFailedError | None:
    """Serves until told to leave; returns why the ranks failed, if they did."""
    metrics = EngineMetrics()
    metrics.heard(ready)
    kept = None if journal is None else JournaledAnswers(journal)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(EngineClient(engine, ready, print_line, metrics))
        state = ServerState(
            client=client,
            metrics=metrics,
            engine=command.engine,
            http=command.http,
            model_name=command.http.served_model_name or command.engine.model.stem,
            version=installed_version("lockstep") or "0",
            created=int(time.time()),
        )
        config = uvicorn.Config(
            create_app(state, keys, [observe_router(state)], kept),
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_LEAVE_S,
            timeout_keep_alive=_IDLE_CONNECTION_S,
            backlog=_BACKLOG,
        )
        if kept is not None:
            await stack.enter_async_context(kept)
        server = _Server(config, client)
        watch = asyncio.create_task(_leave_with_ranks(server, client))
        # Whoever reads the line below may connect at once.
        listener.listen(_BACKLOG)
        host, port = listener.getsockname()[:2]
        print(
            f"lockstep: serving {state.model_name} on TP{ready.tp_size} x PP{ready.pp_size}, {ready.dtype} on "
            f"{ready.device}, at http://{f'[{host}]' if ':' in host else host}:{port}/v1",
            file=sys.stderr,
            flush=True,
        )
        try:
            await server.serve([listener])
        finally:
            watch.cancel()
        return client.failure


async def _leave_with_ranks(server: uvicorn.Server, client: EngineClient) -> None:
    await client.wait_for_failure()
    server.should_exit = True


def _journal(http: HttpOptions) -> Journal | None:
    """Returns the journal that is asked for, if one is."""
    if http.journal is None:
        return None
    try:
        journal = Journal(http.journal, keep_s=http.journal_keep_s, limit_bytes=http.journal_bytes)
    except JournalError as error:
        raise UsageError(str(error)) from error
    if journal.cut_bytes:
        print_line(f"the journal's last {journal.cut_bytes} bytes, a record half written, were cut off")
    return journal


def _listener(http: HttpOptions) -> socket.socket:
    """Returns a bound socket; a client that takes nothing for a minute is disconnected by the kernel."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(http.host, http.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _STUCK_CLIENT_MS)
        listener.bind(address)
    except OSError as error:
        raise UsageError(f"--host {http.host} --port {http.port}: {error.strerror}") from error
    return listener
