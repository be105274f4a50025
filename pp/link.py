"""Point-to-point messages between the stages of one pipeline: typed, numbered by step, sent asynchronously.

A link joins the ranks that share a tensor-parallel rank, one per stage. Every message is a header (magic, tag, step,
dtype, shape) followed by its body; the header is checked before the body is received, because a body of the wrong size
would end the receiving process inside gloo. Buffers of a send are held until the send is done: overwriting them earlier
would deliver the new bytes.
"""

from __future__ import annotations

import time
from collections import deque
from enum import IntEnum
from typing import Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist

_MAGIC = 0x4C4F434B
_MAX_DIMENSIONS = 4
_HEADER_WORDS = 5 + _MAX_DIMENSIONS
_INLINE_BYTES = 1024 - 8 * _HEADER_WORDS
_DTYPES = (torch.uint8, torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.float16, torch.float64)


class LinkError(RuntimeError):
    """A message between stages failed or was not the one expected: the rank cannot go on.

    Args:
        message: One line that names operation, link, stages and step.
        fault: Whose fault it is: ``call`` when this rank's own call was wrong and nothing was sent, ``payload`` when
            what came was not what belongs here, ``backend`` when the operation failed, often since another rank did.
        rank: This rank, counted over all stages.
        group: The link's name.
        operation: The operation's name.
        step: The step of its message.
        sequence: Which operation of the link it was, as this rank counts them.
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


class LinkObserver(Protocol):
    """Told of every message sent: its name, its link, and its bytes with the header."""

    def __call__(self, operation: str, group: str, payload_bytes: int, /) -> None:
        """Takes note of one send."""


class OperationRecord(Protocol):
    """Told when this rank begins and ends an operation, so that somebody else sees where it is."""

    def register(self, operation: str, group: str) -> int:
        """Returns the number of an operation of a group."""

    def enter(self, code: int, sequence: int) -> None:
        """Notes that the operation with this number begins; ``sequence`` counts the link's operations."""

    def leave(self) -> None:
        """Notes that it is over."""


class Tag(IntEnum):
    """What a message is; messages of one tag between two ranks keep their order."""

    INTAKE = 1
    VERDICT = 2
    HIDDEN = 3
    MASK = 4
    TOKENS = 5
    WARM_UP = 6
    REPORT = 7
    CONFIRM = 8


class _PendingSend(NamedTuple):
    step: int
    tag: Tag
    stage: int
    work: dist.Work
    buffer: torch.Tensor


