"""Where the CPU ranks of one host meet: memory that all of them see, and a socket between each two.

A rank writes its part into a slot of its own, tells the others by one short word, and reads theirs once it has heard of
all. That is one wake-up an operation; gloo takes several threads and a TCP connection for it. Neither memory nor
sockets have a name in any file system: when the last rank ends, both are gone.

There are two slots a rank, used in turn: who has heard of all ranks' next round knows that they have read this one.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

SLOT_BYTES = 1 << 20
"""What a rank can contribute at once; more goes in several rounds."""

DTYPES = (
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int8,
    torch.int16,
    torch.bool,
)
_WORD = struct.Struct("<QHHIQ")
_HELLO = struct.Struct("<Q")
_CREDENTIALS = struct.Struct("3i")
_SPIN_NS = 40_000
_MAX_VIEWS = 4096


class MeetingError(RuntimeError):
    """Ranks did not meet: one is gone or late, or they are at different operations."""


class Word(NamedTuple):
    """What a rank tells the others when its part of a round is there.

    Attributes:
        call: Which of the group's calls it is, from 1.
        operation: Its number.
        dtype: Place of the tensor's dtype in ``DTYPES``.
        round: Which part of the tensor it is, from 0.
        size_bytes: Of the whole tensor.
    """

    call: int
    operation: int
    dtype: int
    round: int
    size_bytes: int

    def __str__(self) -> str:
        dtype = DTYPES[self.dtype] if self.dtype < len(DTYPES) else f"dtype {self.dtype}"
        what = f"call {self.call} with {self.size_bytes} bytes of {dtype}"
        return f"{what} (operation {self.operation}, part {self.round})"


def host_identity() -> str:
    """Returns what ranks have in common exactly when they can share memory and reach each other's sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {Path('/proc/self/ns/net').readlink()} {os.geteuid()}"


