"""A logit processor of the user's that fails: its request ends with the cause, which is logged, and no other does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import LOCKSTEP, Outcome, run
from tiny_checkpoints import write_tiny_checkpoint

from launch.exit_codes import ExitCode

PROCESSOR = """
class Broken:
    needs_row_values = False

    def check(self, args):
        if args.get("check"):
            raise RuntimeError("cannot check")

    def process(self, rows):
        if rows.slice_start:
            raise KeyError("not in this slice")
"""
REQUEST = {"prompt": "one two three", "max_tokens": 4, "temperature": 0}
LINES: list[dict[str, Any]] = [
    {"id": "plain", **REQUEST},
    {"id": "check", **REQUEST, "logit_processors": [{"name": "Broken", "args": {"check": True}}]},
    {"id": "process", **REQUEST, "logit_processors": [{"name": "Broken"}]},
    {"id": "asking", **REQUEST, "logprobs": 2},
    {"id": "null", **REQUEST, "top_K": None},
    {"id": None, **REQUEST, "stop": None, "messages": None, "regex": None, "priority": None, "strict": None},
]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    model = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", vocab_size=2048)
    folder = tmp_path_factory.mktemp("processors")
    (folder / "broken_processors.py").write_text(PROCESSOR)
    root = Path(__file__).resolve().parents[2]
    return run(
        *(*LOCKSTEP, "generate", "--model", str(model), "--tp", "2", "--pp", "2", "--input", "-"),
        *("--logit-processor", "broken_processors:Broken"),
        environ={"PYTHONPATH": f"{root}:{folder}"},
        stdin="\n".join(map(json.dumps, LINES)).encode(),
    )


def test_only_the_faulty_requests_end(outcome: Outcome) -> None:
    assert outcome.returncode == ExitCode.REQUESTS_FAILED
    records = {record["id"]: record for record in outcome.records()}
    assert [name for name, record in records.items() if record["error"]] == ["check", "process", "null"]
    assert records["plain"]["token_ids"] == records["asking"]["token_ids"] == records[None]["token_ids"]
    assert records["check"]["error"] == {
        "code": "invalid_request",
        "message": "logit_processors[0].args of Broken: RuntimeError: cannot check",
        "param": "logit_processors",
    }
    assert records["null"]["error"]["param"] == "top_K"


def test_the_cause_is_told_with_the_rank_that_saw_it(outcome: Outcome) -> None:
    (error,) = (record["error"] for record in outcome.records() if record["id"] == "process")
    assert error["code"] == "sampling_error"
    assert error["message"].endswith("stage 1, rank 3: logit processor Broken failed: KeyError: 'not in this slice'")


def test_the_tracebacks_are_in_the_ranks_logs(outcome: Outcome) -> None:
    assert "lockstep rank 0: WARNING logit processor Broken failed to check its arguments\nTraceback" in outcome.stderr
    assert "lockstep rank 3: ERROR logit processor Broken failed\nTraceback" in outcome.stderr
    assert "KeyError: 'not in this slice'" in outcome.stderr
    assert "lockstep rank 2" not in outcome.stderr
