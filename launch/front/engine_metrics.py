"""What the engine counts itself, as Prometheus metrics: always as the leader told it last."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from grammar_sync.vetting.protocol import VettingCounters
from runtime.engine_statistics import (
    AGREEMENT_SECONDS,
    BATCH_ROWS,
    STEP_SECONDS,
    CheckCounters,
    EngineStatistics,
    HeardRank,
    Histogram,
    SchedulerStatistics,
)

_NOTHING = EngineStatistics(
    scheduler=SchedulerStatistics(),
    waiting_for_grammar=0,
    block_tokens=1,
    batch_rows=Histogram.of(BATCH_ROWS),
    step_s=Histogram.of(STEP_SECONDS),
    agreement_s=Histogram.of(AGREEMENT_SECONDS),
    vetting=VettingCounters(),
    grammar_cache_bytes=0,
    checks=CheckCounters(),
    ranks=[],
)
_REFUSALS = ("grammar", "masks", "time", "memory", "crash")
_RANK = ("rank", "stage")


class StatisticsCollector(Collector):
    """Turns the newest statistics into metrics.

    Args:
        newest: Returns them; None before any came.
    """

    def __init__(self, newest: Callable[[], EngineStatistics | None]) -> None:
        self._newest = newest

    def collect(self) -> Iterator[Metric]:
        """Yields every metric, zeros before the leader told anything."""
        statistics = self._newest() or _NOTHING
        yield from _scheduler(statistics)
        yield from _steps(statistics)
        yield from _grammars(statistics)
        yield from _ranks(statistics.ranks)


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(f"lockstep:{name}", what, value=value)


def _counter(name: str, what: str, value: float) -> Metric:
    return CounterMetricFamily(f"lockstep:{name}", what, value=value)


def _scheduler(statistics: EngineStatistics) -> Iterator[Metric]:
    one = statistics.scheduler
    yield _gauge("sequences_running", "Choices that have KV blocks.", one.running)
    yield _gauge("sequences_waiting", "Choices that wait for rows, tokens or KV blocks.", one.waiting)
    yield _gauge(
        "sequences_waiting_for_grammar", "Choices whose grammar is not agreed yet.", statistics.waiting_for_grammar
    )
    blocks = GaugeMetricFamily(
        "lockstep:kv_cache_blocks", "KV blocks of the pool, by what holds them.", labels=["state"]
    )
    blocks.add_metric(["used"], one.used_blocks)
    blocks.add_metric(["cached"], one.cached_blocks)
    blocks.add_metric(["free"], one.blocks - one.used_blocks - one.cached_blocks)
    yield blocks
    yield _gauge("kv_cache_usage_ratio", "Used KV blocks of all.", one.used_blocks / one.blocks if one.blocks else 0.0)
    yield _counter("kv_cache_evictions", "Cached KV blocks that were given to another content.", one.evicted_blocks)
    yield _counter("preemptions", "Times that a choice's KV blocks were taken from it.", one.preemptions)
    yield _counter("prefill_tokens", "Tokens run that were not the newest of an output.", one.prefill_tokens)
    yield _counter("prefix_cache_queried_tokens", "Tokens of admitted choices.", one.looked_up_tokens)
    yield _counter("prefix_cache_hit_tokens", "Those of them whose KV entries were there.", one.hit_tokens)
    yield _counter("spec_decode_draft_tokens", "Guessed tokens that were checked.", one.drafted_tokens)
    yield _counter("spec_decode_accepted_tokens", "Those of them that were right.", one.accepted_tokens)


def _steps(statistics: EngineStatistics) -> Iterator[Metric]:
    yield _histogram("batch_rows", "Rows of a step.", statistics.batch_rows)
    yield _histogram("step_seconds", "A step of the leader that ran something.", statistics.step_s)
    yield _histogram("agreement_seconds", "An agreement of the first stage on grammars.", statistics.agreement_s)


def _grammars(statistics: EngineStatistics) -> Iterator[Metric]:
    one = statistics.vetting
    yield _gauge("grammar_cache_bytes", "Compiled grammars that the leader keeps.", statistics.grammar_cache_bytes)
    yield _counter("grammars_asked", "Grammars that requests asked for.", one.asked)
    yield _counter("grammar_cache_hits", "Those of them whose outcome was in memory.", one.cache_hits)
    yield _counter("grammar_stored_hits", "Outcomes found in the grammar cache folder.", one.stored_hits)
    yield _counter("grammars_vetted", "Grammars that the compile process found good.", one.vetted)
    refused = CounterMetricFamily(
        "lockstep:grammars_refused", "Grammars that the compile process refused.", labels=["reason"]
    )
    for reason in sorted({*_REFUSALS, *one.refused}):
        refused.add_metric([reason], one.refused.get(reason, 0))
    yield refused
    yield _counter("grammar_vetting_seconds", "Seconds that workers took to vet grammars.", one.vet_s)
    yield _counter("grammar_vetting_queue_seconds", "Seconds that grammars waited for a worker.", one.queue_s)
    yield _counter("compile_process_restarts", "Compile processes started after the first.", one.restarts)
    checks = CounterMetricFamily(
        "lockstep:output_checks", "Finished outputs, by what their check found.", labels=["result"]
    )
    counted = statistics.checks or CheckCounters()
    for result in ("valid", "violation", "unchecked"):
        checks.add_metric([result], getattr(counted, result))
    yield checks


def _ranks(ranks: Sequence[HeardRank]) -> Iterator[Metric]:
    """Yields what is told of each rank; sampler counts are equal on all ranks of the last stage."""
    searches = max((heard.state.searches for heard in ranks), default=0)
    rows = max((heard.state.searched_rows for heard in ranks), default=0)
    yield _counter("sampler_searches", "Steps in which the sampler searched for supports by reductions.", searches)
    yield _counter("sampler_searched_rows", "Rows that it searched for.", rows)
    gauges: tuple[tuple[str, str, Callable[[HeardRank], float]], ...] = (
        ("rank_step", "The step that a rank is in.", lambda heard: heard.state.step),
        ("rank_step_age_seconds", "How long ago it began.", lambda heard: heard.state.step_age_s),
        ("rank_heartbeat_age_seconds", "How long ago the leader heard of a rank.", lambda heard: heard.heard_age_s),
        ("rank_step_skew_seconds", "How much later than the first of its stage a rank is.", lambda heard: heard.skew_s),
        ("rank_resident_bytes", "Memory of a rank's process.", lambda heard: heard.state.resident_bytes),
    )
    counters: tuple[tuple[str, str, Callable[[HeardRank], float]], ...] = (
        ("rank_busy_steps", "Steps of a rank that ran something.", lambda heard: heard.state.busy_steps),
        ("rank_busy_seconds", "Their seconds.", lambda heard: heard.state.busy_s),
        ("rank_wait_seconds", "Those spent in collectives and waiting for stages.", lambda heard: heard.state.wait_s),
    )
    for name, what, value in gauges:
        yield _per_rank(GaugeMetricFamily(f"lockstep:{name}", what, labels=_RANK), ranks, value)
    for name, what, value in counters:
        yield _per_rank(CounterMetricFamily(f"lockstep:{name}", what, labels=_RANK), ranks, value)


def _per_rank(
    family: GaugeMetricFamily | CounterMetricFamily, ranks: Sequence[HeardRank], value: Callable[[HeardRank], float]
) -> Metric:
    for heard in ranks:
        family.add_metric([str(heard.state.rank), str(heard.state.stage)], value(heard))
    return family


def _histogram(name: str, what: str, histogram: Histogram) -> Metric:
    buckets, below = [], 0
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        below += count
        buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), float(below)))
    return HistogramMetricFamily(f"lockstep:{name}", what, buckets=buckets, sum_value=histogram.total)
