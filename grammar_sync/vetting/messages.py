"""What a rank, its compile process and that process's workers tell one another, and how it travels.

A frame is its length in four bytes, then one msgpack message.
"""

from __future__ import annotations

import os
from typing import Literal

import msgspec

from grammar_sync.engines.prepared import PreparedGrammar
from grammar_sync.spec import GrammarSpec
from grammar_sync.vocabulary import GrammarVocabulary

_LENGTH_BYTES = 4
_MAX_FRAME_BYTES = 1 << 28
_READ_BYTES = 1 << 18

RefusalReason = Literal["grammar", "masks", "crash", "time", "memory"]
"""Why a grammar is not taken: it is wrong or cannot be enforced; its masks are too slow, contradict themselves or end
in a state that allows nothing; the engine crashed on it; it took too long; it needed too much memory."""


class FrameError(RuntimeError):
    """What came through a pipe is no message."""


class VettingLimits(msgspec.Struct, frozen=True):
    """What one grammar may cost before it is refused.

    Attributes:
        deadline_s: Seconds of CPU for compiling it, all engines together; a job that sleeps has a multiple of it.
        memory_bytes: What a compile may allocate.
        fill_limit_s: Seconds of CPU that one mask may take to fill.
        probe_limit_s: Seconds of CPU after which a probe is ended that hangs in a single mask.
    """

    deadline_s: float = 10.0
    memory_bytes: int = 512 << 20
    fill_limit_s: float = 0.1
    probe_limit_s: float = 1.0


class Vetted(msgspec.Struct, frozen=True, tag=True):
    """A grammar that is safe to compile in a rank.

    Attributes:
        prepared: What every rank compiles.
        size_bytes: How much memory it holds when compiled.
        compile_s: Seconds of CPU that its compile took.
        slowest_fill_s: Seconds of CPU of the slowest mask that the probe filled.
    """

    prepared: PreparedGrammar
    size_bytes: int
    compile_s: float
    slowest_fill_s: float


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A grammar that is not taken.

    Attributes:
        reason: What kind of reason it is.
        message: The reason in one line.
        is_final: Whether it would be the same another time; a time-out or a process killed from outside is not.
    """

    reason: RefusalReason
    message: str
    is_final: bool = True


VettingOutcome = Vetted | Refused


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The first message to the compile process.

    Attributes:
        vocabulary: What grammars are compiled for.
        backend: ``module:name`` of what makes the backend, called with the vocabulary and ``policy``.
        policy: Which engines may be used.
        limits: What one grammar may cost.
    """

    vocabulary: GrammarVocabulary
    backend: str
    policy: str
    limits: VettingLimits


class Vet(msgspec.Struct, frozen=True, tag=True):
    """Asks for a grammar to be vetted; ``job`` is the asker's number for it."""

    job: int
    spec: GrammarSpec


class Drop(msgspec.Struct, frozen=True, tag=True):
    """Says that nobody wants this job any more; there may be an answer or not."""

    job: int


Order = Setup | Vet | Drop


class Answer(msgspec.Struct, frozen=True, tag=True):
    """What the compile process says of a job.

    Attributes:
        job: Its number.
        outcome: What came of it.
        queue_s: Seconds it waited for a worker.
        vet_s: Seconds from its first worker's start to this outcome.
    """

    job: int
    outcome: VettingOutcome
    queue_s: float
    vet_s: float


class Busy(msgspec.Struct, frozen=True, tag=True):
    """Says that workers compute; each of them is bounded, so that an answer will come."""


Reply = Answer | Busy


class Candidates(msgspec.Struct, frozen=True, tag=True):
    """A worker's first word: the engines of the forms that it may try, in order."""

    engines: tuple[str, ...]


class Phase(msgspec.Struct, frozen=True, tag=True):
    """What a worker is about to do, told before it does it since the engine may end the process."""

    candidate: int
    name: Literal["compile", "probe"]


class CandidateRefused(msgspec.Struct, frozen=True, tag=True):
    """A candidate that will not do; the worker goes on to the next."""

    candidate: int
    refused: Refused


WorkerWord = Candidates | Phase | CandidateRefused | Vetted | Refused


class FrameBuffer:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def read(self, descriptor: int) -> bool:
        """Reads once from a descriptor that has something to say; returns whether it is still open."""
        try:
            data = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False
        self._bytes += data
        return bool(data)

    def frames(self) -> list[bytes]:
        """Returns the frames that are complete, and forgets them.

        Raises:
            FrameError: A length is beyond reason: this is no frame.
        """
        found: list[bytes] = []
        start = 0
        while len(self._bytes) - start >= _LENGTH_BYTES:
            length = int.from_bytes(self._bytes[start : start + _LENGTH_BYTES], "big")
            if length > _MAX_FRAME_BYTES:
                raise FrameError(f"a frame of {length} bytes, at most {_MAX_FRAME_BYTES} are allowed")
            end = start + _LENGTH_BYTES + length
            if len(self._bytes) < end:
                break
            found.append(bytes(self._bytes[start + _LENGTH_BYTES : end]))
            start = end
        del self._bytes[:start]
        return found


def to_frame(message: Order | Reply | WorkerWord) -> bytes:
    """Returns a message as a frame."""
    payload = msgspec.msgpack.encode(message)
    return len(payload).to_bytes(_LENGTH_BYTES, "big") + payload


def write_all(descriptor: int, data: bytes) -> None:
    """Writes all of ``data`` to a blocking descriptor."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
