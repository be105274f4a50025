"""How each rank's clock stands against the leader's, so that what ranks write down can be laid side by side."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

from runtime.trace_part import ClockReading

_PINGS = 16
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def clock_identity() -> str:
    """Returns what processes have in common that share a monotonic clock: the machine, since it was started."""
    return _BOOT_ID.read_text(encoding="ascii").strip()


def read_clock() -> ClockReading:
    """Returns how this rank's monotonic clock stands against the leader's; every rank calls it, in the same place.

    A ping goes to the leader, which answers with its time. The leader's time was read between the two readings of this
    rank, so the middle between them is off by half the round trip at most; of several pings the shortest counts. Ranks
    take their turn one after the other.
    """
    rank = dist.get_rank()
    reading = ClockReading(time.monotonic_ns(), 0, 0)
    for other in range(1, dist.get_world_size()):
        if rank == 0:
            _answer(other)
        elif rank == other:
            reading = _ask()
    return reading


def _answer(rank: int) -> None:
    message = torch.zeros(1, dtype=torch.int64)
    for _ in range(_PINGS):
        dist.recv(message, src=rank)
        message[0] = time.monotonic_ns()
        dist.send(message, dst=rank)


def _ask() -> ClockReading:
    message = torch.zeros(1, dtype=torch.int64)
    readings = []
    for _ in range(_PINGS):
        sent_ns = time.monotonic_ns()
        dist.send(message, dst=0)
        dist.recv(message, src=0)
        received_ns = time.monotonic_ns()
        middle_ns = (sent_ns + received_ns) // 2
        error_ns = (received_ns - sent_ns + 1) // 2
        readings.append(ClockReading(middle_ns, int(message.item()) - middle_ns, error_ns))
    return min(readings, key=lambda one: one.error_ns)
