"""Every rank says where it is, once a second, and the leader gathers it: beside the step loop, without a collective.

Ranks leave their state in the store that they met at; a thread of its own does that, so that a rank whose step loop
waits for another still says so. Nothing here decides anything about requests.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import torch.distributed as dist
from torch.distributed import Store

from grammar_sync.vetting.protocol import VettingCounters
from runtime.engine_statistics import CheckCounters, EngineStatistics, HeardRank, RankState
from runtime.rank_status import RankStatus
from runtime.scheduler import Scheduler

REPORT_S = 1.0
"""How often a rank says where it is."""

_CLOSE_S = 2.0


@dataclass(frozen=True)
class CountedParts:
    """What the leader counts beside the ranks' states.

    Args:
        status: Its own notes.
        scheduler: The replicated scheduler.
        grammar_cache_bytes: Returns what compiled grammars hold.
        vetting: Returns what became of grammars.
        checks: Returns what became of finished outputs; None when nobody checks.
    """

    status: RankStatus
    scheduler: Scheduler
    grammar_cache_bytes: Callable[[], int]
    vetting: Callable[[], VettingCounters]
    checks: Callable[[], CheckCounters] | None


@dataclass(slots=True)
class _Heard:
    """A rank's latest state, when it came, and its skew."""

    state: RankState
    at_s: float
    skew_s: float = 0.0


class StatisticsBox:
    """Where the leader finds statistics to send: the newest that it has not sent, at most.

    Attributes:
        wake: Called after each ``put``: an idle leader waits for it.
    """

    def __init__(self) -> None:
        self.wake: Callable[[], None] | None = None
        self._newest: deque[EngineStatistics] = deque(maxlen=1)

    def put(self, statistics: EngineStatistics) -> None:
        """Leaves statistics, in place of older ones."""
        self._newest.append(statistics)
        if self.wake is not None:
            self.wake()

    def take(self) -> EngineStatistics | None:
        """Returns what was left since the last call, if anything was."""
        try:
            return self._newest.pop()
        except IndexError:
            return None


class RankBook:
    """What the leader knows of all ranks.

    Args:
        clock: The monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard: dict[int, _Heard] = {}

    def update(self, states: Sequence[RankState]) -> list[HeardRank]:
        """Returns every rank in order, after hearing ``states``, of which some may be old."""
        now_s = self._clock()
        waits: dict[int, tuple[int, float]] = {}
        for state in states:
            old = self._heard.get(state.rank)
            if old is not None and old.state.beat == state.beat:
                continue
            skew_s = 0.0
            if old is not None:
                skew_s = old.skew_s
                steps = state.busy_steps - old.state.busy_steps
                if steps > 0:
                    waits[state.rank] = (state.stage, (state.wait_s - old.state.wait_s) / steps)
            self._heard[state.rank] = _Heard(state, now_s, skew_s)
        longest: dict[int, float] = {}
        for stage, wait_s in waits.values():
            longest[stage] = max(longest.get(stage, 0.0), wait_s)
        for rank, (stage, wait_s) in waits.items():
            self._heard[rank].skew_s = longest[stage] - wait_s
        return [HeardRank(heard.state, now_s - heard.at_s, heard.skew_s) for _, heard in sorted(self._heard.items())]


class RankReporter:
    """This rank's reports, from a thread of its own until ``close``.

    Args:
        store: Shared by all ranks of this attempt; not used by another thread meanwhile.
        rank: This rank.
        world_size: All ranks.
        status: This rank's notes.
        counted: What the leader counts; None on other ranks.
        box: Where the leader finds statistics; not used on other ranks.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        status: RankStatus,
        counted: CountedParts | None,
        box: StatisticsBox,
    ) -> None:
        self._store = store
        self._key = f"state/{rank}"
        self._keys = [f"state/{other}" for other in range(world_size)]
        self._status = status
        self._counted = counted
        self._box = box
        self._book = RankBook()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank-reporter", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the reports; one that the store holds up is not waited for."""
        self._closing.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            while not self._closing.wait(REPORT_S):
                self._report()
        except dist.DistError:
            # The store is gone: so are the ranks in a moment, and their front side tells why.
            return

    def _report(self) -> None:
        self._store.set(self._key, msgspec.json.encode(self._status.state()).decode())
        if self._counted is None:
            return
        keys = [key for key in self._keys if self._store.check([key])]
        states = [msgspec.json.decode(frame, type=RankState) for frame in self._store.multi_get(keys)]
        parts = self._counted
        self._box.put(
            EngineStatistics(
                scheduler=parts.scheduler.statistics,
                waiting_for_grammar=len(parts.scheduler.waiting_for_grammar),
                block_tokens=parts.scheduler.blocks.block_tokens,
                batch_rows=parts.status.batch_rows.copy(),
                step_s=parts.status.step_s.copy(),
                agreement_s=parts.status.agreement_s.copy(),
                vetting=parts.vetting(),
                grammar_cache_bytes=parts.grammar_cache_bytes(),
                checks=None if parts.checks is None else parts.checks(),
                ranks=self._book.update(states),
            )
        )