class Meeting:
    """The ranks of a group, in shared memory; every rank makes the same calls in the same order.

    Args:
        rank: This rank within the group.
        peers: A connection to each other rank of it, by its rank.
        memory: 2 · size slots of ``SLOT_BYTES``, the same on all ranks.
        timeout_s: How long to wait for another rank.
        spins: Whether to look out for the others for a moment before sleeping: when each has a core of its own.
    """

    def __init__(
        self, rank: int, peers: dict[int, socket.socket], memory: mmap.mmap, timeout_s: float, *, spins: bool
    ) -> None:
        self.rank = rank
        self.size = len(peers) + 1
        self._peers = dict(sorted(peers.items()))
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)
        self._spins = spins
        self._turn = 0
        self._views: dict[tuple[int, torch.dtype, int], list[torch.Tensor]] = {}
        self._timeout_s = timeout_s
        self.set_timeout(timeout_s)

    def set_timeout(self, timeout_s: float) -> None:
        """Sets how long to wait for another rank."""
        self._timeout_s = timeout_s
        for peer in self._peers.values():
            # The kernel ends the wait, which costs no call more, as Python's own time-out would.
            peer.settimeout(None)
            seconds, rest = divmod(max(timeout_s, 0.001), 1)
            limit = struct.pack("ll", int(seconds), int(rest * 1e6))
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def exchange(
        self, call: int, operation: int, flat: torch.Tensor, take: Callable[[slice, list[torch.Tensor]], None]
    ) -> None:
        """Shares a tensor with all ranks, in as many rounds as it takes.

        Args:
            call: Which of the group's calls this is.
            operation: Which operation it is for.
            flat: [N], contiguous, of one of ``DTYPES``.
            take: Called with which elements a round is of, and with those of all ranks, in rank order; they are
                overwritten afterwards.

        Raises:
            MeetingError: A rank is gone or late, or made another call.
        """
        dtype, elements = flat.dtype, flat.numel()
        per_round = SLOT_BYTES // dtype.itemsize
        word = Word(call, operation, DTYPES.index(dtype), 0, elements * dtype.itemsize)
        for index, first in enumerate(range(0, max(elements, 1), per_round)):
            run = slice(first, min(first + per_round, elements))
            parts = self._parts(run.stop - run.start, dtype)
            parts[self.rank].copy_(flat[run])
            self._meet(word._replace(round=index))
            take(run, parts)
            self._turn ^= 1

    def close(self) -> None:
        """Closes the connections: ranks that wait for this one learn that it is gone."""
        for peer in self._peers.values():
            peer.close()

    def _parts(self, elements: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Returns the beginning of each rank's slot of this turn."""
        key = (elements, dtype, self._turn)
        parts = self._views.get(key)
        if parts is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            starts = [(2 * rank + self._turn) * SLOT_BYTES for rank in range(self.size)]
            parts = [self._memory[start : start + elements * dtype.itemsize].view(dtype) for start in starts]
            self._views[key] = parts
        return parts

    def _meet(self, word: Word) -> None:
        """Tells all ranks that this one's part is there, and returns when theirs are."""
        told = _WORD.pack(*word)
        for rank, peer in self._peers.items():
            try:
                peer.send(told)
            except OSError as error:
                raise MeetingError(f"rank {rank} of the group cannot be told: {error.strerror}") from error
        for rank, peer in self._peers.items():
            try:
                heard = self._hear(peer)
            except BlockingIOError:
                raise MeetingError(f"rank {rank} of the group did not come in {self._timeout_s:g} s") from None
            except OSError as error:
                raise MeetingError(f"the connection to rank {rank} of the group is lost: {error.strerror}") from error
            if len(heard) != _WORD.size:
                raise MeetingError(f"rank {rank} of the group closed its connection")
            if heard != told:
                raise MeetingError(f"rank {rank} of the group is at {Word(*_WORD.unpack(heard))}, this one at {word}")

    def _hear(self, peer: socket.socket) -> bytes:
        if self._spins:
            until_ns = time.monotonic_ns() + _SPIN_NS
            while time.monotonic_ns() < until_ns:
                try:
                    return peer.recv(_WORD.size, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    continue
        return peer.recv(_WORD.size)


def meet(store: dist.Store, rank: int, size: int, timeout_s: float, *, spins: bool) -> Meeting:
    """Returns the meeting of a group's ranks, which all call this together.

    Args:
        store: The group's own: where the ranks find each other.
        rank: This rank within the group.
        size: How many ranks it has.
        timeout_s: How long to wait for another rank, now and later.
        spins: See ``Meeting``.

    Raises:
        OSError: A rank did not come in time, or memory cannot be had.
    """
    peers = _connect(store, rank, size, timeout_s)
    size_bytes = 2 * size * SLOT_BYTES
    if rank == 0:
        file = os.memfd_create("lockstep-meeting")
        os.ftruncate(file, size_bytes)
        for peer in peers.values():
            socket.send_fds(peer, [b"m"], [file])
    else:
        file = socket.recv_fds(peers[0], 1, 1)[1][0]
    memory = mmap.mmap(file, size_bytes)
    os.close(file)
    return Meeting(rank, peers, memory, timeout_s, spins=spins)


def _connect(store: dist.Store, rank: int, size: int, timeout_s: float) -> dict[int, socket.socket]:
    """Returns a connection to each other rank; each of two, the one of the higher rank connects."""
    peers: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        # An abstract name: no file, and free again when the socket is closed.
        name = f"\0lockstep-{secrets.token_hex(16)}"
        listener.bind(name)
        listener.listen(size)
        listener.settimeout(timeout_s)
        store.set(str(rank), name)
        for other in range(rank):
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            peer.settimeout(timeout_s)
            peer.connect(store.get(str(other)).decode())
            peer.send(_HELLO.pack(rank))
            peers[other] = peer
        while len(peers) < size - 1:
            peer, _ = listener.accept()
            peer.settimeout(timeout_s)
            credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            is_own = _CREDENTIALS.unpack(credentials)[1] == os.geteuid()
            hello = peer.recv(_HELLO.size) if is_own else b""
            if len(hello) == _HELLO.size:
                peers[_HELLO.unpack(hello)[0]] = peer
            else:
                peer.close()
    return peers
