"""A file to which records are appended, each on the disk before anybody is told of it.

A record that was half written when its writer died is found by its checksum and cut off; everything before it counts.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_MAGIC = b"lockstep journal 1\n"
_HEAD = struct.Struct("<4sI16s")
_MARK = b"\xa7rec"
_NAME = "journal"
_PART = "journal.part"


class JournalError(ValueError):
    """A journal cannot be used: its folder, its file, or another server that uses it."""


class Place(NamedTuple):
    """Where a record is: of the whole of it, in bytes."""

    start: int
    length: int


class JournalFile:
    """The file of one folder, open to this process alone. Not for several threads at once.

    Args:
        folder: Where it is; made when it does not exist.

    Attributes:
        cut_bytes: How many bytes of an unfinished record were cut off its end.

    Raises:
        JournalError: It cannot be opened, is in use, or is damaged elsewhere than at its end.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise JournalError(f"--journal {folder}: a folder is needed, but a file is there") from error
        except OSError as error:
            raise JournalError(f"--journal {folder}: {error.strerror}") from error
        try:
            (folder / _PART).unlink(missing_ok=True)
            self._file = os.open(folder / _NAME, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise JournalError(f"--journal {folder}: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._end = self._whole_bytes()
            size = os.fstat(self._file).st_size
            self.cut_bytes = size - self._end
            if self._end == 0:
                self._end = self._write(0, _MAGIC)
            elif self.cut_bytes:
                os.ftruncate(self._file, self._end)
            os.fsync(self._file)
            _sync_folder(folder)
        except BlockingIOError:
            os.close(self._file)
            raise JournalError(f"--journal {folder}: another server uses it") from None
        except OSError as error:
            os.close(self._file)
            raise JournalError(f"--journal {folder}: {error.strerror}") from error
        except JournalError:
            os.close(self._file)
            raise

    @property
    def size_bytes(self) -> int:
        """How large it is."""
        return self._end

    def records(self) -> Iterator[tuple[Place, bytes]]:
        """Yields all records, in order."""
        at = len(_MAGIC)
        while (place := self._record_at(at)) is not None:
            yield place, self.read(place)
            at += place.length

    def read(self, place: Place) -> bytes:
        """Returns a record."""
        return self._bytes(place.start, place.length)[_HEAD.size :]

    def append(self, payload: bytes) -> Place:
        """Appends a record; it is on the disk when this returns.

        Raises:
            OSError: It could not be written; the file is as before.
        """
        start = self._end
        try:
            end = self._write(start, _framed(payload))
            os.fdatasync(self._file)
        except OSError:
            with suppress(OSError):
                # What cannot even be cut off is cut off by the next one, which begins in the same place.
                os.ftruncate(self._file, start)
            raise
        self._end = end
        return Place(start, end - start)

    def rewrite(self, places: Sequence[Place]) -> list[Place]:
        """Leaves only the records at ``places``, in that order; returns where they are now.

        Raises:
            OSError: The new file could not be written; the old one is as before.
        """
        path, fresh = self._folder / _PART, []
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            end = _write_all(file, 0, _MAGIC)
            for place in places:
                start, end = end, _write_all(file, end, self._bytes(place.start, place.length))
                fresh.append(Place(start, end - start))
            os.fsync(file)
            path.rename(self._folder / _NAME)
        except OSError:
            os.close(file)
            path.unlink(missing_ok=True)
            raise
        os.close(self._file)
        self._file, self._end = file, end
        _sync_folder(self._folder)
        return fresh

    def close(self) -> None:
        """Closes it."""
        os.close(self._file)

    def _whole_bytes(self) -> int:
        """Returns up to where the file is whole; 0 when it has not even a beginning.

        Raises:
            JournalError: It is no journal, or records follow one that is damaged.
        """
        size = os.fstat(self._file).st_size
        if self._bytes(0, len(_MAGIC)) != _MAGIC:
            if size <= len(_MAGIC) and _MAGIC.startswith(self._bytes(0, size)):
                return 0
            raise JournalError(f"--journal {self._folder}: {_NAME} is no journal of this version")
        at = len(_MAGIC)
        while (place := self._record_at(at)) is not None:
            at += place.length
        rest = self._bytes(at, size - at)
        found = rest.find(_MARK, 1)
        while found >= 0:
            if self._record_at(at + found) is not None:
                raise JournalError(f"--journal {self._folder}: {_NAME} is damaged at byte {at}, and goes on behind it")
            found = rest.find(_MARK, found + 1)
        return at

    def _record_at(self, at: int) -> Place | None:
        head = self._bytes(at, _HEAD.size)
        if len(head) < _HEAD.size:
            return None
        mark, length, checksum = _HEAD.unpack(head)
        if mark != _MARK or at + _HEAD.size + length > os.fstat(self._file).st_size:
            return None
        payload = self._bytes(at + _HEAD.size, length)
        return Place(at, _HEAD.size + length) if _checksum(payload) == checksum else None

    def _bytes(self, start: int, length: int) -> bytes:
        return os.pread(self._file, length, start)

    def _write(self, start: int, data: bytes) -> int:
        return _write_all(self._file, start, data)


def _framed(payload: bytes) -> bytes:
    return _HEAD.pack(_MARK, len(payload), _checksum(payload)) + payload


def _checksum(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=16).digest()


def _write_all(file: int, start: int, data: bytes) -> int:
    """Writes ``data`` at ``start``; returns where it ends."""
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, start)
        if written == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        start, view = start + written, view[written:]
    return start


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
