"""Metrics: requests by finish reason sum to those received, times are those that passed, the leader is quoted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from grammar_sync.statistics import GrammarStatistics
from grammar_sync.vetting.protocol import VettingCounters
from launch.front.metrics import REQUEST_REASONS, EngineMetrics
from launch.rank.reporter import RankBook, StatisticsBox
from runtime.engine_statistics import (
    AGREEMENT_SECONDS,
    BATCH_ROWS,
    STEP_SECONDS,
    CheckCounters,
    EngineStatistics,
    HeardRank,
    Histogram,
    RankState,
    SchedulerStatistics,
)
from runtime.messages import (
    Accepted,
    EngineReady,
    ErrorInfo,
    Finished,
    FinishReason,
    Rejected,
    Settled,
    TokenDelta,
    Usage,
)

SETTLED = Settled(seed=0, prompt_tokens=3, max_tokens=9)
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


def samples(metrics: EngineMetrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Returns every sample of the exposition by its name and labels."""
    found = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def value(metrics: EngineMetrics, name: str, **labels: str) -> float:
    return samples(metrics)[f"lockstep:{name}", tuple(sorted(labels.items()))]


def state(rank: int, *, beat: int = 1, stage: int = 0, steps: int = 0, wait_s: float = 0.0) -> RankState:
    return RankState(
        rank=rank,
        stage=stage,
        tp_rank=rank % 2,
        beat=beat,
        step=7,
        digest="00ff",
        step_age_s=0.5,
        busy_steps=steps,
        busy_s=2.0,
        last_step_s=0.1,
        wait_s=wait_s,
        searches=3 * stage,
        searched_rows=5 * stage,
        resident_bytes=1024,
    )


def finished(request_id: int, index: int, reason: FinishReason, **fields: object) -> Finished:
    error = ErrorInfo("grammar_error", "no") if reason == "error" else None
    return Finished(request_id, index, reason, Usage(5, 3, 8), error, **fields)  # type: ignore[arg-type]


reasons: st.SearchStrategy[FinishReason] = st.sampled_from(["stop", "length", "abort", "error"])


@settings(deadline=None, max_examples=60)
@given(
    requests=st.lists(st.one_of(st.just([]), st.lists(reasons, min_size=1, max_size=3)), max_size=12),
    open_requests=st.integers(0, 4),
    data=st.data(),
)
def test_finished_and_open_requests_sum_to_those_received(
    requests: list[list[FinishReason]], open_requests: int, data: st.DataObject
) -> None:
    """A request without choices is rejected; the order in which choices end does not matter."""
    metrics = EngineMetrics()
    for request_id in range(len(requests) + open_requests):
        metrics.submitted(request_id)
    ends = []
    for request_id, ending in enumerate(requests):
        if ending:
            metrics.heard(Accepted(request_id, len(ending), SETTLED))
            ends += [finished(request_id, index, reason) for index, reason in enumerate(ending)]
        else:
            metrics.heard(Rejected(request_id, ErrorInfo("invalid_request", "no")))
    for end in data.draw(st.permutations(ends)):
        metrics.heard(end)
    expected = Counter(max(ending, key=REQUEST_REASONS.index) if ending else "rejected" for ending in requests)
    got = {reason: value(metrics, "requests_finished_total", finish_reason=reason) for reason in REQUEST_REASONS}
    assert {reason: count for reason, count in got.items() if count} == expected
    assert value(metrics, "requests_unfinished") == open_requests
    assert value(metrics, "requests_received_total") == sum(got.values()) + open_requests
    choices = Counter(reason for ending in requests for reason in ending)
    assert choices == {
        reason: count
        for reason in REQUEST_REASONS[:-1]
        if (count := value(metrics, "choices_finished_total", finish_reason=reason))
    }
    metrics.lost()
    assert value(metrics, "requests_unfinished") == 0
    assert value(metrics, "requests_finished_total", finish_reason="error") == got["error"] + open_requests


