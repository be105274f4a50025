"""``lockstep sample`` replays the case file over real ranks, and says why a line is no sampling step."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from command_line import LOCKSTEP, run, running, wait_until
from scipy import stats

from launch.exit_codes import ExitCode
from runtime.row_errors import WHY_NO_TOKEN
from sampler.sampler import RowReason

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
    """Returns the records of a run, after checking that exit code and summary go with them."""
    source = folder / "in.jsonl"
    source.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    outcome = run(*LOCKSTEP, "sample", "--input", str(source), *options)
    records = outcome.records()
    failed = sum(record["error"] is not None for record in records)
    assert outcome.returncode == (ExitCode.REQUESTS_FAILED if failed else ExitCode.OK)
    assert outcome.message.startswith(f"lockstep: {len(records)} lines" + f", {failed} failed" * bool(failed))
    for record in records:
        assert (record["token"] is None) == (record["error"] is not None) == (record["status"] != "OK")
    return records


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
    "infinite": {"logits": [1, "inf"], "params": {"temperature": 0}},
    "masked away": {"logits": [1, 2], "params": {"allowed": []}},
    "nothing allowed": {"logits": [1, 2], "params": {"allowed_token_ids": [1], "bad_words": [[1]]}},
    "asks": {"logits": [0, 1, 2], "params": {"logprobs": 2, "logprob_token_ids": [0], "temperature": 0, "n": 3}},
    "asks in vain": {"logits": ["-inf"], "params": {"logprobs": 1, "return_support": True}},
    "greedy": {"logits": [1.0, 2.0, 2.0], "params": {"top_k": 1}},
    "tied": {"logits": [1.0, 2.0, 2.0], "params": {"top_k": 2}},
    "bad words": {"logits": [5, 5, 1], "params": {"bad_words": [[2, 0], [1]], "output": [2]}},
}
NON_FINITE, NOTHING = "rank 0: " + WHY_NO_TOKEN[RowReason.NON_FINITE], WHY_NO_TOKEN[RowReason.EMPTY_SUPPORT]
INVALID = {"nan": NON_FINITE, "infinite": NON_FINITE} | dict.fromkeys(
    ("banned", "masked away", "nothing allowed", "asks in vain"), NOTHING
)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Returns what one run makes of good steps, of rows without a token, and of lines that are no step."""
    fields = STEPS | {name: line for name, (line, _) in BAD.items()}
    lines = [*({"id": name, **line} for name, line in fields.items()), "[1]"]
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


def test_rows_without_a_token_and_bad_lines_say_why(records: dict[str, dict[str, Any]]) -> None:
    for name, why in INVALID.items():
        assert records[name]["status"] == "INVALID"
        assert records[name]["error"] == {"code": "sampling_error", "message": why, "param": None}
        assert (records[name]["support"], records[name]["counts"], records[name]["logprobs"]) == ([], {}, None)
    for name, (_, named) in BAD.items():
        assert records[name]["status"] == "ERROR"
        assert records[name]["error"]["code"] == "invalid_request"
        assert named in records[name]["error"]["message"]
    assert {
        name: records[name]["error"]["param"] for name in ("no logits", "text", "params", "allowed", "unknown")
    } == {
        "no logits": "logits",
        "text": "logits",
        "params": "params",
        "allowed": "allowed",
        "unknown": "heat",
    }
    assert list(records.values())[-1]["status"] == "ERROR"


def test_what_a_line_asks_to_know(records: dict[str, dict[str, Any]]) -> None:
    asks, total = records["asks"], math.log(sum(map(math.exp, range(3))))
    assert asks["ignored"] == ["n"]
    assert asks["logprobs"]["logprob"] == pytest.approx(2 - total)
    assert [one["token_id"] for one in asks["logprobs"]["top_logprobs"]] == [2, 1]
    assert asks["logprobs"]["named_logprobs"] == [{"token_id": 0, "logprob": pytest.approx(-total)}]
    assert records["plain"]["logprobs"] is None
    assert records["plain"]["ignored"] == []


def test_a_greedy_row_may_draw_one_id_alone(records: dict[str, dict[str, Any]]) -> None:
    greedy = records["greedy"]
    assert (greedy["support"], greedy["probs"], greedy["counts"]) == ([1], [1.0], {"1": DRAWS})
    assert records["tied"]["support"] == [1, 2]


def test_bad_words_of_ids_are_bans(records: dict[str, dict[str, Any]]) -> None:
    assert records["bad words"]["support"] == [2]


def test_files_are_checked_before_ranks_start(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for options, named in (
        (("--input", "-"), "--input -: a file is needed"),
        (("--input", str(pipe)), "a regular file is needed"),
        (("--input", "/dev/zero"), "a regular file is needed"),
        (("--input", str(tmp_path / "none")), "No such file"),
        (("--input", str(CASES.parent / "none"), "--output", str(tmp_path)), "No such file"),
        (("--input", __file__, "--output", str(tmp_path)), "it is a folder"),
    ):
        outcome = run(*LOCKSTEP, "sample", *options)
        assert outcome.returncode == ExitCode.USAGE
        assert named in outcome.message


def test_a_long_run_shows_how_far_it_is_and_can_be_interrupted(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"logits": [1, 2, 3]}')
    command = (*LOCKSTEP, "sample", "--input", str(source), "--tp", "2", "--draws", str(10**11))
    # As on a terminal.
    with running(*command, environ={"FORCE_COLOR": "1", "TERM": "xterm"}) as started:
        stderr = started.folder / "stderr"
        wait_until(lambda: "draws/s" in stderr.read_text(), 60, "the progress bar")
        outcome, seconds = started.interrupt(signal.SIGINT, 20)
        started.check_nothing_left()
    assert outcome.returncode == ExitCode.INTERRUPTED
    assert seconds < 10
    _, hidden, after = outcome.stderr.rpartition("\x1b[?25l")
    assert hidden
    assert "\x1b[?25h" in after, "the cursor comes back"
