"""Which requests a server took on, and what it answered: what outlives it, for as long as somebody may ask again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from launch.serve.journal_file import JournalError, JournalFile, Place

_LOG = logging.getLogger(__name__)
_SMALL_BYTES = 1 << 20
"""A file smaller than this is not worth rewriting."""


class Asked(msgspec.Struct, frozen=True, tag="asked"):
    """A request that was taken on.

    Args:
        id: A digest of its key and of who gave it.
        path: Where it was sent to.
        body: What it asks for, with a seed.
        digest: Of path and body as the client sent them.
    """

    id: bytes
    path: str
    body: bytes
    digest: bytes


class Answered(msgspec.Struct, frozen=True, tag="answered"):
    """What became of one.

    Args:
        id: The request's.
        status: HTTP status.
        body: The reply, JSON.
        at: When, in seconds since 1970.
    """

    id: bytes
    status: int
    body: bytes
    at: float


class Dropped(msgspec.Struct, frozen=True, tag="dropped"):
    """A request that was refused for the moment: it may come again."""

    id: bytes


_Record = Asked | Answered | Dropped


@dataclass(slots=True)
class _Entry:
    """Where a request and its answer are in the file."""

    digest: bytes
    asked: Place
    answered: Place | None = None
    answered_at: float = 0.0

    @property
    def places(self) -> list[Place]:
        return [self.asked] if self.answered is None else [self.asked, self.answered]


class Journal:
    """A journal in a folder. Not for several threads at once.

    Args:
        folder: Its folder; made when it does not exist.
        keep_s: How long an answer is kept.
        limit_bytes: How many bytes of requests and answers are kept at most; the oldest answers go first, requests that
            have none stay.
        clock: Seconds since 1970.

    Raises:
        JournalError: It cannot be opened, is in use or damaged.
    """

    def __init__(
        self, folder: Path, *, keep_s: float, limit_bytes: int, clock: Callable[[], float] = time.time
    ) -> None:
        self._file = JournalFile(folder)
        self._keep_s = keep_s
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._entries: dict[bytes, _Entry] = {}
        self._answered: dict[bytes, None] = {}
        self._live_bytes = 0
        self.cut_bytes = self._file.cut_bytes
        try:
            for place, payload in self._file.records():
                self._note(msgspec.msgpack.decode(payload, type=_Record), place)
            self._retire()
        except msgspec.DecodeError as error:
            self._file.close()
            raise JournalError(f"--journal {folder}: it cannot be read: {error}") from error
        except OSError as error:
            self._file.close()
            raise JournalError(f"--journal {folder}: {error.strerror}") from error

    @property
    def size_bytes(self) -> int:
        """How large the file is."""
        return self._file.size_bytes

    def unfinished(self) -> list[Asked]:
        """Returns the requests that have no answer, in the order in which they came."""
        open_ones = [entry.asked for entry in self._entries.values() if entry.answered is None]
        return [msgspec.msgpack.decode(self._file.read(place), type=Asked) for place in sorted(open_ones)]

    def digest_of(self, request_id: bytes) -> bytes | None:
        """Returns the digest of what a request asked for; None when there is no such request."""
        entry = self._entries.get(request_id)
        return None if entry is None else entry.digest

    def asked(self, request_id: bytes) -> Asked:
        """Returns a request that is there."""
        return msgspec.msgpack.decode(self._file.read(self._entries[request_id].asked), type=Asked)

    def answer_to(self, request_id: bytes) -> Answered | None:
        """Returns the answer to a request; None when it has none."""
        entry = self._entries.get(request_id)
        if entry is None or entry.answered is None:
            return None
        return msgspec.msgpack.decode(self._file.read(entry.answered), type=Answered)

    def write(self, record: _Record) -> None:
        """Keeps a record; it is on the disk when this returns. Answers that are too old or too many go.

        Raises:
            OSError: It cannot be written; the journal is as before.
        """
        self._note(record, self._file.append(msgspec.msgpack.encode(record)))
        self._retire()

    def close(self) -> None:
        """Closes it."""
        self._file.close()

    def _note(self, record: _Record, place: Place) -> None:
        match record:
            case Asked():
                self._forget(record.id)
                self._entries[record.id] = _Entry(record.digest, place)
                self._live_bytes += place.length
            case Answered():
                entry = self._entries.get(record.id)
                if entry is not None and entry.answered is None:
                    entry.answered, entry.answered_at = place, record.at
                    self._answered[record.id] = None
                    self._live_bytes += place.length
            case Dropped():
                self._forget(record.id)

    def _forget(self, request_id: bytes) -> None:
        entry = self._entries.pop(request_id, None)
        self._answered.pop(request_id, None)
        if entry is not None:
            self._live_bytes -= sum(place.length for place in entry.places)

    def _retire(self) -> None:
        """Forgets answers that are too old or too many, and rewrites the file when most of it counts no more."""
        before_s = self._clock() - self._keep_s
        for request_id in list(self._answered):
            if self._entries[request_id].answered_at >= before_s and self._live_bytes <= self._limit_bytes:
                break
            self._forget(request_id)
        if self._file.size_bytes > max(_SMALL_BYTES, 2 * self._live_bytes):
            # Else later: nothing is lost but room.
            try:
                self._rewrite()
            except OSError as error:
                _LOG.warning("the journal cannot be made smaller: %s", error.strerror)

    def _rewrite(self) -> None:
        entries = list(self._entries.values())
        fresh = iter(self._file.rewrite([place for entry in entries for place in entry.places]))
        for entry in entries:
            entry.asked = next(fresh)
            if entry.answered is not None:
                entry.answered = next(fresh)