def test_times_and_tokens_are_those_that_passed() -> None:
    clock = Clock()
    metrics = EngineMetrics(clock)
    metrics.submitted(1)
    metrics.heard(Accepted(1, 1, SETTLED))
    clock.now_s += 2.0
    metrics.heard(TokenDelta(1, 0, "a", [1]))
    clock.now_s += 0.3
    metrics.heard(TokenDelta(1, 0, "b", [2, 3, 4]))
    metrics.heard(TokenDelta(1, 0, "late text", []))
    clock.now_s += 0.1
    cost = GrammarStatistics(cache_hit=False, compile_s=0.02, queue_s=0.4, mask_s=0.006, mask_rows=3)
    metrics.heard(finished(1, 0, "stop", grammar=cost))
    assert value(metrics, "time_to_first_token_seconds_sum") == pytest.approx(2.0)
    assert value(metrics, "inter_token_seconds_count") == 3
    assert value(metrics, "inter_token_seconds_sum") == pytest.approx(0.3)
    assert value(metrics, "inter_token_seconds_bucket", le="0.1") == 3
    assert value(metrics, "request_seconds_sum") == pytest.approx(2.4)
    assert value(metrics, "generation_tokens_total") == 4
    assert value(metrics, "prompt_tokens_total") == 5
    assert value(metrics, "grammar_queue_seconds_sum") == pytest.approx(0.4)
    assert value(metrics, "grammar_compile_seconds_sum") == pytest.approx(0.02)
    assert value(metrics, "grammar_mask_seconds_sum") == pytest.approx(0.002)


def test_a_first_message_with_several_tokens_and_a_cached_grammar() -> None:
    metrics = EngineMetrics(Clock())
    metrics.submitted(1)
    metrics.heard(Accepted(1, 1, SETTLED))
    metrics.heard(TokenDelta(1, 0, "ab", [1, 2]))
    metrics.heard(finished(1, 0, "length", grammar=GrammarStatistics(True, 0.5, 0.1, 0.0, 0)))
    assert value(metrics, "time_to_first_token_seconds_count") == 1
    assert value(metrics, "inter_token_seconds_count") == 1
    assert value(metrics, "grammar_compile_seconds_count") == 0
    assert value(metrics, "grammar_mask_seconds_count") == 0
    assert value(metrics, "grammar_queue_seconds_count") == 1


def test_what_is_heard_of_unknown_requests_disturbs_nothing() -> None:
    metrics = EngineMetrics()
    refused = Rejected(9, ErrorInfo("invalid_request", "no"))
    for message in (refused, Accepted(9, 1, SETTLED), TokenDelta(9, 0, "a", [1]), finished(9, 0, "abort")):
        metrics.heard(message)
    assert value(metrics, "requests_received_total") == 0
    assert all(value(metrics, "requests_finished_total", finish_reason=reason) == 0 for reason in REQUEST_REASONS)
    assert not any(name == "lockstep:request_errors_total" for name, _ in samples(metrics))
    assert value(metrics, "choices_finished_total", finish_reason="abort") == 1


def test_the_leaders_statistics_are_shown() -> None:
    metrics = EngineMetrics()
    assert value(metrics, "sequences_running") == 0
    assert value(metrics, "kv_cache_usage_ratio") == 0
    metrics.heard(EngineReady(2, 2, "float32", "cpu", 512))
    rows = Histogram.of(BATCH_ROWS)
    for count in (1, 2, 2, 600):
        rows.add(count)
    metrics.heard(
        EngineStatistics(
            scheduler=SchedulerStatistics(
                running=2, waiting=1, blocks=8, used_blocks=2, cached_blocks=5, preemptions=4
            ),
            waiting_for_grammar=6,
            block_tokens=16,
            batch_rows=rows,
            step_s=Histogram.of(STEP_SECONDS),
            agreement_s=Histogram.of(AGREEMENT_SECONDS),
            vetting=VettingCounters(asked=9, refused={"time": 2}),
            grammar_cache_bytes=77,
            checks=CheckCounters(valid=3),
            ranks=[HeardRank(state(0), 0.1, 0.0), HeardRank(state(3, stage=1), 0.2, 0.004)],
        )
    )
    assert value(metrics, "engine_info", tp="2", pp="2", dtype="float32", device="cpu") == 1
    assert [value(metrics, "kv_cache_blocks", state=one) for one in ("used", "cached", "free")] == [2, 5, 1]
    assert value(metrics, "kv_cache_usage_ratio") == 0.25
    assert value(metrics, "sequences_waiting_for_grammar") == 6
    assert value(metrics, "preemptions_total") == 4
    assert [value(metrics, "batch_rows_bucket", le=le) for le in ("1.0", "2.0", "512.0", "+Inf")] == [1, 3, 3, 4]
    assert value(metrics, "batch_rows_sum") == 605
    assert value(metrics, "grammars_refused_total", reason="time") == 2
    assert value(metrics, "grammars_refused_total", reason="crash") == 0
    assert value(metrics, "output_checks_total", result="valid") == 3
    assert value(metrics, "rank_step_skew_seconds", rank="3", stage="1") == 0.004
    assert value(metrics, "rank_busy_seconds_total", rank="0", stage="0") == 2.0
    assert value(metrics, "sampler_searched_rows_total") == 5


