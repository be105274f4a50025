"""``lockstep bench decode`` as a user runs it: ranks, the peer, a table and a document, and nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import LOCKSTEP, run
from tiny_checkpoints import write_tiny_checkpoint

from launch.exit_codes import ExitCode


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def test_it_measures_every_contestant(model: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    sizes = ("--batches", "1,3", "--prompt-tokens", "9", "--new-tokens", "5", "--prefill-tokens", "30")
    threads = ("--threads-per-rank", "1")
    outcome = run(
        *(*LOCKSTEP, "bench", "decode", "--model", str(model), *sizes, *threads, "--repeats", "1"),
        *("--json", str(figures)),
    )
    assert outcome.returncode == ExitCode.OK, outcome.stderr
    document = json.loads(figures.read_text())
    assert (document["bench"], document["threads"], document["dtype"]) == ("decode", 1, "float32")
    assert document["peer"].startswith("transformers 5")
    assert [(case["batch"], case["prompt_tokens"], case["new_tokens"]) for case in document["cases"]] == [
        (1, 9, 5),
        (3, 9, 5),
        (1, 30, 2),
    ]
    for case in document["cases"]:
        assert (case["constrained"] is None) == (case["new_tokens"] == 2)
        for contestant in (case["ours"], case["constrained"], case["peer"]):
            if contestant is not None:
                assert contestant["tokens_per_s"] > 0
                gaps = contestant["inter_token"]
                assert 0 < gaps["min_ms"] <= gaps["median_ms"] <= gaps["p90_ms"] <= gaps["p99_ms"]
    assert "floor:" in outcome.stdout


def test_what_cannot_run_is_said_before_anything_starts(model: Path) -> None:
    bench = (*LOCKSTEP, "bench", "decode", "--model", str(model))
    outcome = run(*bench, "--prompt-tokens", "500")
    assert outcome.returncode == ExitCode.USAGE
    assert outcome.message == "lockstep: a prompt and its output have 564 tokens, the context has 512"
    outcome = run(*bench, "--batches", "9", "--max-num-seqs", "8", "--prefill-tokens", "0")
    assert outcome.returncode == ExitCode.USAGE
    assert outcome.message == "lockstep: --batches has 9, --max-num-seqs is 8"
