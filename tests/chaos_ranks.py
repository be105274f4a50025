"""Rank functions for tests of the faulty backend."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launch.chaos.faulty import Trigger, install
from launch.chaos.injury import InjectedError
from launch.chaos.record import CellFolder


def all_calls(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Makes every kind of call without a fault; returns what came of them."""
    trigger = Trigger(CellFolder(Path(folder)), rank, 0)
    install(trigger)
    group = dist.new_group(list(range(size)))
    assert isinstance(group, dist.ProcessGroup)
    seen: dict[str, Any] = {"backend": dist.get_backend(group)}
    tensor = torch.full((3,), float(rank + 1))
    dist.all_reduce(tensor, group=group)
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank}, group=group)
    listed = [[rank]]
    dist.broadcast_object_list(listed, src=0, group=group)
    received = torch.zeros(2)
    receiving = dist.irecv(received, src=(rank - 1) % size, group=group, tag=4)
    sending = dist.isend(torch.full((2,), float(rank)), dst=(rank + 1) % size, group=group, tag=4)
    assert receiving is not None
    assert sending is not None
    receiving.wait()
    sending.wait()
    work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    assert work is not None
    work.wait()
    dist.barrier(group=group)
    dist.monitored_barrier(group=group)
    seen |= {"sum": tensor.tolist(), "gathered": gathered, "listed": listed, "received": received.tolist()}
    return seen | {"calls": dict(trigger.calls), "place": CellFolder(Path(folder)).place_of(rank)}


def summed(rank: int, size: int, folder: str, rounds: int, armed_at: int) -> list[Any]:
    """Sums so many times over a faulty group; returns each sum, or the error that ended it, and its seconds."""
    cell = CellFolder(Path(folder))
    install(Trigger(cell, rank, 0), group_timeout_s=3.0)
    group = dist.new_group(list(range(size)))
    # Connected before time is taken.
    dist.barrier(group=group)
    results: list[Any] = []
    for number in range(rounds):
        if number == armed_at:
            cell.arm(1)
            dist.barrier()
        tensor = torch.full((4,), float((number + 1) * 10 ** (rank + 1)))
        began_s = time.monotonic()
        try:
            dist.all_reduce(tensor, group=group)
            results.append((tensor[0].item(), time.monotonic() - began_s))
        except (RuntimeError, InjectedError) as error:
            results.append((f"{type(error).__name__}: {error}", time.monotonic() - began_s))
            break
    return results


def told(rank: int, size: int, folder: str, rounds: int) -> list[int]:
    """Broadcasts numbers from rank 0; returns what this rank got."""
    cell = CellFolder(Path(folder))
    install(Trigger(cell, rank, 0))
    group = dist.new_group(list(range(size)))
    numbers = []
    for number in range(rounds):
        tensor = torch.full((2,), 100 + number if rank == 0 else 0, dtype=torch.int64)
        dist.broadcast(tensor, src=0, group=group)
        numbers.append(int(tensor[0]))
    return numbers
