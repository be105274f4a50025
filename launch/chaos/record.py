"""What a cell's processes tell each other in its folder: a fault is armed, it happened, where ranks are."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from pathlib import Path

import msgspec

from launch.chaos.faults import Injection

_PLACE_BYTES = 128


class Fired(msgspec.Struct, frozen=True, kw_only=True):
    """That a fault happened.

    Args:
        action: What happened.
        rank: The victim; -1 where no rank is one.
        where: The call it happened at, or what was hit.
        t_s: When, by the system's monotonic clock.
    """

    action: str
    rank: int
    where: str
    t_s: float

    @classmethod
    def now(cls, action: str, rank: int, where: str) -> Fired:
        """Returns that it happens now."""
        return cls(action=action, rank=rank, where=where, t_s=time.monotonic())


class CellFolder:
    """The folder of one cell, shared by the process that runs it and the ranks in it.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, injections: tuple[Injection, ...], *, armed: bool) -> CellFolder:
        """Returns a new folder with a place for temporary files.

        Args:
            path: Where to make it.
            injections: What the faulty backend is to do.
            armed: Whether it may begin to count calls at once.
        """
        path.mkdir(parents=True)
        folder = cls(path)
        folder.temporary.mkdir()
        (path / "injections.json").write_bytes(msgspec.json.encode(injections))
        (path / "armed").write_bytes(bytes([len(injections) if armed else 0]))
        return folder

    @property
    def temporary(self) -> Path:
        """Where processes of the cell put temporary files."""
        return self.path / "tmp"

    def injections(self) -> tuple[Injection, ...]:
        """Returns what the faulty backend is to do."""
        return msgspec.json.decode((self.path / "injections.json").read_bytes(), type=tuple[Injection, ...])

    def arm(self, count: int) -> None:
        """Lets the first ``count`` injections happen from now on."""
        with (self.path / "armed").open("r+b") as file:
            file.write(bytes([count]))

    def open_armed(self) -> mmap.mmap:
        """Returns a byte that says how many injections are armed, shared with who arms them."""
        with (self.path / "armed").open("r+b") as file:
            return mmap.mmap(file.fileno(), 1)

    def open_place(self, rank: int) -> mmap.mmap:
        """Returns memory in which a rank says where it is; it outlives the rank."""
        path = self.path / f"place-{rank}"
        path.write_bytes(bytes(_PLACE_BYTES))
        with path.open("r+b") as file:
            return mmap.mmap(file.fileno(), _PLACE_BYTES)

    def write_pid(self, rank: int) -> None:
        """Says which process ``rank`` is: this one."""
        part = self.path / f"pid-{rank}.part"
        part.write_text(str(os.getpid()))
        part.rename(self.path / f"pid-{rank}")

    def pid_of(self, rank: int) -> int | None:
        """Returns the process that ``rank`` said last that it is."""
        path = self.path / f"pid-{rank}"
        return int(path.read_text()) if path.exists() else None

    def place_of(self, rank: int) -> str:
        """Returns where a rank said last that it was; nothing if it never did."""
        path = self.path / f"place-{rank}"
        return path.read_bytes().rstrip(b"\0 ").decode() if path.exists() else ""

    def claim(self, name: str, fired: Fired) -> bool:
        """Notes that a fault happens now; False when ``name`` happened before, in an earlier life of its rank."""
        try:
            file = os.open(self.path / f"fired-{name}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except FileExistsError:
            return False
        os.write(file, msgspec.json.encode(fired))
        os.close(file)
        return True

    def note(self, action: str, where: str, *, rank: int = -1) -> None:
        """Notes that a fault from outside happens now."""
        self.claim(f"outside-{action}", Fired.now(action, rank, where))

    def fired(self) -> list[Fired]:
        """Returns the faults that happened, in their order."""
        found = []
        for path in self.path.glob("fired-*"):
            with contextlib.suppress(msgspec.DecodeError):
                found.append(msgspec.json.decode(path.read_bytes(), type=Fired))
        return sorted(found, key=lambda fired: fired.t_s)


def write_place(place: mmap.mmap, text: str) -> None:
    """Says where this rank is."""
    place[:_PLACE_BYTES] = text.encode()[:_PLACE_BYTES].ljust(_PLACE_BYTES)
