"""Which ranks have stopped, as their progress records and the kernel tell: pure functions of what was seen.

A rank that waits inside an operation waits for others, so it is to blame only when no rank outside one is. Where all
wait, it is told from the operations who waits for whom.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.node.progress_record import Phase, Progress

_BUSY_FACTOR = 10.0
"""A rank that uses its CPU is at work: it gets that much longer, so that only an endless loop is a stall."""

_PEER = re.compile(r" (?:from|to) stage (\d+)$")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_BUSY_SHARE = 0.05
"""More than the threads of a rank use that only say where it is."""

_TOKENS_PER_LIMIT = 64
"""A step of more tokens than this gets longer in proportion."""


@dataclass(frozen=True)
class SeenRank:
    """A rank at one moment.

    Args:
        progress: Its record.
        age_s: How old the record is.
        state: The kernel's letter for what the process does; empty when it has ended.
        cpu_share: Which part of a core it has used since its record was written.
    """

    progress: Progress
    age_s: float
    state: str
    cpu_share: float

    @property
    def is_busy(self) -> bool:
        """Whether it is at work, or would be if the machine let it."""
        return self.state == "R" or self.cpu_share >= _BUSY_SHARE

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger stopped it."""
        return self.state in ("T", "t")


def stalled_ranks(
    seen: Mapping[int, SeenRank], tp_size: int, stall_timeout_s: float, start_timeout_s: float
) -> list[int]:
    """Returns the ranks that hold up the others, in order; none while all get on.

    Args:
        seen: Every rank that has not ended.
        tp_size: Ranks of a stage.
        stall_timeout_s: How old the record of a rank that decodes may be.
        start_timeout_s: How old that of a rank that comes up may be.
    """
    stopped = [rank for rank, one in sorted(seen.items()) if one.is_stopped and one.age_s > stall_timeout_s]
    if stopped:
        return stopped
    late = {
        rank: one for rank, one in seen.items() if one.age_s > _limit_s(one.progress, stall_timeout_s, start_timeout_s)
    }
    if not late:
        return []
    outside = [rank for rank, one in sorted(seen.items()) if not one.progress.is_inside]
    if outside:
        limits_s = {rank: _limit_s(seen[rank].progress, stall_timeout_s, start_timeout_s) for rank in outside}
        return [rank for rank in outside if rank in late and not _may_work_on(late[rank], limits_s[rank])]
    if len(late) < len(seen):
        return []
    return _held_up_by({rank: one.progress for rank, one in sorted(seen.items())}, tp_size)


def describe_stall(one: SeenRank, ranks: Sequence[int]) -> str:
    """Returns what is wrong with a rank that stalled; ``ranks`` are all that did."""
    age = f"no sign of life for {one.age_s:.1f} s"
    where = f"{'inside' if one.progress.is_inside else 'after'} {described(one.progress)}"
    if one.is_stopped:
        return f"{age}: the process is stopped ({where})"
    if len(ranks) > 1:
        return f"{age}: it and ranks {list(ranks)} wait for one another ({where})"
    return f"{age} ({where})"


def described(progress: Progress) -> str:
    """Returns a rank's latest operation; ``start`` before the first."""
    return f"{progress.operation} on {progress.group}" if progress.operation else "start"


def stretch_of(tokens: int) -> float:
    """Returns how many times longer than a small step one with so many tokens may take."""
    return max(1.0, tokens / _TOKENS_PER_LIMIT)


def process_state(pid: int) -> tuple[str, float]:
    """Returns the kernel's letter for what a process does, and the seconds of CPU that it has used.

    The letter is empty when the process has ended.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "", 0.0
    # The name before may hold blanks and brackets.
    fields = text.rpartition(")")[2].split()
    return fields[0], (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def _limit_s(progress: Progress, stall_timeout_s: float, start_timeout_s: float) -> float:
    match progress.phase:
        case Phase.LEAVING:
            return float("inf")
        case Phase.START | Phase.LOAD:
            return max(start_timeout_s, stall_timeout_s)
        case _:
            return stall_timeout_s * stretch_of(progress.tokens)


def _may_work_on(one: SeenRank, limit_s: float) -> bool:
    return one.is_busy and one.age_s < _BUSY_FACTOR * limit_s


def _held_up_by(waiting: Mapping[int, Progress], tp_size: int) -> list[int]:
    """Returns whom ranks that all wait inside operations wait for in the end, in order.

    Whoever is in a message waits for the other end of it, whoever is in a collective for those of its group that began
    fewer of them. Followed from any rank, this leads to ranks that wait for nobody, or for one another: those hold up
    all others, and from outside nobody can tell which of them does.
    """
    waits_for = {rank: _waits_for(rank, progress, waiting, tp_size) for rank, progress in waiting.items()}
    reached = {rank: _reachable(rank, waits_for) for rank in waiting}
    return [rank for rank in waiting if all(rank in reached[other] or other == rank for other in reached[rank])]


def _waits_for(rank: int, progress: Progress, waiting: Mapping[int, Progress], tp_size: int) -> set[int]:
    peer = _PEER.search(progress.operation)
    if peer is not None:
        return {int(peer[1]) * tp_size + rank % tp_size} & waiting.keys()
    group = {other for other, theirs in waiting.items() if other != rank and other // tp_size == rank // tp_size}
    return {
        other
        for other in group
        if waiting[other].group != progress.group or waiting[other].op_sequence < progress.op_sequence
    }


def _reachable(start: int, waits_for: Mapping[int, set[int]]) -> set[int]:
    """Returns whom ``start`` waits for, and whom these wait for, and so on."""
    reached: set[int] = set()
    ahead = [start]
    while ahead:
        for other in waits_for[ahead.pop()] - reached:
            reached.add(other)
            ahead.append(other)
    return reached
