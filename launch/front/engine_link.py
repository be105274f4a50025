"""The way between a front side and its engine: what is sent, what is heard, and how both survive the ranks.

Between the end of a leader and the word of the next one nothing fails: requests wait, aborts count. The next leader is
then told of every request under way, and how far it came.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from launch.front.engine_process import EngineProcess
from launch.front.metrics import EngineMetrics
from launch.front.open_requests import OpenRequests, RequestStart
from launch.node.rank_fault import FaultReport
from launch.node.rank_processes import RanksFailedError
from runtime.client_socket import ClientSocketError
from runtime.engine_statistics import EngineStatistics
from runtime.messages import Abort, ClientMessage, EngineMessage, EngineReady, RequestMessage, Submit

_FAULTS_KEPT = 16


@dataclass(frozen=True)
class Recovery:
    """Ranks took the place of others.

    Args:
        cause: Why those before ended.
        resumed_requests: How many requests went on.
        seconds: From when a fault was seen until the new leader was told of them.
        suspects: How many of them are tried one by one, since ranks failed each time that they ran.
    """

    cause: str
    resumed_requests: int
    seconds: float
    suspects: int = 0

    def sentence(self) -> str:
        """Returns it as one line."""
        plural = "" if self.resumed_requests == 1 else "s"
        tried = f", {self.suspects} of them tried one by one" if self.suspects else ""
        went_on = f"{self.resumed_requests} request{plural} went on{tried}"
        return f"{self.cause}; recovered in {self.seconds:.2f} s, {went_on}"


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
        self._refusals: list[RequestMessage] = []
        self._lost_s: float | None = None
        self.faults: deque[FaultReport] = deque(engine.faults_at_start, maxlen=_FAULTS_KEPT)

    @property
    def is_recovering(self) -> bool:
        """Whether the leader is gone and no other one came."""
        return self._lost_s is not None

    def submit(self, starts: Sequence[RequestStart]) -> None:
        """Sends requests; those that find no leader wait for the next one."""
        self._refusals += self._open.add(starts)
        if self._metrics is not None:
            for start in starts:
                if isinstance(start, Submit):
                    self._metrics.submitted(start.request_id)
        self._send_due()

    def abort(self, request_ids: Sequence[int]) -> None:
        """Ends requests; of those that are not under way nobody hears."""
        known = self._open.abort(request_ids)
        if known:
            self._send([Abort(one) for one in known])

    def check(self) -> None:
        """Returns if the ranks live, or others will; raises RanksFailedError otherwise.

        Faults that were survived, and of which no new leader came to tell, are told first.
        """
        try:
            self._engine.check()
        except RanksFailedError:
            reports = self._engine.faults()
            self.faults += reports
            for report in reports:
                if report.recovers:
                    self._tell(f"{report.sentence()}; the ranks were started anew, and failed again")
            raise

    def receive(self, timeout_s: float) -> list[EngineMessage]:
        """Returns what is new, after waiting up to ``timeout_s`` for it; the word of a new leader is among it."""
        heard: list[EngineMessage] = self._hear(self._taken_refusals())
        dropped = self._engine.socket.dropped_frames
        for message in self._engine.socket.receive(0 if heard else timeout_s):
            if isinstance(message, EngineReady):
                fresh: Sequence[EngineMessage] = [message, *self._recover(message)]
            else:
                fresh = [message] if isinstance(message, EngineStatistics) else self._open.take(message)
            heard += self._hear(fresh)
        if self._metrics is not None:
            self._metrics.dropped(self._engine.socket.dropped_frames - dropped)
        self._watch()
        self._send_due()
        return heard

    def _hear(self, messages: Sequence[EngineMessage]) -> list[EngineMessage]:
        if self._metrics is not None:
            for message in messages:
                self._metrics.heard(message)
        return list(messages)

    def _taken_refusals(self) -> list[RequestMessage]:
        refusals, self._refusals = self._refusals, []
        return refusals

    def _send_due(self) -> None:
        """Sends what waited to be sent, where there is somebody to hear it."""
        if self.is_recovering:
            return
        messages, aborted = self._open.due()
        if self._metrics is not None:
            self._metrics.aborted(aborted)
        if messages:
            self._send(messages)

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

    def _recover(self, ready: EngineReady) -> list[RequestMessage]:
        """Tells a new leader of all that is under way; returns how requests end that its ranks are not to see."""
        self._watch()
        lost_s, self._lost_s = self._lost_s, None
        epoch, self.ready = self.ready.epoch, ready
        reports = self._engine.faults()
        self.faults += reports
        cause = "; ".join(report.sentence() for report in reports) or "ranks were lost"
        at_work = {one for report in reports if report.epoch == epoch for one in report.requests}
        messages, aborted, ended = self._open.resubmission(at_work, cause)
        if messages:
            self._send(messages)
        seconds = 0.0 if lost_s is None else time.monotonic() - lost_s
        if reports:
            seconds = max(seconds, time.time() - reports[0].seen_at)
        if self._metrics is not None:
            self._metrics.recovered(seconds, len(self._open))
            self._metrics.aborted(aborted)
        for one in ended:
            self._tell(f"request {one.request_id} is ended: ranks failed again and again while it ran")
        self._tell(Recovery(cause, len(self._open), seconds, self._open.suspects).sentence())
        return ended
