"""Where a rank is, in memory that it shares with its node's zygote: which step, and which operation with the others.

A rank that hangs cannot tell where; whoever holds its record can read it there, at any time and without its help. The
rank alone writes. It writes each state whole into the slot that nobody reads, and then, by one aligned store, says that
this slot counts: a reader never sees half a state, not even that of a rank which was stopped or killed while it wrote.
"""

from __future__ import annotations

import mmap
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

_BYTES = 16384
_VERSION, _EPOCH, _NAMES, _TOKENS = 0, 1, 2, 3
_SLOTS = (8, 16)
_RINGS = (32, 96, 160, 224)
_RING_ENTRIES = 32
_NAME_BYTES = 48
_NAMES_AT = 2304
_REQUESTS = 1024
_MAX_REQUESTS = _BYTES // 8 - _REQUESTS - 1
_MAX_NAMES = (8 * _REQUESTS - _NAMES_AT) // _NAME_BYTES
_INSIDE = 1 << 32
_PHASE_SHIFT = 56
_STEP_MASK = (1 << _PHASE_SHIFT) - 1
_UNNAMED = 0
_UNWRITTEN = -1


class Phase(IntEnum):
    """What a rank is about."""

    START = 0
    """It meets the others and builds its groups."""
    LOAD = 1
    """It reads weights and builds its engine."""
    IDLE = 2
    """Nothing runs: the leader waits for clients, the others for the leader."""
    COMPUTE = 3
    """It runs a step."""
    COLLECTIVE = 4
    """It runs a step and is inside an operation with other ranks."""
    LEAVING = 5
    """The steps are over: it closes what is open."""


_IDLE = Phase.IDLE << _PHASE_SHIFT
_COMPUTE = Phase.COMPUTE << _PHASE_SHIFT


class DigestKind(IntEnum):
    """What a digest is of."""

    STATE = 0
    """All that was planned and committed before the step."""
    PLAN = 1
    """That, and the plan of the step."""
    MASKS = 2
    """The grammar masks of the step; only ranks that fill masks have any, of steps in which none failed."""
    AUDIT = 3
    """Of what an audit found before the step: 0 where all is well."""


@dataclass(frozen=True)
class Progress:
    """Where a rank was when its record was read.

    Args:
        epoch: How often the node's ranks were forked anew before it.
        phase: What it was about.
        step: The last step that it began; 0 before the first.
        op_sequence: How many operations of the group of its latest one it had begun, that one among them.
        operation: Its latest operation, for example ``all_reduce``; empty before the first.
        group: That operation's group, for example ``tp0``.
        is_inside: Whether it was inside that operation.
        tokens: Of the batch of its latest step that ran one; 0 before the first.
        t_ns: When it last wrote; the clock of ``time.monotonic_ns``, the same for all processes of a node.
    """

    epoch: int
    phase: Phase
    step: int
    op_sequence: int
    operation: str
    group: str
    is_inside: bool
    tokens: int
    t_ns: int

    def age_s(self, now_ns: int | None = None) -> float:
        """Returns how long ago it last wrote, in seconds."""
        return ((time.monotonic_ns() if now_ns is None else now_ns) - self.t_ns) / 1e9