class StageLink:
    """This rank's place in its pipeline.

    Args:
        stage: This rank's stage, 0 ≤ stage < size.
        ranks: The global rank of each stage's rank in this pipeline, in stage order.
        name: What errors call the link, for example ``"pp0"``.
        control_group: CPU (gloo) process group of ``ranks``; None when there is one stage.
        device_group: Process group for tensors on the device; None when there is one stage.
        device: Where received tensors live.
        observer: Told of every send; None costs nothing.
        record: Told where this rank is; None costs nothing.

    Attributes:
        sequence: How many operations this rank began.
        waited_ns: Time spent so far until messages came, or were taken.
    """

    def __init__(
        self,
        stage: int,
        ranks: tuple[int, ...],
        *,
        name: str = "pp",
        control_group: dist.ProcessGroup | None = None,
        device_group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        observer: LinkObserver | None = None,
        record: OperationRecord | None = None,
    ) -> None:
        if len(ranks) > 1 and (control_group is None or device_group is None):
            raise LinkError(f"link {name} over {len(ranks)} stages needs a control and a device process group")
        self.stage = stage
        self.size = len(ranks)
        self.name = name
        self.step = 0
        self.observer = observer
        self.sequence = 0
        self.waited_ns = 0
        self._record = record
        self._codes: dict[tuple[str, Tag, int], int] = {}
        self._ranks = ranks
        self._control_group = control_group
        self._device_group = device_group
        self._device = device or torch.device("cpu")
        self._pending: deque[_PendingSend] = deque()

    @property
    def is_first(self) -> bool:
        """Whether this is the first stage."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage."""
        return self.stage == self.size - 1

    def begin_step(self, step: int, in_flight_steps: int = 1) -> None:
        """Sets the step that messages carry; waits for sends older than ``in_flight_steps`` steps.

        Raises:
            LinkError: A send failed or was not taken in the group's time-out.
        """
        self.step = step
        while self._pending and self._pending[0].step < step - in_flight_steps:
            self._finish_oldest()

    def drain(self) -> None:
        """Waits until every message sent was taken."""
        while self._pending:
            self._finish_oldest()

    def send_frame(self, payload: bytes, stage: int, tag: Tag) -> None:
        """Sends bytes to ``stage`` without waiting."""
        body = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)
        self._send(body, stage, tag)

    def receive_frame(self, stage: int, tag: Tag, *, step: int | None = None) -> bytes:
        """Returns the bytes of the message with ``tag`` from ``stage``.

        Args:
            stage: The sender's stage.
            tag: What the message is.
            step: The step it must carry; the current one when left out.

        Raises:
            LinkError: The message is of another step or kind, or the backend failed.
        """
        return self._receive(stage, tag, self.step if step is None else step).cpu().numpy().tobytes()

    def send_tensor(self, tensor: torch.Tensor, stage: int, tag: Tag) -> None:
        """Sends a copy-free view of ``tensor`` to ``stage``; the caller must not write to it afterwards."""
        self._send(tensor.contiguous(), stage, tag)

    def receive_tensor(
        self, stage: int, tag: Tag, *, shape: tuple[int, ...], dtype: torch.dtype, step: int | None = None
    ) -> torch.Tensor:
        """Returns the tensor with ``tag`` from ``stage``.

        Args:
            stage: The sender's stage.
            tag: What the message is.
            shape: The shape it must have.
            dtype: The dtype it must have.
            step: The step it must carry; the current one when left out.

        Raises:
            LinkError: It has another step, shape or dtype, or the backend failed.
        """
        step = self.step if step is None else step
        tensor = self._receive(stage, tag, step)
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise self._error(
                f"{tag.name} on {self.name} from stage {stage}, step {step}: "
                f"got {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {shape}",
                _operation("receive", tag, stage),
                fault="payload",
                step=step,
            )
        return tensor

    def _send(self, body: torch.Tensor, stage: int, tag: Tag) -> None:
        if body.dim() > _MAX_DIMENSIONS or body.dtype not in _DTYPES:
            raise self._error(
                f"{tag.name} on {self.name}, step {self.step}: cannot send {body.dtype} {tuple(body.shape)}",
                _operation("send", tag, stage),
            )
        if not 0 <= stage < self.size or stage == self.stage:
            raise self._error(
                f"{tag.name} on {self.name}, step {self.step}: stage {self.stage} cannot send to stage {stage} of "
                f"{self.size}",
                _operation("send", tag, stage),
            )
        shape = [*body.shape, *([0] * (_MAX_DIMENSIONS - body.dim()))]
        words = [_MAGIC, int(tag), self.step, _DTYPES.index(body.dtype), body.dim(), *shape]
        header = torch.zeros(8 * _HEADER_WORDS + _INLINE_BYTES, dtype=torch.uint8)
        header[: 8 * _HEADER_WORDS] = torch.tensor(words, dtype=torch.int64).view(torch.uint8)
        flat = body.reshape(-1).view(torch.uint8)
        inline = self._travels_inline(flat.numel(), body.device)
        if inline:
            header[8 * _HEADER_WORDS : 8 * _HEADER_WORDS + flat.numel()] = flat
        self._post(header, stage, tag, self._control_group)
        if not inline:
            self._post(flat, stage, tag, self._group_of(body.device))
        if self.observer is not None:
            self.observer(f"send:{tag.name.lower()}", self.name, header.numel() + flat.numel() * (not inline))

    def _receive(self, stage: int, tag: Tag, expected_step: int) -> torch.Tensor:
        header = torch.empty(8 * _HEADER_WORDS + _INLINE_BYTES, dtype=torch.uint8)
        self._take(header, stage, tag, self._control_group)
        magic, got_tag, step, dtype_code, dimensions, *shape = (
            header[: 8 * _HEADER_WORDS].clone().view(torch.int64).tolist()
        )
        if (magic, got_tag, step) != (_MAGIC, int(tag), expected_step):
            raise self._error(
                f"{tag.name} on {self.name} from stage {stage}: got tag {got_tag} of step {step}, "
                f"expected tag {int(tag)} of step {expected_step}",
                _operation("receive", tag, stage),
                fault="payload",
                step=expected_step,
            )
        dtype = _DTYPES[dtype_code]
        device = self._device if tag is Tag.HIDDEN else torch.device("cpu")
        body = torch.empty(shape[:dimensions], dtype=dtype, device=device)
        flat = body.reshape(-1).view(torch.uint8)
        if self._travels_inline(flat.numel(), device):
            flat.copy_(header[8 * _HEADER_WORDS : 8 * _HEADER_WORDS + flat.numel()])
        else:
            self._take(flat, stage, tag, self._group_of(device))
        return body

    @staticmethod
    def _travels_inline(payload_bytes: int, device: torch.device) -> bool:
        return device.type == "cpu" and payload_bytes <= _INLINE_BYTES

    def _group_of(self, device: torch.device) -> dist.ProcessGroup | None:
        return self._control_group if device.type == "cpu" else self._device_group

    def _post(self, buffer: torch.Tensor, stage: int, tag: Tag, group: dist.ProcessGroup | None) -> None:
        self._enter("send", tag, stage)
        try:
            work = dist.isend(buffer, dst=self._ranks[stage], group=group, tag=int(tag))
        except RuntimeError as error:
            raise self._failure("send", tag, stage, error) from error
        if work is None:
            raise self._error(
                f"send of {tag.name} on {self.name}: this rank is not in the link's group",
                _operation("send", tag, stage),
            )
        self._leave()
        self._pending.append(_PendingSend(self.step, tag, stage, work, buffer))

    def _take(self, buffer: torch.Tensor, stage: int, tag: Tag, group: dist.ProcessGroup | None) -> None:
        self._enter("receive", tag, stage)
        began_ns = time.monotonic_ns()
        try:
            dist.recv(buffer, src=self._ranks[stage], group=group, tag=int(tag))
        except RuntimeError as error:
            raise self._failure("receive", tag, stage, error) from error
        self.waited_ns += time.monotonic_ns() - began_ns
        self._leave()

    def _finish_oldest(self) -> None:
        pending = self._pending.popleft()
        self._enter("finish send", pending.tag, pending.stage)
        began_ns = time.monotonic_ns()
        try:
            pending.work.wait()
        except RuntimeError as error:
            raise self._error(
                f"send of step {pending.step} on {self.name} stage {self.stage}: {error}",
                _operation("finish send", pending.tag, pending.stage),
                fault="backend",
                step=pending.step,
            ) from error
        self.waited_ns += time.monotonic_ns() - began_ns
        self._leave()

    def _enter(self, operation: str, tag: Tag, stage: int) -> None:
        self.sequence += 1
        record = self._record
        if record is None:
            return
        code = self._codes.get((operation, tag, stage))
        if code is None:
            code = record.register(_operation(operation, tag, stage), self.name)
            self._codes[operation, tag, stage] = code
        record.enter(code, self.sequence)

    def _leave(self) -> None:
        if self._record is not None:
            self._record.leave()

    def _failure(self, operation: str, tag: Tag, stage: int, error: RuntimeError) -> LinkError:
        return self._error(
            f"{operation} of {tag.name} on {self.name} between stages {self.stage} and {stage}, "
            f"step {self.step}: {error}",
            _operation(operation, tag, stage),
            fault="backend",
        )

    def _error(
        self,
        message: str,
        operation: str,
        *,
        fault: Literal["call", "payload", "backend"] = "call",
        step: int | None = None,
    ) -> LinkError:
        return LinkError(
            message,
            fault=fault,
            rank=self._ranks[self.stage],
            group=self.name,
            operation=operation,
            step=self.step if step is None else step,
            sequence=self.sequence,
        )


def _operation(verb: str, tag: Tag, stage: int) -> str:
    return f"{verb} {tag.name.lower()} {'from' if verb == 'receive' else 'to'} stage {stage}"
