"""Weights that outlive the process which read them: in a file in memory, which the next process of the rank maps.

The file has no name: whoever was forked with it has it, and it is gone with the last of them. It counts once the kernel
has sealed it against writes, which happens at once and after everything else, so that what a process left unfinished
when it was killed is never used, and what counts can no longer be changed by anyone.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
from typing import Final

import msgspec
import torch

_SEALS: Final = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_SEGMENT_BYTES: Final = 256 << 20
_LENGTH_BYTES: Final = 8
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class _Place(msgspec.Struct, frozen=True):
    """Where a tensor lies in the file; ``offset`` in bytes, at the beginning of a page."""

    offset: int
    dtype: str
    shape: tuple[int, ...]


class _Mapping:
    """A part of the file in this process's memory, and what lies there.

    Args:
        file: The file.
        start: Where the part begins, in bytes; at a page.
        length: Its length.
    """

    def __init__(self, file: int, start: int, length: int) -> None:
        self.memory = mmap.mmap(file, length, access=mmap.ACCESS_COPY, offset=start)
        self.places: dict[str, _Place] = {}
        self.start, self.end = start, start + length

    def view(self, name: str) -> torch.Tensor:
        """Returns the tensor that lies here under ``name``."""
        place = self.places[name]
        dtype, count, offset = _DTYPES[place.dtype], math.prod(place.shape), place.offset - self.start
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=offset).view(place.shape)


class KeptWeights:
    """The weights of one rank in a file that it shares with the processes after it.

    Tensors are views of private mappings: a write to one, which nobody should do, stays in the process that did it.
    All of them, new and found, begin at a page, so that a kernel whose sums depend on alignment computes alike.

    Args:
        file: The descriptor of a memory file that may be sealed; it is closed by nobody here.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._mappings: list[_Mapping] = []
        self._used = 0
        self.is_complete = bool(fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE)
        """Whether an earlier process wrote all of them; then nothing more is kept."""
        if self.is_complete:
            self._open()
        else:
            os.ftruncate(file, 0)

    def find(self, name: str) -> torch.Tensor | None:
        """Returns the tensor that was kept under ``name``, on the CPU; None when there is none."""
        for mapping in self._mappings:
            if name in mapping.places:
                return mapping.view(name)
        return None

    def keep(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor equal to ``tensor`` that the next process will find under ``name``.

        Args:
            name: What it is found by.
            tensor: On the CPU, contiguous; one without elements, or after ``complete``, is returned as it is.
        """
        if self.is_complete or tensor.numel() == 0:
            return tensor
        size = tensor.numel() * tensor.element_size()
        mapping = self._room(size)
        _write(self._file, tensor.reshape(-1).view(torch.uint8).numpy().data, self._used)
        mapping.places[name] = _Place(self._used, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        self._used = _next_page(self._used + size)
        return mapping.view(name)

    def complete(self) -> None:
        """Has what was kept count from now on; no process can change it any more."""
        if self.is_complete:
            return
        places = {name: place for mapping in self._mappings for name, place in mapping.places.items()}
        index = msgspec.msgpack.encode(places)
        os.ftruncate(self._file, self._used)
        _write(self._file, memoryview(index + len(index).to_bytes(_LENGTH_BYTES, "big")), self._used)
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _SEALS)
        self.is_complete = True

    def _open(self) -> None:
        size = os.fstat(self._file).st_size
        length = int.from_bytes(os.pread(self._file, _LENGTH_BYTES, size - _LENGTH_BYTES), "big")
        index = os.pread(self._file, length, size - _LENGTH_BYTES - length)
        mapping = _Mapping(self._file, 0, size)
        mapping.places.update(msgspec.msgpack.decode(index, type=dict[str, _Place]))
        self._mappings.append(mapping)

    def _room(self, size: int) -> _Mapping:
        """Returns a mapping of the file in which ``size`` bytes are free; the file grows in large pieces."""
        if not self._mappings or self._used + size > self._mappings[-1].end:
            length = _next_page(max(size, _SEGMENT_BYTES))
            os.ftruncate(self._file, self._used + length)
            self._mappings.append(_Mapping(self._file, self._used, length))
        return self._mappings[-1]


def _next_page(offset: int) -> int:
    return -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE


def _write(file: int, data: memoryview, offset: int) -> None:
    """Writes all of ``data``; the kernel takes at most 2 GiB at once."""
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written
