"""Starts real ranks for a test: processes from a fork server with torch imported, over gloo."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from forked_command import start_server

T = TypeVar("T")
_CONTEXT = multiprocessing.get_context("forkserver")


class LeaveAtOnceError(Exception):
    """A rank has its result, and leaves without waiting for the others: they may wait for it in vain."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result


class RankFailure(AssertionError):
    """A rank raised, died or did not finish in time."""


def run_ranks(
    function: Callable[..., T], world_size: int, *args: Any, timeout_s: float = 120.0, backend: str = "gloo"
) -> list[T]:
    """Returns what ``function(rank, world_size, *args)`` returned on each rank, in rank order.

    ``function`` must be a module-level function. The default process group is ready when it is called. All processes
    are gone when this returns, whatever happened.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes, readers = [], []
        start_server()
        try:
            for rank in range(world_size):
                reader, writer = _CONTEXT.Pipe(duplex=False)
                process = _CONTEXT.Process(
                    target=_rank_main, args=(writer, function, rank, world_size, store, args, timeout_s, backend)
                )
                process.start()
                writer.close()
                processes.append(process)
                readers.append(reader)
            return _collect(readers, timeout_s)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def modules_of_rank(rank: int, world_size: int) -> frozenset[str]:
    """Returns the names of the modules that a rank has imported; for ``run_ranks``."""
    return frozenset(sys.modules)


def _collect(readers: list[Connection], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    pending: dict[Any, int] = {reader: rank for rank, reader in enumerate(readers)}
    while pending:
        ready = wait(list(pending), timeout_s)
        if not ready:
            raise RankFailure(f"ranks {sorted(pending.values())} did not finish in {timeout_s} s")
        for reader in ready:
            assert isinstance(reader, Connection)
            rank = pending.pop(reader)
            try:
                ok, value = pickle.loads(reader.recv_bytes())
            except EOFError:
                raise RankFailure(f"rank {rank} died without a word") from None
            if not ok:
                raise RankFailure(f"rank {rank}:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(readers))]


def _rank_main(
    writer: Connection,
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str,
    args: tuple[Any, ...],
    timeout_s: float,
    backend: str,
) -> None:
    torch.set_num_threads(1)
    try:
        with _process_group(rank, world_size, store, timeout_s, backend):
            message = (True, function(rank, world_size, *args))
    except LeaveAtOnceError as leave:
        message = (True, leave.result)
    except BaseException:
        message = (False, traceback.format_exc())
    with contextlib.suppress(OSError):
        writer.send_bytes(pickle.dumps(message))
    # A rank that failed may still have an operation of gloo pending, which nothing can abort: leave at once.
    os._exit(0)


@contextlib.contextmanager
def _process_group(rank: int, world_size: int, store: str, timeout_s: float, backend: str) -> Iterator[None]:
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    yield
    dist.barrier()
    dist.destroy_process_group()
