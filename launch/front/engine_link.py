"""The way between a front side and its engine: what is sent, what is heard, and how both survive the ranks.

Between the end of a leader and the word of the next one nothing fails: requests wait, aborts count. The next leader is
then told of every request under way, and how far it came.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from launch.front.engine_process import EngineProcess
from launch.front.metrics import EngineMetrics
from launch.front.open_requests import OpenRequests, RequestStart
from launch.node.rank_fault import FaultReport
from runtime.client_socket import ClientSocketError
from runtime.engine_statistics import EngineStatistics
from runtime.messages import Abort, ClientMessage, EngineMessage, EngineReady, Submit

_FAULTS_KEPT = 16


@dataclass(frozen=True)
class Recovery:
    """Ranks took the place of others.

    Args:
        cause: Why those before ended.
        resumed_requests: How many requests went on.
        seconds: From when a fault was seen until the new leader was told of them.
    """

    cause: str
    resumed_requests: int
    seconds: float

    def sentence(self) -> str:
        """Returns it as one line."""
        plural = "" if self.resumed_requests == 1 else "s"
        return f"{self.cause}; recovered in {self.seconds:.2f} s, {self.resumed_requests} request{plural} went on"


def print_line(line: str) -> None:
    """Prints a line to stderr, as this program's."""
    print(f"lockstep: {line}", file=sys.stderr, flush=True)


class EngineLink:
    """Sends requests to an engine that is ready and hears of them, over all epochs of its ranks.

    Args:
        engine: The engine; its socket is the link's alone.
        ready: What its leader said.
        tell: Takes a line that says how ranks were recovered.
        metrics: Told of all that is sent and heard; None when nobody counts.

    Attributes:
        faults: The reports on the latest faults of ranks, the newest last.
    """

    def __init__(
        self,
        engine: EngineProcess,
        ready: EngineReady,
        tell: Callable[[str], None],
        metrics: EngineMetrics | None = None,
    ) -> None:
        self.ready = ready
        self._engine = engine
        self._tell = tell
        self._metrics = metrics
        self._open = OpenRequests()
        self._lost_s: float | None = None
        self.faults: deque[FaultReport] = deque(engine.faults(), maxlen=_FAULTS_KEPT)
        for report in self.faults:
            tell(f"{report.sentence()}; the ranks were started anew")

    @property
    def is_recovering(self) -> bool:
        """Whether the leader is gone and no other one came."""
        return self._lost_s is not None

    def submit(self, starts: Sequence[RequestStart]) -> None:
        """Sends requests; those that find no leader wait for the next one."""
        self._open.add(starts)
        if self._metrics is not None:
            for start in starts:
                if isinstance(start, Submit):
                    self._metrics.submitted(start.request_id)
        self._send(starts)

    def abort(self, request_ids: Sequence[int]) -> None:
        """Ends requests; of those that are not under way nobody hears."""
        known = self._open.abort(request_ids)
        if known:
            self._send([Abort(one) for one in known])

    def check(self) -> None:
        """Returns if the ranks live, or others will; raises RanksFailedError otherwise."""
        self._engine.check()

    def receive(self, timeout_s: float) -> list[EngineMessage]:
        """Returns what is new, after waiting up to ``timeout_s`` for it; the word of a new leader is among it."""
        heard: list[EngineMessage] = []
        dropped = self._engine.socket.dropped_frames
        for message in self._engine.socket.receive(timeout_s):
            if isinstance(message, EngineReady):
                self._recover(message)
                fresh: Sequence[EngineMessage] = [message]
            else:
                fresh = [message] if isinstance(message, EngineStatistics) else self._open.take(message)
            if self._metrics is not None:
                for one in fresh:
                    self._metrics.heard(one)
            heard += fresh
        if self._metrics is not None:
            self._metrics.dropped(self._engine.socket.dropped_frames - dropped)
        self._watch()
        return heard

    def _send(self, messages: Sequence[ClientMessage]) -> None:
        if not self.is_recovering:
            # What is not sent now is when the next leader comes; if none will, ``EngineProcess.check`` says so.
            with suppress(ClientSocketError):
                self._engine.socket.send(messages)
            self._watch()

    def _watch(self) -> None:
        if self._engine.socket.is_lost and self._lost_s is None:
            self._lost_s = time.monotonic()
            if self._metrics is not None:
                self._metrics.recovering()

    def _recover(self, ready: EngineReady) -> None:
        """Tells a new leader of all that is under way."""
        self._watch()
        lost_s, self._lost_s = self._lost_s, None
        self.ready = ready
        messages, aborted = self._open.resubmission()
        if messages:
            self._send(messages)
        reports = self._engine.faults()
        self.faults += reports
        seconds = 0.0 if lost_s is None else time.monotonic() - lost_s
        if reports:
            seconds = max(seconds, time.time() - reports[0].seen_at)
        cause = "; ".join(report.sentence() for report in reports) or "ranks were lost"
        if self._metrics is not None:
            self._metrics.recovered(seconds, len(messages), aborted)
        self._tell(Recovery(cause, len(messages), seconds).sentence())