class ProgressRecord:
    """One rank's record. One process writes it, from one thread; those that were forked with it may read it.

    Args:
        memory: At least ``_BYTES`` of shared memory, zeroed.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._words = memoryview(memory).cast("q")
        self._codes: dict[tuple[str, str], int] = {}
        self.reset(0)

    @classmethod
    def create(cls) -> ProgressRecord:
        """Returns a record of its own anonymous memory, which processes forked from this one share."""
        return cls(mmap.mmap(-1, _BYTES))

    def reset(self, epoch: int) -> None:
        """Forgets everything: a new rank of ``epoch`` is about to start; nobody may be writing."""
        words = self._words
        self._codes.clear()
        words[_NAMES] = 0
        words[_EPOCH] = epoch
        words[_TOKENS] = 0
        words[_REQUESTS] = 0
        for ring in _RINGS:
            for entry in range(_RING_ENTRIES):
                words[ring + 2 * entry] = _UNWRITTEN
        self._version = words[_VERSION]
        self._where = self._sequence = self._operation = 0
        self._write()

    def close(self) -> None:
        """Gives the memory back in this process."""
        self._words.release()
        self._memory.close()

    def register(self, operation: str, group: str) -> int:
        """Returns the number of an operation of a group, for ``enter``; its name is in the record from now on."""
        known = self._codes.get((operation, group))
        if known is not None:
            return known
        name = f"{operation}@{group}".encode()[:_NAME_BYTES]
        code = len(self._codes) + 1
        if code > _MAX_NAMES:
            return _UNNAMED
        start = _NAMES_AT + (code - 1) * _NAME_BYTES
        self._memory[start : start + _NAME_BYTES] = name.ljust(_NAME_BYTES, b"\0")
        self._words[_NAMES] = code
        self._codes[operation, group] = code
        return code

    def enter(self, code: int, sequence: int) -> None:
        """Notes that an operation begins.

        Args:
            code: What ``register`` returned for it.
            sequence: Which operation of its group it is, as this rank counts them.
        """
        # As in _write: this is done some hundred times a step.
        words = self._words
        self._version = version = self._version + 1
        at = 16 if version & 1 else 8
        words[at] = self._where
        words[at + 1] = self._sequence = sequence
        words[at + 2] = self._operation = code | _INSIDE
        words[at + 3] = time.monotonic_ns()
        words[_VERSION] = version

    def leave(self) -> None:
        """Notes that the operation is over."""
        self._operation &= ~_INSIDE
        self._write()

    def enter_phase(self, phase: Phase) -> None:
        """Notes what the rank is about from now on."""
        self._where = self._where & _STEP_MASK | phase << _PHASE_SHIFT
        self._write()

    def begin_step(self, step: int, digest: int, *, is_idle: bool) -> None:
        """Notes that a step begins.

        Args:
            step: Its number.
            digest: Of all before it, a signed 64-bit integer.
            is_idle: Whether nothing runs, so that the leader may wait for its clients.
        """
        self.note_digest(DigestKind.STATE, step, digest)
        self._where = step | (_IDLE if is_idle else _COMPUTE)
        self._write()

    def begin_work(self) -> None:
        """Notes that it is known what the step is to do: nobody waits for a client any more."""
        if self._where >> _PHASE_SHIFT == Phase.IDLE:
            self._where ^= _IDLE ^ _COMPUTE
            self._write()

    def begin_batch(self, tokens: int) -> None:
        """Notes how many tokens the step's batch has: the more, the longer the rank may be silent."""
        self._words[_TOKENS] = tokens
        self._write()

    def note_requests(self, request_ids: Sequence[int]) -> None:
        """Notes which requests the rank works at; of more than some thousand the last are left out."""
        words, numbers = self._words, array("q", request_ids[:_MAX_REQUESTS])
        words[_REQUESTS] = 0
        words[_REQUESTS + 1 : _REQUESTS + 1 + len(numbers)] = memoryview(numbers)
        words[_REQUESTS] = len(numbers)

    def requests(self) -> list[int]:
        """Returns the requests that the rank works at, by their client's numbers; none where it does not know them."""
        words = self._words
        return words[_REQUESTS + 1 : _REQUESTS + 1 + words[_REQUESTS]].tolist()

    def beat(self) -> None:
        """Notes that the rank is alive, wherever it is."""
        self._write()

    def note_digest(self, kind: DigestKind, step: int, digest: int) -> None:
        """Keeps a digest, a signed 64-bit integer, for as long as 32 newer ones have not come."""
        words, at = self._words, _RINGS[kind] + 2 * (step % _RING_ENTRIES)
        words[at] = _UNWRITTEN
        words[at + 1] = digest
        words[at] = step

    def note_plan(self, step: int, digest: int) -> None:
        """Keeps a digest of the plan of a step and of all before it, a signed 64-bit integer."""
        self.note_digest(DigestKind.PLAN, step, digest)

    def note_masks(self, step: int, digest: int) -> None:
        """Keeps a digest of the grammar masks of a step, a signed 64-bit integer."""
        self.note_digest(DigestKind.MASKS, step, digest)

    def note_audit(self, step: int, digest: int) -> None:
        """Keeps what an audit found before a step, a signed 64-bit integer; 0 where all is well."""
        self.note_digest(DigestKind.AUDIT, step, digest)

    def read(self) -> Progress:
        """Returns where the rank is; any process and thread that has the record may call it, however the rank fares."""
        words = self._words
        while True:
            version = words[_VERSION]
            at = _SLOTS[version & 1]
            where, sequence, operation, t_ns = words[at : at + 4].tolist()
            # The slot is written again only once the version has moved on.
            if words[_VERSION] == version:
                break
        is_inside = bool(operation & _INSIDE)
        phase = Phase(where >> _PHASE_SHIFT)
        if is_inside and phase is Phase.COMPUTE:
            phase = Phase.COLLECTIVE
        name, group = self._name(operation & ~_INSIDE)
        step, tokens = where & _STEP_MASK, words[_TOKENS]
        return Progress(words[_EPOCH], phase, step, sequence, name, group, is_inside, tokens, t_ns)

    def digests(self, kind: DigestKind) -> dict[int, int]:
        """Returns the digests that are kept, by step."""
        words, found = self._words, {}
        for entry in range(_RING_ENTRIES):
            at = _RINGS[kind] + 2 * entry
            step = words[at]
            digest = words[at + 1]
            if step != _UNWRITTEN and words[at] == step:
                found[step] = digest
        return dict(sorted(found.items()))

    def _write(self) -> None:
        words = self._words
        self._version = version = self._version + 1
        at = 16 if version & 1 else 8
        words[at] = self._where
        words[at + 1] = self._sequence
        words[at + 2] = self._operation
        words[at + 3] = time.monotonic_ns()
        words[_VERSION] = version

    def _name(self, code: int) -> tuple[str, str]:
        if not 0 < code <= self._words[_NAMES]:
            return "", ""
        start = _NAMES_AT + (code - 1) * _NAME_BYTES
        name = self._memory[start : start + _NAME_BYTES].rstrip(b"\0").decode(errors="replace")
        operation, _, group = name.rpartition("@")
        return operation, group
