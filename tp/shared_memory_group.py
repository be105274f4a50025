"""Shared memory as a backend of torch.distributed, for the tensors of a stage whose CPU ranks are on one host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from tp.python_group import PythonGroup
from tp.shared_memory import DTYPES, Meeting, MeetingError, meet

BACKEND = "lockstep_shm"


class Operation(IntEnum):
    """What ranks do together."""

    ALL_REDUCE_SUM = 0
    ALL_REDUCE_MAX = 1
    ALL_GATHER = 2
    BROADCAST = 3
    BARRIER = 4


class WrongCallError(RuntimeError):
    """A call is not the one that was announced: this rank left one out, made one too many, or another one.

    Nothing was sent.
    """


@dataclass(slots=True)
class Announcement:
    """What whoever makes a group's calls says of each before it makes it, from end to end of all that lies between.

    Attributes:
        calls: How many were announced.
        operation: The last one's name, as the group's errors call it.
        size_bytes: Of its tensor.
        dtype: Of its tensor.
    """

    calls: int = 0
    operation: str = ""
    size_bytes: int = 0
    dtype: torch.dtype = torch.uint8

    def announce(self, operation: str, tensor: torch.Tensor) -> None:
        """Says that a call comes next."""
        self.calls += 1
        self.operation = operation
        self.size_bytes = tensor.numel() * tensor.dtype.itemsize
        self.dtype = tensor.dtype


@dataclass(frozen=True)
class Options:
    """How a group is made.

    Attributes:
        spins: Whether its ranks look out for each other for a moment before they sleep.
        announcement: Of each of its calls; None where nobody announces them.
    """

    spins: bool = False
    announcement: Announcement | None = None


class _Done(dist.Work):
    """Work that is over when it is returned."""

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002 - nothing is waited for
        """Returns at once."""
        return True

    def is_completed(self) -> bool:
        """Returns that it is."""
        return True


class SharedMemoryGroup(PythonGroup):
    """A group whose ranks meet in shared memory; calls return when they are done.

    Args:
        meeting: The ranks.
        announcement: Of each call.
    """

    def __init__(self, meeting: Meeting, announcement: Announcement | None) -> None:
        super().__init__(meeting.rank, meeting.size)
        self._meeting = meeting
        self._announcement = announcement
        self._calls = 0

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Returns the backend's name."""
        return BACKEND

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets how long to wait for another rank."""
        self._meeting.set_timeout(timeout.total_seconds())

    def allreduce(self, tensors: Any, opts: Any = None, *_: Any) -> Any:
        """Sums, in rank order, or takes the maximum, in place.

        Raises:
            RuntimeError: Another reduction was asked for, or the ranks did not meet.
        """
        is_sum = opts is None or opts.reduceOp == dist.ReduceOp.SUM
        if not is_sum and opts.reduceOp != dist.ReduceOp.MAX:
            raise RuntimeError(f"{BACKEND} reduces by SUM and MAX alone")
        combine = torch.add if is_sum else torch.maximum
        flat = _flat(tensors)

        def take(run: slice, parts: list[torch.Tensor]) -> None:
            own = flat[run]
            combine(parts[0], parts[1], out=own)
            for part in parts[2:]:
                combine(own, part, out=own)

        self._exchange(Operation.ALL_REDUCE_SUM if is_sum else Operation.ALL_REDUCE_MAX, flat, take)
        return _Done()

    def allgather(self, outputs: Any, tensors: Any, opts: Any = None) -> Any:  # noqa: ARG002 - torch gives it
        """Copies each rank's tensor into the list's place for it.

        Raises:
            RuntimeError: The ranks did not meet.
        """
        places = [place.view(-1) for place in outputs[0]]

        def take(run: slice, parts: list[torch.Tensor]) -> None:
            for place, part in zip(places, parts, strict=True):
                place[run] = part

        self._exchange(Operation.ALL_GATHER, _flat(tensors), take)
        return _Done()

    def broadcast(self, tensors: Any, opts: Any = None, *_: Any) -> Any:
        """Copies the root's tensor over the others'.

        Raises:
            RuntimeError: The ranks did not meet.
        """
        root = 0 if opts is None else int(opts.rootRank)
        flat = _flat(tensors)

        def take(run: slice, parts: list[torch.Tensor]) -> None:
            flat[run] = parts[root]

        self._exchange(Operation.BROADCAST, flat, take)
        return _Done()

    def barrier(self, opts: Any = None) -> Any:  # noqa: ARG002 - torch gives it
        """Returns when all ranks came to it.

        Raises:
            RuntimeError: The ranks did not meet.
        """
        self._exchange(Operation.BARRIER, torch.zeros(1, dtype=torch.uint8), lambda _run, _parts: None)
        return _Done()

    def shutdown(self) -> None:
        """Closes the connections: ranks that wait for this one learn that it is gone."""
        self._meeting.close()

    def abort(self) -> None:
        """Closes the connections."""
        self._meeting.close()

    def _exchange(self, operation: Operation, flat: torch.Tensor, take: Any) -> None:
        self._calls += 1
        announced = self._announcement
        if announced is not None:
            self._check(announced, operation, flat)
        try:
            self._meeting.exchange(self._calls, operation, flat, take)
        except MeetingError as error:
            raise RuntimeError(f"{operation.name.lower()}, call {self._calls}: {error}") from error

    def _check(self, announced: Announcement, operation: Operation, flat: torch.Tensor) -> None:
        """Returns if a call is the one that was announced."""
        size_bytes = flat.numel() * flat.dtype.itemsize
        is_right = (
            self._calls == announced.calls
            and operation.name.lower().startswith(announced.operation)
            and (size_bytes, flat.dtype) == (announced.size_bytes, announced.dtype)
        )
        if not is_right:
            raise WrongCallError(
                f"call {self._calls} is {operation.name.lower()} of {size_bytes} bytes of {flat.dtype}; announced was "
                f"call {announced.calls}, {announced.operation} of {announced.size_bytes} bytes of {announced.dtype}"
            )


def register() -> None:
    """Makes the backend known to torch.distributed in this process."""
    if BACKEND.upper() not in dist.Backend._plugins:  # noqa: SLF001 - torch has no other way to ask
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])


def _create(torch_options: Any, options: Options | None) -> SharedMemoryGroup:
    """Makes a group as torch asks for it; all its ranks do."""
    options = options or Options()
    meeting = meet(
        torch_options.store,
        torch_options.group_rank,
        torch_options.group_size,
        torch_options.timeout.total_seconds(),
        spins=options.spins,
    )
    return SharedMemoryGroup(meeting, options.announcement)


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the elements of a call's one tensor.

    Raises:
        RuntimeError: It cannot be shared.
    """
    tensor = tensors[0]
    if len(tensors) != 1 or tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.dtype not in DTYPES:
        raise RuntimeError(f"{BACKEND} takes one contiguous tensor on the CPU, not {tensor.dtype} on {tensor.device}")
    return tensor.view(-1)
