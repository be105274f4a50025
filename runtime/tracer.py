"""Traces a rank: wraps methods of its engine's parts; an engine without a tracer runs as if this were not there.

What is traced stands in ``trace_engine`` alone; neither the step loop nor the parts know of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from grammar_sync.fill_pool import FillPool
from pp.link import Tag
from runtime.engine import EngineParts, RankEngine
from runtime.trace_part import Span, SpanKind, TracePart

_MERGED_GAP_NS = 50_000
_SHORT_NS = 10_000

_PLAIN = {
    "step": SpanKind("step"),
    "intake": SpanKind("intake"),
    "client": SpanKind("client", waits="client"),
    "agree": SpanKind("agree", "waiting"),
    "schedule": SpanKind("schedule", "rows"),
    "begin masks": SpanKind("begin masks", "rows"),
    "fill mask": SpanKind("fill mask", "rows"),
    "wait for masks": SpanKind("wait for masks", "rows", waits="threads"),
    "send masks": SpanKind("send masks", "rows"),
    "forward": SpanKind("forward", "tokens"),
    "logits": SpanKind("logits"),
    "sample": SpanKind("sample", "rows"),
    "share ids": SpanKind("share ids", "rows"),
    "receive ids": SpanKind("receive ids", "rows"),
    "reports": SpanKind("reports"),
    "settle": SpanKind("settle", "rows"),
    "accept": SpanKind("accept", "rows"),
    "emit": SpanKind("emit", "rows"),
    "release": SpanKind("release"),
    "finish sends": SpanKind("finish sends", waits="stage"),
}
_COLLECTIVES = {
    "all_reduce_sum_": "all_reduce",
    "all_reduce_max_": "all_reduce max",
    "all_gather": "all_gather",
    "broadcast_frame": "broadcast",
    "all_gather_object": "all_gather_object",
}
KINDS: tuple[SpanKind, ...] = (
    *_PLAIN.values(),
    *(SpanKind(name, waits="group") for name in _COLLECTIVES.values()),
    *(SpanKind(f"send {tag.name.lower()}", "bytes") for tag in Tag),
    *(SpanKind(f"receive {tag.name.lower()}", "bytes", waits="stage") for tag in Tag),
)
"""Every kind of span, by number."""

_NUMBER_OF = {kind.name: number for number, kind in enumerate(KINDS)}

Value = Callable[[tuple[Any, ...], Any], int]
"""Returns what a span counts, given a call's arguments and result; the result is None when the call raised."""

Naming = Callable[[tuple[Any, ...]], str]
"""Returns what a span is called, given a call's arguments."""


@dataclass(slots=True)
class _Track:
    """A thread's spans, and the last of them."""

    number: int
    last: Span | None = None


