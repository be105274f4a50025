"""One rank's part of a trace: a file of fixed size that holds its latest spans, whatever becomes of the rank.

The file is mapped into memory, so that writing a span is a few machine words, and what was written survives the rank.
It begins with a page that says whose it is (``PartHeader``, msgpack), followed by a ring of spans of equal size.
Needs no torch: the front side reads it.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

SPANS_KEPT = 1 << 20
"""Spans that a part holds, 40 bytes each; the oldest are overwritten."""

_MAGIC = b"LSTRACE1"
_HEADER_BYTES = 1 << 14
_LENGTH = struct.Struct("<I")
_SPAN = struct.Struct("<QqqqIHH")
_MAX_VALUE = (1 << 32) - 1


class TraceFileError(RuntimeError):
    """A part of a trace, or a trace, cannot be written or read."""


class ClockReading(msgspec.Struct, frozen=True):
    """How a rank's clock stood against the leader's.

    Args:
        at_ns: When, by the rank's monotonic clock.
        offset_ns: What to add to the rank's clock to get the leader's.
        error_ns: How far off ``offset_ns`` may be.
    """

    at_ns: int
    offset_ns: int
    error_ns: int


class SpanKind(msgspec.Struct, frozen=True):
    """What a span shows.

    Args:
        name: Its name.
        value: What its number counts; empty when it has none.
        waits: Whom its thread waits for: another ``stage``, its ``group``, the ``client``, ``threads``; empty when it
            works.
    """

    name: str
    value: str = ""
    waits: str = ""


class PartHeader(msgspec.Struct, frozen=True):
    """Whose part it is, and how to read it.

    Args:
        rank: Global rank.
        stage: Its pipeline stage.
        tp_rank: Its rank within the stage.
        host: What identifies the machine's clock: ranks with the same one share it.
        kinds: The kinds of spans, by number.
        clocks: How the clock stood, at the start and perhaps at the end.
        epoch: How often all ranks had been forked anew before.
    """

    rank: int
    stage: int
    tp_rank: int
    host: str
    kinds: tuple[SpanKind, ...]
    clocks: tuple[ClockReading, ...]
    epoch: int = 0


class Span(NamedTuple):
    """What was done from when to when, by the rank's monotonic clock; track 0 is the step loop, others its threads."""

    number: int
    start_ns: int
    end_ns: int
    step: int
    value: int
    kind: int
    track: int


class TracePart:
    """The file that a rank writes.

    Args:
        path: Where; its folder exists.
        header: Whose it is.
        spans_kept: How many spans it holds.

    Raises:
        TraceFileError: It cannot be made.
    """

    def __init__(self, path: Path, header: PartHeader, spans_kept: int = SPANS_KEPT) -> None:
        size = _HEADER_BYTES + spans_kept * _SPAN.size
        try:
            with path.open("w+b") as file:
                # All of it at once: a write to a mapped page for which the disk has no room would end the process.
                os.posix_fallocate(file.fileno(), 0, size)
                self._map = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise TraceFileError(f"cannot make {path} of {size} bytes: {error.strerror}") from error
        self._spans_kept = spans_kept
        self.write_header(header)

    def write_header(self, header: PartHeader) -> None:
        """Writes the header anew."""
        body = msgspec.msgpack.encode(header)
        head = _MAGIC + _LENGTH.pack(len(body)) + body
        self._map[: len(head)] = head

    def put(self, span: Span) -> None:
        """Writes a span; its number, from 0, decides where. A later one of the same number replaces it."""
        at = _HEADER_BYTES + span.number % self._spans_kept * _SPAN.size
        number, start_ns, end_ns, step, value, kind, track = span
        _SPAN.pack_into(self._map, at, number + 1, start_ns, end_ns, step, min(value, _MAX_VALUE), kind, track)

    def close(self) -> None:
        """Closes the file."""
        self._map.close()


class ReadPart:
    """A part as it was left.

    Args:
        path: The file.

    Raises:
        TraceFileError: It is no part, or cannot be read.
    """

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise TraceFileError(f"cannot read {path}: {error}") from error
        start = len(_MAGIC) + _LENGTH.size
        if len(self._map) < _HEADER_BYTES or self._map[: len(_MAGIC)] != _MAGIC:
            raise TraceFileError(f"{path} is no part of a trace")
        (length,) = _LENGTH.unpack(self._map[len(_MAGIC) : start])
        try:
            self.header = msgspec.msgpack.decode(self._map[start : start + length], type=PartHeader)
        except msgspec.DecodeError as error:
            raise TraceFileError(f"{path} has no header that can be read: {error}") from error
        self._spans_kept = (len(self._map) - _HEADER_BYTES) // _SPAN.size
        self._newest = max((number for number, *_ in self._raw()), default=0)

    @property
    def lost(self) -> int:
        """How many spans were overwritten by later ones."""
        return max(self._newest - self._spans_kept, 0)

    def spans(self) -> Iterator[Span]:
        """Yields the spans in the order of their numbers, which is that of their ends within a track."""
        for number in range(self.lost, self._newest):
            at = _HEADER_BYTES + number % self._spans_kept * _SPAN.size
            found, *rest = _SPAN.unpack_from(self._map, at)
            # A rank that was killed may leave a hole, or half a span.
            if found == number + 1 and 0 < rest[0] <= rest[1] and rest[4] < len(self.header.kinds):
                yield Span(number, *rest)

    def close(self) -> None:
        """Closes the file."""
        self._map.close()

    def _raw(self) -> Iterator[tuple[int, ...]]:
        with memoryview(self._map) as view:
            end = _HEADER_BYTES + self._spans_kept * _SPAN.size
            with view[_HEADER_BYTES:end] as ring:
                yield from _SPAN.iter_unpack(ring)
