"""Which requests new ranks are asked when one of them may be what brought the ranks before them down.

A request that was at work in ``SHARED_FAULTS`` faults is a suspect. Suspects are tried one after the other, in the
order in which they came, beside those only that passed; everything else waits for so long. One passes when it has come
well beyond where it was, or has ended. When ranks fail again, the one that was being tried is tried first, by itself;
one that runs by itself when they fail is to blame. So one request that always ends ranks is found by the fourth fault,
and none is blamed for what another one did.

It knows no socket, no clock and no message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

SHARED_FAULTS = 2
"""In how many faults a request was at work before it is suspected: one, and even two at once, may be a device's."""


class Quarantine:
    """The suspects.

    Attributes:
        trial: The request that is being tried.
    """

    def __init__(self) -> None:
        self.trial: int | None = None
        self._faults: dict[int, int] = {}
        self._suspects: deque[int] = deque()

    @property
    def suspects(self) -> int:
        """How many are tried or wait for it."""
        return len(self._suspects) + (self.trial is not None)

    def fault(self, at_work: Sequence[int]) -> int | None:
        """Takes note that ranks were lost; returns the request that is to blame, if it is known.

        Args:
            at_work: The requests that they worked at, in the order in which they came. One that they had not begun
                with is none of them: what befell them then was not its doing, though it be tried by itself.
        """
        trial, self.trial = self.trial, None
        if trial is not None and list(at_work) == [trial]:
            self.forget(trial)
            return trial
        for request_id in at_work:
            self._faults[request_id] = self._faults.get(request_id, 0) + 1
        first = [] if trial is None else [trial]
        known = (*first, *self._suspects)
        self._suspects = deque(known)
        self._suspects.extend(one for one in at_work if one not in known and self._faults[one] >= SHARED_FAULTS)
        return None

    def admitted(self, waiting: Collection[int]) -> list[int]:
        """Returns which of the requests that wait to be submitted may be now."""
        if self.trial is not None:
            return []
        if self._suspects:
            self.trial = self._suspects.popleft()
            return [self.trial]
        return list(waiting)

    def passed(self) -> None:
        """Takes note that the request that is tried is not to blame."""
        if self.trial is not None:
            self._faults[self.trial] = 0
            self.trial = None

    def forget(self, request_id: int) -> None:
        """Takes note that a request is not under way any more."""
        self._faults.pop(request_id, None)
        if request_id == self.trial:
            self.trial = None
        elif request_id in self._suspects:
            self._suspects.remove(request_id)
