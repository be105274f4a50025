"""Work and tensors that are not what they should be."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_FLIPPED_BIT = 0x40
_OTHER_DTYPE = {
    torch.float32: torch.float64,
    torch.float64: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.uint8: torch.int32,
    torch.int32: torch.int64,
    torch.int64: torch.int32,
}


class AlteredWork(dist.Work):
    """Work of the backend, after which something happens when it was waited for.

    Args:
        work: The real work.
        then: What happens, once.
    """

    def __init__(self, work: dist.Work, then: Callable[[], object]) -> None:
        super().__init__()
        self._real = work
        self._then: Callable[[], object] | None = then

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits as the real work does."""
        done = self._real.wait() if timeout is None else self._real.wait(timeout)
        then, self._then = self._then, None
        if then is not None:
            then()
        return done

    def is_completed(self) -> bool:
        """As the real work's."""
        return self._real.is_completed()

    def is_success(self) -> bool:
        """As the real work's."""
        return self._real.is_success()

    def exception(self) -> Any:
        """As the real work's."""
        return self._real.exception()

    def synchronize(self) -> None:
        """As the real work's."""
        self._real.synchronize()

    def result(self) -> list[torch.Tensor]:
        """As the real work's."""
        return self._real.result()

    def source_rank(self) -> int:
        """As the real work's."""
        return self._real.source_rank()

    def _source_rank(self) -> int:
        return self._real._source_rank()  # noqa: SLF001 - torch's name

    def get_future(self) -> Any:
        """As the real work's."""
        return self._real.get_future()


class DoneWork(dist.Work):
    """Work that was never done, and says that it was."""

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002 - nothing is waited for
        """Returns at once."""
        return True

    def is_completed(self) -> bool:
        """It says so."""
        return True

    def get_future(self) -> Any:
        """Returns a future that is done."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result([])
        return future


class FailedWork(AlteredWork):
    """Work of the backend that fails when it was waited for.

    Args:
        work: The real work.
        message: Of the error.
    """

    def __init__(self, work: dist.Work, message: str) -> None:
        super().__init__(work, self._fail)
        self._message = message

    def _fail(self) -> None:
        raise RuntimeError(self._message)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors of a call's argument: one, or a list of them, or a list of lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in tensors_in(part)] if isinstance(value, list) else []


def halved(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns a call's arguments with the first half of each tensor; twice a tensor that has one element."""
    return _mapped(args, _half)


def other_dtype(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns a call's arguments with tensors of another dtype."""
    return _mapped(args, lambda tensor: tensor.to(_OTHER_DTYPE.get(tensor.dtype, torch.uint8)))


def flip(tensor: torch.Tensor, byte: int | None) -> None:
    """Flips a bit of a tensor: that of ``byte``, or one of the highest of the first element."""
    words = tensor.detach().reshape(-1)[:1] if byte is None else tensor.detach().view(-1)
    if words.numel() == 0:
        return
    raw = words.contiguous().view(torch.uint8)
    at = tensor.element_size() - 1 if byte is None else min(byte, raw.numel() - 1)
    raw[at] ^= _FLIPPED_BIT if byte is None else 1
    words.copy_(raw.view(tensor.dtype))


def _half(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1)
    return flat[: flat.numel() // 2].contiguous() if flat.numel() > 1 else flat.repeat(2)


def _mapped(args: tuple[Any, ...], change: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, ...]:
    def changed(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return change(value)
        return [changed(part) for part in value] if isinstance(value, list) else value

    return tuple(changed(value) for value in args)
