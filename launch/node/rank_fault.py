"""What went wrong with a rank, who is to blame when several ranks fail at once, and how often that may happen."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal

import msgspec

FaultKind = Literal["killed", "raised", "left", "stalled", "diverged"]
"""``killed`` by a signal, ``raised`` an error, ``left`` although nobody ended the run, ``stalled``: no sign of life,
``diverged``: its digests of a step are not those of the others."""


class RankFault(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that failed.

    Args:
        rank: Global rank.
        stage: Its pipeline stage.
        tp_rank: Its rank within the stage.
        kind: How it failed.
        message: One line.
        phase: What it was doing, as its progress record says.
        step: The step it was in; 0 before the first.
        operation: The operation that it was in, or had last done; empty before the first.
        age_s: How old its last sign of life was when the fault was seen.
        tokens: Of the batch of its latest step that ran one: the more, the older it may be.
        is_consequence: Whether it only lost contact with another rank.
        exit_code: What it left with; negative = killed by that signal; None when it has not left.
        stacks: Its Python stacks as it stalled or crashed; empty when it could not tell them.
    """

    rank: int
    stage: int
    tp_rank: int
    kind: FaultKind
    message: str
    phase: str
    step: int
    operation: str
    age_s: float
    tokens: int = 0
    is_consequence: bool = False
    exit_code: int | None = None
    stacks: str = ""

    def sentence(self) -> str:
        """Returns the fault as one line."""
        where = f"rank {self.rank} (stage {self.stage}, tensor-parallel rank {self.tp_rank})"
        when = f" in step {self.step}" if self.step else " at start"
        return f"{where} failed{when}: {self.message}"


class FaultReport(msgspec.Struct, frozen=True, kw_only=True):
    """Why the ranks of an epoch were ended.

    Args:
        epoch: The epoch that ended.
        culprits: Who failed by itself; several when they failed together or nobody can tell which of them it was.
        consequences: Who lost contact with them.
        recovers: Whether a next epoch was begun.
        why_not: Why not; empty when it was.
        seen_at: When the first of it was seen, in seconds since 1970.
        judged_after_s: How long after that the next epoch was begun, or given up.
        requests: The client's numbers of the requests that the ranks worked at.
    """

    epoch: int
    culprits: tuple[RankFault, ...]
    consequences: tuple[RankFault, ...]
    recovers: bool
    why_not: str
    seen_at: float
    judged_after_s: float
    requests: tuple[int, ...] = ()

    def sentence(self) -> str:
        """Returns the report as one line."""
        return "; ".join(fault.sentence() for fault in self.culprits)


def culprits(faults: Sequence[RankFault]) -> tuple[tuple[RankFault, ...], tuple[RankFault, ...]]:
    """Returns who is to blame among ``faults``, given in the order in which they were seen, and who is not.

    A rank that lost contact with another is to blame only when no rank failed by itself: then the first that did, since
    the others may have lost contact with that one.
    """
    own = tuple(fault for fault in faults if not fault.is_consequence)
    if not own:
        return tuple(faults[:1]), tuple(faults[1:])
    return own, tuple(fault for fault in faults if fault.is_consequence)


class FaultBudget:
    """How many faults are survived: at most so many in so many seconds.

    Args:
        limit: How many.
        window_s: In how many seconds.
    """

    def __init__(self, limit: int, window_s: float) -> None:
        self._limit = limit
        self._window_s = window_s
        self._times_s: deque[float] = deque()

    def spend(self, now_s: float) -> bool:
        """Notes a fault; returns whether it may be survived."""
        while self._times_s and self._times_s[0] <= now_s - self._window_s:
            self._times_s.popleft()
        self._times_s.append(now_s)
        return len(self._times_s) <= self._limit