def test_every_name_is_locksteps_own_and_counters_end_in_total() -> None:
    names = list(EngineMetrics().names())
    assert len(names) == len(set(names)) > 50
    assert all(name.startswith("lockstep:") for name in names)
    for family in EngineMetrics().registry.collect():
        assert family.documentation.endswith(".")


def test_every_metric_is_documented_as_it_is() -> None:
    documented = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    for family in EngineMetrics().registry.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        row = next(line for line in documented.splitlines() if line.startswith(f"| `{name}` |"))
        _, _, kind, _, meaning, _ = (cell.strip() for cell in row.split("|"))
        assert (kind, meaning) == (family.type, family.documentation)
    assert documented.count("| `lockstep:") == len(list(EngineMetrics().registry.collect()))


def test_skew_is_how_much_less_a_rank_waits_than_others_of_its_stage() -> None:
    clock = Clock()
    book = RankBook(clock)
    first = book.update([state(0), state(1), state(2, stage=1), state(3, stage=1)])
    assert [heard.skew_s for heard in first] == [0.0] * 4
    clock.now_s += 1.0
    later = [
        state(0, beat=2, steps=10, wait_s=0.5),
        state(1, beat=2, steps=10, wait_s=0.1),
        state(2, beat=2, stage=1, steps=10, wait_s=9.0),
        state(3, beat=1, stage=1),
    ]
    second = book.update(later)
    assert [round(heard.skew_s, 6) for heard in second] == [0.0, 0.04, 0.0, 0.0]
    assert [heard.heard_age_s for heard in second] == [0.0, 0.0, 0.0, 1.0]
    clock.now_s += 2.0
    third = book.update([state(1, beat=3, steps=10, wait_s=0.1)])
    assert round(third[1].skew_s, 6) == 0.04
    assert [heard.heard_age_s for heard in third] == [2.0, 0.0, 2.0, 3.0]


def test_the_box_holds_the_newest_statistics_once() -> None:
    box = StatisticsBox()
    assert box.take() is None
    older, newer = (
        EngineStatistics(
            SchedulerStatistics(),
            0,
            number,
            Histogram.of(BATCH_ROWS),
            Histogram.of(STEP_SECONDS),
            Histogram.of(AGREEMENT_SECONDS),
            VettingCounters(),
            0,
            None,
            [],
        )
        for number in (1, 2)
    )
    box.put(older)
    box.put(newer)
    assert box.take() is newer
    assert box.take() is None


@settings(deadline=None)
@given(values=st.lists(st.floats(0, 20), max_size=30))
def test_a_histogram_counts_every_value_once(values: list[float]) -> None:
    histogram = Histogram.of(STEP_SECONDS)
    for one in values:
        histogram.add(one)
    assert sum(histogram.counts) == len(values)
    assert histogram.total == pytest.approx(sum(values))
    for place, bound in enumerate(histogram.bounds):
        assert sum(histogram.counts[: place + 1]) == sum(one <= bound for one in values)
    copy = histogram.copy()
    histogram.add(1.0)
    assert sum(copy.counts) == len(values)
