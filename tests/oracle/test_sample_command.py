"""``lockstep sample`` replays the case file over real ranks, and says why a line is no sampling step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import LOCKSTEP, run
from scipy import stats

from launch.exit_codes import ExitCode

pytestmark = pytest.mark.long(50)

CASES = Path(__file__).resolve().parents[2] / ".." / "shared" / "cases" / "sampling.jsonl"
DRAWS = 2000
BAD: dict[str, tuple[Any, str]] = {
    "no logits": ({"params": {}}, "logits"),
    "text": ({"logits": [1, "x"]}, "'x'"),
    "params": ({"logits": [1], "params": 3}, "params"),
    "temperature": ({"logits": [1, 2], "params": {"temperature": -1}}, "temperature"),
    "unknown": ({"logits": [1, 2], "params": {"heat": 1}}, "heat"),
    "allowed": ({"logits": [1, 2], "params": {"allowed": [2]}}, "allowed"),
}


def sample(lines: list[Any], folder: Path, *options: str) -> list[dict[str, Any]]:
    source = folder / "in.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    outcome = run(*LOCKSTEP, "sample", "--input", str(source), *options)
    assert outcome.returncode == ExitCode.OK
    return outcome.records()


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 3])
def test_case_file(tmp_path: Path, tp: int) -> None:
    if not CASES.exists():
        pytest.skip(f"no case file at {CASES}")
    cases = [json.loads(line) for line in CASES.read_text().splitlines()]
    records = sample(cases, tmp_path, "--tp", str(tp), "--nan-policy", "sanitize")
    assert len(records) == len(cases) == 400
    for case, record in zip(cases, records, strict=True):
        expect = case["expect"]
        assert record["id"] == case["id"]
        assert record["status"] == expect["status"]
        assert record["support"] == expect["support"]
        assert record["probs"] == pytest.approx(expect["probs"], abs=1e-5)
        assert record["token"] in expect["support"]
        if "token" in expect:
            assert record["token"] == expect["token"]


STEPS: dict[str, dict[str, Any]] = {
    "plain": {"logits": [0.5, 1.0, 1.5, 2.0], "params": {"seed": 5}},
    "cut": {"logits": [0.5, 1.0, 1.5, 2.0, 2.5], "params": {"top_k": 3, "temperature": 2.0, "seed": 6}},
    "masked": {"logits": [0.5, 1.0, 1.5], "params": {"allowed": [0, 2]}},
    "not yet": {"logits": [9.0, 1.0, 1.5], "params": {"stop_ids": [0], "min_new_tokens": 2, "output": [1]}},
    "enough": {"logits": [9.0, 1.0, 1.5], "params": {"stop_ids": [0], "min_new_tokens": 1, "output": [1]}},
    "nan": {"logits": ["nan", 2]},
    "banned": {"logits": ["-inf", "-inf"]},
}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Returns what one run makes of good steps, of rows without a token, and of lines that are no step."""
    fields = STEPS | {name: line for name, (line, _) in BAD.items()}
    lines = [*({"id": name, **line} for name, line in fields.items()), [1]]
    drawn = sample(lines, tmp_path_factory.mktemp("steps"), "--draws", str(DRAWS))
    assert [record["id"] for record in drawn] == [*fields, f"line-{len(lines)}"]
    return {record["id"]: record for record in drawn}


@pytest.mark.parametrize("name", ["plain", "cut", "masked", "not yet", "enough"])
def test_counts_follow_the_probabilities(name: str, records: dict[str, dict[str, Any]]) -> None:
    record = records[name]
    counts = [record["counts"].get(str(token_id), 0) for token_id in record["support"]]
    assert sum(counts) == DRAWS, "an id outside the support was drawn"
    if len(counts) > 1:
        assert stats.chisquare(counts, [p * DRAWS for p in record["probs"]]).pvalue > 1e-4
    if name in ("not yet", "enough"):
        assert (0 in record["support"]) == (name == "enough")


def test_non_finite_logits_and_bad_lines(records: dict[str, dict[str, Any]]) -> None:
    for name in ("nan", "banned"):
        assert records[name]["status"] == "INVALID"
        assert records[name]["token"] is None
        assert records[name]["counts"] == {}
    for name, (_, named) in BAD.items():
        assert records[name]["status"] == "ERROR"
        assert named in records[name]["error"]
    assert list(records.values())[-1]["status"] == "ERROR"
