"""The tensor-parallel group: every collective of a stage goes through it.

Tensors travel on the device's backend (NCCL, shared memory or gloo), objects and frames on a CPU group. A group of one
rank makes no collective call but runs the same code. Every rank of the group calls the same methods in the same order.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from tp.schedule import ForwardSchedule
from tp.shared_memory_group import Announcement, WrongCallError

_FIRST_FRAME_BYTES = 4096
_HEADER_BYTES = 24
_OPERATIONS = ("all_reduce", "all_gather", "broadcast", "all_gather_object")


class CollectiveError(RuntimeError):
    """A collective failed, or a payload did not belong to this step: the rank cannot go on.

    Args:
        message: One line that names operation, group, rank and step.
        fault: Whose fault it is: ``call`` when this rank's own call was wrong and nothing was sent, ``payload`` when
            what came was not what belongs here, ``backend`` when the operation failed, often since another rank did.
        rank: This rank, counted over all stages.
        group: The group's name.
        operation: The operation's name.
        step: The step that it was in.
        sequence: Which operation of the group it was, as this rank counts them.
    """

    def __init__(
        self,
        message: str,
        *,
        fault: Literal["call", "payload", "backend"] = "call",
        rank: int = 0,
        group: str = "",
        operation: str = "",
        step: int = 0,
        sequence: int = 0,
    ) -> None:
        super().__init__(message)
        self.fault = fault
        self.rank = rank
        self.group = group
        self.operation = operation
        self.step = step
        self.sequence = sequence


class CollectiveObserver(Protocol):
    """Told of every collective: its name, its group, and the bytes this rank contributes or receives at once."""

    def __call__(self, operation: str, group: str, payload_bytes: int, /) -> None:
        """Takes note of one collective."""


class OperationRecord(Protocol):
    """Told when this rank begins and ends an operation, so that somebody else sees where it is."""

    def register(self, operation: str, group: str) -> int:
        """Returns the number of an operation of a group."""

    def enter(self, code: int, sequence: int) -> None:
        """Notes that the operation with this number begins; ``sequence`` counts the group's operations."""

    def leave(self) -> None:
        """Notes that it is over."""

    def beat(self) -> None:
        """Notes that this rank gets on."""