class Tracer:
    """Writes spans of this rank, from any thread.

    Args:
        part: Where they go.
        clock: The monotonic clock, in nanoseconds.
    """

    def __init__(self, part: TracePart, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.clock = clock
        self._part = part
        self._numbers = count()
        self._track_numbers = count(1)
        self._tracks = {threading.get_ident(): _Track(0)}

    def add(self, name: str, start_ns: int, step: int, value: int = 0, *, merge: bool = False) -> None:
        """Writes a span that ends now.

        Args:
            name: One of ``KINDS``.
            start_ns: When it began.
            step: The step that it belongs to.
            value: What it counts.
            merge: Whether it prolongs this thread's last span, when that is of the same name and step and hardly over.
        """
        end_ns = self.clock()
        kind = _NUMBER_OF[name]
        ident = threading.get_ident()
        track = self._tracks.get(ident)
        if track is None:
            track = self._tracks[ident] = _Track(next(self._track_numbers))
        last = track.last
        if (
            merge
            and last is not None
            and (last.kind, last.step) == (kind, step)
            and start_ns - last.end_ns < _MERGED_GAP_NS
        ):
            span = last._replace(end_ns=end_ns, value=last.value + value)
        else:
            span = Span(next(self._numbers), start_ns, end_ns, step, value, kind, track.number)
        track.last = span
        self._part.put(span)


def trace_engine(tracer: Tracer, engine: RankEngine, parts: EngineParts, pool: FillPool | None) -> None:
    """Makes an engine's parts write what they do to ``tracer``.

    Args:
        tracer: Where spans go.
        engine: The engine.
        parts: What it is made of.
        pool: Its mask fills; None on later stages.
    """
    wrap = _Wrapper(tracer, parts)
    wrap(engine, "step", "step")
    wrap(parts.intake, "exchange", "intake")
    if hasattr(parts.sink, "collect"):
        wrap(parts.sink, "collect", "client")
        for method in ("prompt", "token", "refused", "ended"):
            wrap(parts.sink, method, "emit", _one, merge=True)
        wrap(parts.sink, "flush", "emit", shortest_ns=_SHORT_NS)
    wrap(parts.scheduler, "plan", "schedule", lambda _, plan: 0 if plan is None else len(plan.rows))
    wrap(parts.scheduler, "commit", "settle", _sampling_rows)
    wrap(parts.scheduler, "release_finished", "release", shortest_ns=_SHORT_NS)
    grammars = parts.grammars
    wrap(grammars, "agree", "agree", lambda given, _: len(given[1]))
    if parts.link.is_first:
        wrap(grammars, "begin_masks", "begin masks", _constrained_rows, shortest_ns=_SHORT_NS)
        wrap(grammars, "send_masks", "send masks", _constrained_rows, shortest_ns=_SHORT_NS)
        wrap(grammars, "accept", "accept", _one, merge=True, shortest_ns=_SHORT_NS)
    wrap(parts.stage, "forward", "forward", lambda given, _: int(given[0].token_ids.shape[0]))
    wrap(parts.stage, "logits", "logits")
    if parts.sampling is not None:
        wrap(parts.sampling, "sample", "sample", _sampling_rows)
    wrap(parts.tokens, "publish", "share ids", _sampling_rows)
    wrap(parts.tokens, "receive", "receive ids", _sampling_rows)
    for method in ("send", "receive"):
        wrap(parts.reports, method, "reports", shortest_ns=_SHORT_NS)
    for method, name in _COLLECTIVES.items():
        # A group of one rank makes no collective call.
        if parts.group.size > 1:
            wrap(parts.group, method, name)
    wrap(parts.link, "begin_step", "finish sends", shortest_ns=_SHORT_NS)
    for method in ("send_frame", "send_tensor"):
        wrap(parts.link, method, lambda given: f"send {given[2].name.lower()}", lambda given, _: _size(given[0]))
    for method in ("receive_frame", "receive_tensor"):
        wrap(parts.link, method, lambda given: f"receive {given[1].name.lower()}", lambda _, result: _size(result))
    if pool is not None:
        wrap.fills(pool)


class _Wrapper:
    """Replaces methods of objects by ones that also write a span."""

    def __init__(self, tracer: Tracer, parts: EngineParts) -> None:
        self._tracer = tracer
        self._group = parts.group

    def __call__(
        self,
        target: object,
        method: str,
        name: str | Naming,
        value: Value | None = None,
        *,
        merge: bool = False,
        shortest_ns: int = 0,
    ) -> None:
        """Makes ``target.method`` write a span ``name``, unless it took less than ``shortest_ns``."""
        inner = getattr(target, method)
        tracer, group = self._tracer, self._group

        def traced(*args: Any, **kwargs: Any) -> Any:
            result = None
            start_ns = tracer.clock()
            try:
                result = inner(*args, **kwargs)
            finally:
                if not shortest_ns or tracer.clock() - start_ns >= shortest_ns:
                    number = 0 if value is None else value(args, result)
                    called = name if isinstance(name, str) else name(args)
                    tracer.add(called, start_ns, group.step, number, merge=merge)
            return result

        setattr(target, method, traced)

    def fills(self, pool: FillPool) -> None:
        """Makes a pool's threads write a span for the fills that they run one after the other."""
        submit, wait = pool.submit, pool.wait
        tracer, group = self._tracer, self._group

        def timed(call: Callable[[], None], step: int) -> Callable[[], None]:
            def run() -> None:
                start_ns = tracer.clock()
                try:
                    call()
                finally:
                    tracer.add("fill mask", start_ns, step, 1, merge=True)

            return run

        def traced_submit(calls: Sequence[Callable[[], None]]) -> Any:
            return submit([timed(call, group.step) for call in calls])

        def traced_wait(batch: Any) -> Any:
            start_ns = tracer.clock()
            try:
                return wait(batch)
            finally:
                tracer.add("wait for masks", start_ns, group.step, len(batch.calls))

        vars(pool).update(submit=traced_submit, wait=traced_wait)


def _one(_given: tuple[Any, ...], _result: Any) -> int:
    return 1


def _sampling_rows(given: tuple[Any, ...], _result: Any) -> int:
    return len(given[0].sampling_rows)


def _constrained_rows(given: tuple[Any, ...], _result: Any) -> int:
    return len(given[0].constrained_rows)


def _size(payload: Any) -> int:
    """Returns the bytes of a frame or tensor; 0 for one that did not come."""
    if payload is None or isinstance(payload, bytes):
        return len(payload or b"")
    return int(payload.numel() * payload.element_size())
