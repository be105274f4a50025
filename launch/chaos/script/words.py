"""What the ranks of a script under faults say of themselves, in files of the cell's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from launch.chaos.record import CellFolder

SCRIPT = "LOCKSTEP_CHAOS_SCRIPT"
"""``module:function`` for the worker to run."""

GROUP_TIMEOUT = "LOCKSTEP_CHAOS_GROUP_TIMEOUT_S"
"""Seconds for every process group of the script; left out = what it asks for itself."""


class LastWord(msgspec.Struct, frozen=True, kw_only=True):
    """How the script's function ended on a rank.

    Args:
        rank: The rank.
        how: Whether it returned or raised.
        t_s: When, by the system's monotonic clock.
        result: What it returned, as ``repr`` shows it.
        error: The class of what it raised.
        text: Its message.
        calls: How often it made each call on each group.
    """

    rank: int
    how: Literal["returned", "raised"]
    t_s: float
    result: str = ""
    error: str = ""
    text: str = ""
    calls: dict[str, int] = {}


def write_last_word(folder: CellFolder, word: LastWord) -> None:
    """Leaves a rank's last word."""
    part = folder.path / f"word-{word.rank}.part"
    part.write_bytes(msgspec.json.encode(word))
    part.rename(folder.path / f"word-{word.rank}")


def last_words(folder: CellFolder) -> dict[int, LastWord]:
    """Returns the ranks' last words, by rank."""
    words = [
        msgspec.json.decode(path.read_bytes(), type=LastWord)
        for path in sorted(folder.path.glob("word-*"))
        if path.suffix != ".part"
    ]
    return {word.rank: word for word in words}


def stack_file(folder: CellFolder, rank: int) -> Path:
    """Returns where a rank's stack goes when it is told to end."""
    return folder.path / f"stack-{rank}"


def innermost_frame(folder: CellFolder, rank: int) -> str:
    """Returns where a rank was in its own program when it was told to end; nothing when it was not."""
    path = stack_file(folder, rank)
    lines = path.read_text().splitlines() if path.exists() else []
    frames = [line.strip() for line in lines if line.startswith("  File ")]
    own = [frame for frame in frames if "/torch/" not in frame and "/launch/chaos/" not in frame]
    return (own or frames or [""])[0].removeprefix("File ")
