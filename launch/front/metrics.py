"""Prometheus metrics of one engine, kept by the front side from what it sends and hears.

A request counts as received when it is submitted, and as finished once: with the worst finish reason of its choices, or
``rejected``. So the finished ones and those under way always sum to the received ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from launch.front.engine_metrics import StatisticsCollector
from runtime.engine_statistics import EngineStatistics
from runtime.messages import Accepted, EngineMessage, EngineReady, Finished, Rejected, TokenDelta

REQUEST_REASONS = ("stop", "length", "abort", "error", "rejected")
"""From the best to the worst."""

_WAIT_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
_MASK_SECONDS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.1, 1.0)
_COMPILE_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_RECOVERY_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(slots=True)
class _Open:
    """A request under way: when it was submitted, and when a token of each choice came last."""

    submitted_s: float
    choices_left: int = 0
    worst: str = "stop"
    token_s: dict[int, float] = field(default_factory=dict)


class EngineMetrics:
    """The metrics of one engine.

    Args:
        clock: The monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        # A time of creation beside every number is noise; this is the library's own switch, for the whole process.
        disable_created_metrics()
        self.registry = CollectorRegistry(auto_describe=True)
        self.statistics: EngineStatistics | None = None
        self._clock = clock
        self._open: dict[int, _Open] = {}
        self._define_requests()
        self._define_times()
        self._define_recoveries()
        self.registry.register(StatisticsCollector(lambda: self.statistics))

    def submitted(self, request_id: int) -> None:
        """Counts a request that is being sent to the leader."""
        self._received.inc()
        self._open[request_id] = _Open(self._clock())
        self._unfinished.set(len(self._open))

    def heard(self, message: EngineMessage) -> None:
        """Counts what a message of the leader's says."""
        match message:
            case EngineReady():
                labels = {"tp": str(message.tp_size), "pp": str(message.pp_size)}
                self._info.labels(**labels, dtype=message.dtype, device=message.device).set(1)
            case EngineStatistics():
                self.statistics = message
            case Rejected():
                # Questions that are no requests to generate, such as for a prompt's ids, can be refused too.
                if message.request_id in self._open:
                    self._errors.labels(message.error.code).inc()
                self._close(message.request_id, "rejected")
            case Accepted():
                if message.request_id in self._open:
                    self._open[message.request_id].choices_left = message.choices
            case TokenDelta():
                self._delta(message)
            case Finished():
                self._finished_choice(message)
            case _:
                pass

    def dropped(self, frames: int) -> None:
        """Counts frames of leaders that are gone."""
        self._dropped.inc(frames)

    def recovering(self) -> None:
        """Notes that the ranks are gone and others are to come."""
        self._recovering.set(1)

    def recovered(self, seconds: float, resumed_requests: int) -> None:
        """Counts a recovery.

        Args:
            seconds: From a fault of a rank until the next leader was told what is under way.
            resumed_requests: How many requests that was.
        """
        self._recovering.set(0)
        self._recovery.observe(seconds)
        self._resumed.inc(resumed_requests)

    def aborted(self, request_ids: Sequence[int]) -> None:
        """Counts requests that had been aborted and of which nobody will hear."""
        for request_id in request_ids:
            self._close(request_id, "abort")

    def lost(self) -> None:
        """Counts all requests under way as ended by an error: the engine is gone."""
        for request_id in list(self._open):
            self._errors.labels("engine_lost").inc()
            self._close(request_id, "error")

    def exposition(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def names(self) -> Iterator[str]:
        """Yields the names of all metrics that there can be, as queries use them."""
        for family in self.registry.collect():
            suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
            yield from (family.name + suffix for suffix in suffixes)

    def _define_requests(self) -> None:
        registry = self.registry
        self._info = Gauge(
            "lockstep:engine_info",
            "1, labelled with what the engine is.",
            ["tp", "pp", "dtype", "device"],
            registry=registry,
        )
        self._received = Counter("lockstep:requests_received", "Requests sent to the leader.", registry=registry)
        self._finished = Counter(
            "lockstep:requests_finished",
            "Requests that ended, by the worst finish reason of their choices.",
            ["finish_reason"],
            registry=registry,
        )
        self._choices = Counter(
            "lockstep:choices_finished", "Choices that ended, by finish reason.", ["finish_reason"], registry=registry
        )
        for reason in REQUEST_REASONS:
            self._finished.labels(reason)
            if reason != "rejected":
                self._choices.labels(reason)
        self._errors = Counter(
            "lockstep:request_errors",
            "Rejected requests and choices that ended in an error.",
            ["code"],
            registry=registry,
        )
        self._unfinished = Gauge("lockstep:requests_unfinished", "Requests received and not ended.", registry=registry)
        self._prompt_tokens = Counter("lockstep:prompt_tokens", "Prompt tokens of ended requests.", registry=registry)
        self._tokens = Counter("lockstep:generation_tokens", "Tokens generated.", registry=registry)

    def _define_recoveries(self) -> None:
        registry = self.registry
        self._recovering = Gauge(
            "lockstep:recovering", "1 while ranks are gone and others are to come.", registry=registry
        )
        self._resumed = Counter(
            "lockstep:requests_resumed", "Times that new ranks were told of a request.", registry=registry
        )
        self._dropped = Counter(
            "lockstep:dropped_frames", "Messages of ranks that are gone, dropped.", registry=registry
        )
        self._recovery = Histogram(
            "lockstep:recovery_seconds",
            "From a fault of a rank until the next leader was told what is under way.",
            buckets=_RECOVERY_SECONDS,
            registry=registry,
        )

    def _define_times(self) -> None:
        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"lockstep:{name}", what, buckets=buckets, registry=self.registry)

        self._first_token = histogram(
            "time_to_first_token_seconds", "From sending a request to the first token of each choice.", _WAIT_SECONDS
        )
        self._token = histogram("inter_token_seconds", "From one token of a choice to the next.", _TOKEN_SECONDS)
        self._request = histogram("request_seconds", "From sending a request to its end.", _WAIT_SECONDS)
        self._prompt_size = histogram("request_prompt_tokens", "Prompt tokens of a choice.", _TOKENS)
        self._output_size = histogram("request_generation_tokens", "Tokens generated for a choice.", _TOKENS)
        self._grammar_queue = histogram(
            "grammar_queue_seconds", "From a choice's arrival until all ranks had its grammar.", _COMPILE_SECONDS
        )
        self._grammar_compile = histogram(
            "grammar_compile_seconds",
            "Compiling the grammar of a choice that did not find it compiled.",
            _COMPILE_SECONDS,
        )
        self._grammar_mask = histogram(
            "grammar_mask_seconds", "Filling one mask row, as the mean of each choice.", _MASK_SECONDS
        )

    def _delta(self, message: TokenDelta) -> None:
        self._tokens.inc(len(message.token_ids))
        request = self._open.get(message.request_id)
        if request is None or not message.token_ids:
            return
        now_s, count = self._clock(), len(message.token_ids)
        before_s = request.token_s.get(message.index)
        request.token_s[message.index] = now_s
        if before_s is None:
            self._first_token.observe(now_s - request.submitted_s)
            before_s, count = now_s, count - 1
        for _ in range(count):
            self._token.observe((now_s - before_s) / count)

    def _finished_choice(self, message: Finished) -> None:
        self._choices.labels(message.finish_reason).inc()
        self._prompt_size.observe(message.usage.prompt_tokens)
        self._output_size.observe(message.usage.completion_tokens)
        if message.index == 0:
            self._prompt_tokens.inc(message.usage.prompt_tokens)
        if message.error is not None:
            self._errors.labels(message.error.code).inc()
        if message.grammar is not None:
            self._grammar_queue.observe(message.grammar.queue_s)
            if not message.grammar.cache_hit and message.grammar.compile_s > 0:
                self._grammar_compile.observe(message.grammar.compile_s)
            if message.grammar.mask_rows:
                self._grammar_mask.observe(message.grammar.mask_s / message.grammar.mask_rows)
        request = self._open.get(message.request_id)
        if request is None:
            return
        request.worst = max(request.worst, message.finish_reason, key=REQUEST_REASONS.index)
        request.choices_left -= 1
        if request.choices_left <= 0:
            self._close(message.request_id, request.worst)

    def _close(self, request_id: int, reason: str) -> None:
        request = self._open.pop(request_id, None)
        if request is None:
            return
        self._finished.labels(reason).inc()
        self._unfinished.set(len(self._open))
        if reason != "rejected":
            self._request.observe(self._clock() - request.submitted_s)
