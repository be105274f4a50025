"""A small torch.distributed program for ``lockstep chaos --script``: a few steps with every kind of call."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> float:
    """Averages, passes on and gathers numbers for four steps; returns what every rank should agree on."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=8))
    rank, size = dist.get_rank(), dist.get_world_size()
    state = torch.full((8,), float(rank + 1))
    for step in range(4):
        dist.all_reduce(state)
        state /= size
        passed = torch.zeros(8)
        received = dist.irecv(passed, src=(rank - 1) % size)
        sent = dist.isend(state * (rank + 1), dst=(rank + 1) % size)
        assert received is not None
        assert sent is not None
        received.wait()
        sent.wait()
        gathered: list[float] = [0.0] * size
        dist.all_gather_object(gathered, passed.sum().item())
        state = torch.full((8,), sum(gathered) / size + step)
        dist.broadcast(state, src=0)
    dist.barrier()
    dist.destroy_process_group()
    return state.sum().item()
