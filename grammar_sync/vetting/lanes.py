"""In which order grammars are vetted: one that is hard must not keep those behind it waiting."""

from __future__ import annotations

from collections import OrderedDict

QUICK_S = 0.5
"""How long a job may run before it counts as hard."""

QUICK_WORKERS = 2
HARD_WORKERS = 2


class Lanes:
    """Decides which job starts when; knows neither processes nor clocks.

    A new job starts at once in one of the quick places. If it is not done after ``quick_s``, it goes on in one of the
    hard places. When these are taken, it stays as long as nobody waits for its quick place; otherwise it is ended and
    starts over when a hard place is free. So a new job waits at most ``quick_s`` for each two before it, whatever they
    are.

    Args:
        quick_s: How long a job may run before it counts as hard.
        quick_workers: How many may run that are not known to be hard.
        hard_workers: How many may run that are.
    """

    def __init__(
        self, quick_s: float = QUICK_S, quick_workers: int = QUICK_WORKERS, hard_workers: int = HARD_WORKERS
    ) -> None:
        self._quick_s = quick_s
        self._quick_workers = quick_workers
        self._hard_workers = hard_workers
        self._new: OrderedDict[int, None] = OrderedDict()
        self._hard_waiting: OrderedDict[int, None] = OrderedDict()
        self._quick: OrderedDict[int, float] = OrderedDict()
        self._hard: set[int] = set()

    def add(self, job: int) -> None:
        """Takes a job in."""
        self._new[job] = None

    def drop(self, job: int) -> None:
        """Forgets a job that does not run."""
        self._new.pop(job, None)
        self._hard_waiting.pop(job, None)

    def done(self, job: int) -> None:
        """Frees the place of a job that ran."""
        self._quick.pop(job, None)
        self._hard.discard(job)

    def start(self, now_s: float) -> int | None:
        """Returns a job that is to be started now, or None."""
        if self._new and len(self._quick) < self._quick_workers:
            job, _ = self._new.popitem(last=False)
            self._quick[job] = now_s
            return job
        if self._hard_waiting and len(self._hard) < self._hard_workers:
            job, _ = self._hard_waiting.popitem(last=False)
            self._hard.add(job)
            return job
        return None

    def overdue(self, now_s: float) -> int | None:
        """Moves jobs that turned out to be hard; returns one that must be ended and will start over, or None."""
        for job, started_s in list(self._quick.items()):
            if now_s - started_s < self._quick_s:
                continue
            if len(self._hard) < self._hard_workers and not self._hard_waiting:
                del self._quick[job]
                self._hard.add(job)
            elif self._new:
                del self._quick[job]
                self._hard_waiting[job] = None
                return job
        return None

    def next_s(self, now_s: float) -> float | None:
        """Returns when ``overdue`` should be asked again if nothing happens before, or None."""
        moments = [started_s + self._quick_s for started_s in self._quick.values()]
        return min((moment for moment in moments if moment > now_s), default=None)
