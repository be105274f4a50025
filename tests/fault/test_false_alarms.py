"""Ranks that only lack the CPU are not taken for stalled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from command_line import LOCKSTEP, run
from tiny_checkpoints import write_tiny_checkpoint

from launch.exit_codes import ExitCode

STEPS = 10_000


@pytest.fixture
def load() -> Iterator[None]:
    """Keeps every core busy with something else."""
    with ExitStack() as stack:
        for _ in range(len(os.sched_getaffinity(0))):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(process.kill)
        yield


@pytest.mark.sweep
@pytest.mark.timeout(1600)
@pytest.mark.usefixtures("load")
def test_ten_thousand_steps_under_load(tmp_path: Path) -> None:
    model = write_tiny_checkpoint(tmp_path / "model", "llama", max_position_embeddings=1024)
    line = json.dumps({"prompt": "a", "max_tokens": 1000, "ignore_eos": True, "seed": 1})
    (tmp_path / "input.jsonl").write_text("\n".join([line] * (STEPS // 1000)))
    options = ("--model", str(model), "--tp", "2", "--pp", "2", "--max-num-seqs", "1", "--max-recoveries", "0")
    outcome = run(*LOCKSTEP, "generate", *options, "--input", str(tmp_path / "input.jsonl"), timeout_s=1500)
    assert outcome.returncode == ExitCode.OK, outcome.stderr
    assert "failed" not in outcome.stderr
    # One request at a time, and each of its tokens is a step.
    assert [len(record["token_ids"]) for record in outcome.records()] == [1000] * (STEPS // 1000)
