"""``--metrics-file``: the metrics of a real run agree with its results, and every rank is heard of."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from command_line import LOCKSTEP, Outcome, run
from prometheus_client.parser import text_string_to_metric_families
from tiny_checkpoints import write_tiny_checkpoint

from launch.exit_codes import ExitCode

LONG = "One two three " * 8
REQUESTS: list[dict[str, Any]] = [
    {"prompt": LONG, "max_tokens": 6, "temperature": 0, "ignore_eos": True},
    {"prompt": "a", "max_tokens": 5, "temperature": 0, "n": 3, "ignore_eos": True},
    {"prompt": "a", "choice": ["yes", "no"], "max_tokens": 20},
    {"prompt": "a", "regex": "[a-c]{4}", "max_tokens": 20},
    {"prompt": "a", "json_schema": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}},
    {"prompt": "a", "temprature": 1},
    {"prompt": ""},
    {"prompt": "a", "ebnf": "no grammar at all", "max_tokens": 3},
    {"prompt": LONG, "max_tokens": 3, "temperature": 0, "ignore_eos": True},
]
SPREAD = [
    {"prompt": f"{number}", "max_tokens": 8, "top_p": 0.999, "temperature": 1e3, "seed": 1} for number in range(4)
]

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture(scope="module")
def outcome_and_samples(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Samples]:
    folder = tmp_path_factory.mktemp("metrics")
    model = write_tiny_checkpoint(folder / "tiny", "llama")
    (folder / "in.jsonl").write_text("\n".join(map(json.dumps, REQUESTS + SPREAD)))
    options = ("--model", str(model), "--tp", "2", "--pp", "2", "--max-num-seqs", "4")
    files = ("--input", str(folder / "in.jsonl"), "--metrics-file", str(folder / "metrics.txt"))
    outcome = run(*LOCKSTEP, "generate", *options, *files)
    assert outcome.returncode == ExitCode.REQUESTS_FAILED, outcome.stderr
    families = text_string_to_metric_families((folder / "metrics.txt").read_text())
    return outcome, {
        (sample.name.removeprefix("lockstep:"), tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.fixture(scope="module")
def outcome(outcome_and_samples: tuple[Outcome, Samples]) -> Outcome:
    return outcome_and_samples[0]


@pytest.fixture(scope="module")
def samples(outcome_and_samples: tuple[Outcome, Samples]) -> Samples:
    return outcome_and_samples[1]


def by_label(samples: Samples, name: str, label: str) -> dict[str, float]:
    return {dict(labels)[label]: value for (one, labels), value in samples.items() if one == name}


def test_requests_sum_to_those_received(outcome: Outcome, samples: Samples) -> None:
    finished = by_label(samples, "requests_finished_total", "finish_reason")
    assert samples["requests_received_total", ()] == sum(finished.values()) == len(REQUESTS) + len(SPREAD)
    assert samples["requests_unfinished", ()] == 0
    records = outcome.records()
    refused = [record for record in records if record["error"] and record["error"]["code"] == "invalid_request"]
    assert finished["rejected"] == len(refused) >= 2
    choices = by_label(samples, "choices_finished_total", "finish_reason")
    reasons = Counter(record["finish_reason"] for record in records)
    reasons["error"] -= len(refused)
    assert {reason: count for reason, count in choices.items() if count} == +reasons
    assert by_label(samples, "request_errors_total", "code") == Counter(
        record["error"]["code"] for record in records if record["error"]
    )


def test_tokens_and_steps_agree_with_the_results(outcome: Outcome, samples: Samples) -> None:
    usages = [record["usage"] for record in outcome.records() if record["usage"]]
    made = sum(usage["completion_tokens"] for usage in usages)
    assert samples["generation_tokens_total", ()] == made
    assert samples["request_generation_tokens_sum", ()] == made
    assert samples["time_to_first_token_seconds_count", ()] + samples["inter_token_seconds_count", ()] == made
    assert samples["batch_rows_sum", ()] >= made
    assert samples["batch_rows_bucket", (("le", "4.0"),)] == samples["batch_rows_count", ()] > 5
    assert samples["step_seconds_count", ()] >= samples["batch_rows_count", ()]
    assert samples["prefix_cache_hit_tokens_total", ()] > 0
    assert samples["sequences_running", ()] == samples["sequences_waiting", ()] == 0
    assert samples["kv_cache_usage_ratio", ()] == 0
    assert sum(by_label(samples, "kv_cache_blocks", "state").values()) > 0


def test_grammars_are_counted(outcome: Outcome, samples: Samples) -> None:
    costs = [record["grammar"] for record in outcome.records() if "grammar" in record]
    assert samples["grammar_queue_seconds_count", ()] == len(costs)
    assert samples["grammars_asked_total", ()] == 3 + (samples["grammars_refused_total", (("reason", "grammar"),)])
    assert samples["grammars_vetted_total", ()] == 3
    assert samples["grammar_cache_bytes", ()] > 0
    assert samples["agreement_seconds_count", ()] >= 1
    assert samples["grammar_mask_seconds_count", ()] == sum(cost["mask_rows"] > 0 for cost in costs) == 3
    assert samples["output_checks_total", (("result", "violation"),)] == 0


def test_every_rank_is_heard_of(samples: Samples) -> None:
    ranks = {"0": "0", "1": "0", "2": "1", "3": "1"}
    for name in ("rank_step", "rank_heartbeat_age_seconds", "rank_busy_steps_total", "rank_resident_bytes"):
        found = {dict(labels)["rank"]: dict(labels)["stage"] for one, labels in samples if one == name}
        assert found == ranks
    assert all(age < 5 for age in by_label(samples, "rank_heartbeat_age_seconds", "rank").values())
    busy = by_label(samples, "rank_busy_steps_total", "rank")
    assert set(busy.values()) == {samples["step_seconds_count", ()]}
    waits = by_label(samples, "rank_wait_seconds_total", "rank")
    spent = by_label(samples, "rank_busy_seconds_total", "rank")
    assert all(0 < waits[rank] < spent[rank] for rank in ranks)
    assert all(skew >= 0 for skew in by_label(samples, "rank_step_skew_seconds", "rank").values())


def test_searches_of_the_sampler_are_counted(samples: Samples) -> None:
    """A flat distribution's nucleus holds more ids than are gathered."""
    assert samples["sampler_searched_rows_total", ()] >= samples["sampler_searches_total", ()] > 0