class TensorParallelGroup:
    """The ranks of one pipeline stage.

    Args:
        rank: This rank within the stage, 0 ≤ rank < size.
        size: How many ranks the stage has.
        name: What errors call the group, for example ``"tp0"``.
        root: The global rank of the group's rank 0.
        device_group: Process group for tensors; None when size is 1.
        control_group: CPU (gloo) process group for objects and frames; None when size is 1.
        device: Where the tensors that are reduced and gathered live; the CPU when left out.
        observer: Told of every collective; None costs nothing.
        record: Told where this rank is; None costs nothing.
        announcement: Told of each call of the device group before it is made; None when that does not compare them.

    Attributes:
        sequence: How many operations this rank began; equal on all ranks of the group that are in step.
        waited_ns: Time spent in collectives so far, waiting for the slowest rank among it; on a GPU that of the host.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        name: str = "tp",
        root: int = 0,
        device_group: dist.ProcessGroup | None = None,
        control_group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        observer: CollectiveObserver | None = None,
        record: OperationRecord | None = None,
        announcement: Announcement | None = None,
    ) -> None:
        if size > 1 and (device_group is None or control_group is None):
            raise CollectiveError(f"group {name} of {size} ranks needs a device and a control process group")
        self.rank = rank
        self.global_rank = root + rank
        self.size = size
        self.name = name
        self.step = 0
        self.observer = observer
        self.sequence = 0
        self.waited_ns = 0
        self._record = record
        self._codes = {name: record.register(name, self.name) for name in _OPERATIONS} if record is not None else {}
        self._root = root
        self._device_group = device_group
        self._control_group = control_group
        self._device_type = "cpu" if device is None else device.type
        self._schedule = ForwardSchedule()
        self._announcement = announcement

    def begin_step(self, step: int) -> None:
        """Sets the step that frames carry and errors name."""
        self.step = step

    def begin_forward(self, tokens: int) -> None:
        """Notes that a forward pass over so many tokens begins: its operations are those of every other one."""
        self._schedule.begin(tokens)

    def end_forward(self) -> None:
        """Notes that the forward pass is over.

        Raises:
            CollectiveError: It made fewer operations than the first one.
        """
        problem = self._schedule.end()
        if problem is not None:
            raise self._error(problem, "forward")

    def all_reduce_sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns ``tensor`` after summing it over the group in place."""
        return self._all_reduce_(tensor, dist.ReduceOp.SUM)

    def all_reduce_max_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns ``tensor`` after taking the elementwise maximum over the group in place."""
        return self._all_reduce_(tensor, dist.ReduceOp.MAX)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the ranks' tensors of one shape and dtype stacked as [size, *shape], in rank order."""
        if self.size == 1:
            self._pass()
            return tensor.unsqueeze(0)
        self._check("all_gather", tensor)
        return self._gather(tensor.contiguous(), self._device_group)

    def gather_numbers(self, values: list[int]) -> list[list[int]]:
        """Returns the ranks' integers of 64 bits, as many from each, in rank order; they travel on the CPU."""
        if self.size == 1:
            return [values]
        gathered: list[list[int]] = self._gather(torch.tensor(values, dtype=torch.int64), self._control_group).tolist()
        return gathered

    def broadcast_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns ``tensor`` (on the CPU, contiguous) overwritten with rank 0's values.

        Raises:
            CollectiveError: The tensor is elsewhere or has holes, or the backend failed.
        """
        if self.size > 1:
            if tensor.device.type != "cpu" or not tensor.is_contiguous():
                holes = "" if tensor.is_contiguous() else " with holes"
                raise self._error(f"cannot broadcast a tensor on {tensor.device}{holes}", "broadcast")
            self._observe("broadcast", tensor.numel() * tensor.element_size())
            self._call("broadcast", dist.broadcast, tensor, src=self._root, group=self._control_group)
        return tensor

    def broadcast_frame(self, payload: bytes | None) -> bytes:
        """Returns rank 0's bytes on every rank; the frame carries its step number and a checksum, which are checked.

        Args:
            payload: The bytes to send on rank 0; ignored elsewhere.

        Raises:
            CollectiveError: The frame belongs to another step, is not what was sent, or the backend failed.
        """
        if self.rank == 0 and payload is None:
            raise self._error("no payload", "broadcast_frame")
        if self.size == 1:
            return payload or b""
        first = torch.zeros(_FIRST_FRAME_BYTES, dtype=torch.uint8)
        body = payload if self.rank == 0 and payload is not None else b""
        inline_bytes = _FIRST_FRAME_BYTES - _HEADER_BYTES
        if self.rank == 0:
            words = [self.step, len(body), zlib.crc32(body)]
            first[:_HEADER_BYTES] = torch.tensor(words, dtype=torch.int64).view(torch.uint8)
            if body:
                inline = bytearray(body[:inline_bytes])
                first[_HEADER_BYTES : _HEADER_BYTES + len(inline)] = torch.frombuffer(inline, dtype=torch.uint8)
        self.broadcast_(first)
        step, length, checksum = first[:_HEADER_BYTES].view(torch.int64).tolist()
        if step != self.step:
            raise self._error(f"got step {step}, expected {self.step}", "broadcast_frame", fault="payload")
        rest = torch.empty(max(length - inline_bytes, 0), dtype=torch.uint8)
        if rest.numel():
            if self.rank == 0:
                rest = torch.frombuffer(bytearray(body[inline_bytes:]), dtype=torch.uint8)
            self.broadcast_(rest)
        if self.rank == 0:
            return body
        head = first[_HEADER_BYTES : _HEADER_BYTES + min(length, inline_bytes)]
        received = head.numpy().tobytes() + rest.numpy().tobytes()
        if zlib.crc32(received) != checksum:
            # Before it is passed on: those who get it from here would be to blame as much.
            raise self._error(f"{length} bytes are not those that were sent", "broadcast_frame", fault="payload")
        return received

    def all_gather_object(self, value: Any) -> list[Any]:
        """Returns every rank's picklable value, in rank order."""
        if self.size == 1:
            return [value]
        self._observe("all_gather_object", 0)
        gathered: list[Any] = [None] * self.size
        self._call("all_gather_object", dist.all_gather_object, gathered, value, group=self._control_group)
        return gathered

    def _all_reduce_(self, tensor: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> torch.Tensor:
        if self.size == 1:
            self._pass()
            return tensor
        self._check("all_reduce", tensor)
        self._observe("all_reduce", tensor.numel() * tensor.element_size())
        # What is reduced in place must be one piece: a tensor with holes is reduced as a copy.
        whole = tensor.contiguous()
        if self._announcement is not None:
            self._announcement.announce("all_reduce", whole)
        self._call("all_reduce", dist.all_reduce, whole, op=operation, group=self._device_group)
        return tensor if whole is tensor else tensor.copy_(whole)

    def _gather(self, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        self._observe("all_gather", tensor.numel() * tensor.element_size())
        gathered = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        if self._announcement is not None and group is self._device_group:
            self._announcement.announce("all_gather", tensor)
        self._call("all_gather", dist.all_gather, list(gathered.unbind(0)), tensor, group=group)
        return gathered

    def _check(self, operation: str, tensor: torch.Tensor) -> None:
        """Returns if a call can be right, as far as this rank can tell by itself; nothing was sent so far."""
        if tensor.device.type != self._device_type:
            raise self._error(f"got a tensor on {tensor.device}, not on {self._device_type}", operation)
        problem = self._schedule.problem(operation, tensor)
        if problem is not None:
            raise self._error(problem, operation)

    def _pass(self) -> None:
        """Notes that this rank came to an operation that a group of one rank has no need of."""
        if self._record is not None:
            self._record.beat()

    def _call(self, operation: str, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Makes one collective call, and counts its time."""
        self.sequence += 1
        if self._record is not None:
            self._record.enter(self._codes[operation], self.sequence)
        began_ns = time.monotonic_ns()
        try:
            collective(*args, **kwargs)
        except WrongCallError as error:
            raise self._error(str(error), operation) from error
        except RuntimeError as error:
            raise self._error(str(error), operation, fault="backend") from error
        self.waited_ns += time.monotonic_ns() - began_ns
        if self._record is not None:
            self._record.leave()

    def _observe(self, operation: str, payload_bytes: int) -> None:
        if self.observer is not None:
            self.observer(operation, self.name, payload_bytes)

    def _error(
        self,
        problem: str,
        operation: str,
        *,
        fault: Literal["call", "payload", "backend"] = "call",
    ) -> CollectiveError:
        return CollectiveError(
            f"{operation} on {self.name} rank {self.rank} of {self.size}, step {self.step}: {problem}",
            fault=fault,
            rank=self.global_rank,
            group=self.name,
            operation=operation,
            step=self.step,
            sequence=self.sequence,
        )
