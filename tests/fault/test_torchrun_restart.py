"""The last resort: torchrun starts all ranks anew, and the batch is done from its beginning."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from command_line import LOCKSTEP, TORCHRUN, run, running
from tiny_checkpoints import write_tiny_checkpoint

from launch.exit_codes import ExitCode

pytestmark = pytest.mark.long(22)

START_S = 90.0


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.sweep)])
def test_a_batch_survives_a_restart_of_all_ranks(tmp_path: Path, victim: int) -> None:
    """Rank 0 takes its front side with it, and the next rank 0 starts another."""
    model = write_tiny_checkpoint(tmp_path / "model", "llama", max_position_embeddings=1024)
    lines = [{"prompt": f"{number}", "max_tokens": 150, "ignore_eos": True, "temperature": 0} for number in range(9)]
    lines[0]["max_tokens"] = 1
    (tmp_path / "input.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = ("--model", str(model), "--input", str(tmp_path / "input.jsonl"), "--max-num-seqs", "4")
    command = ("generate", *options, "--tp", "2", "--threads-per-rank", "1")
    alone = run(*LOCKSTEP, *command)
    assert alone.returncode == ExitCode.OK
    agent = (*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "-m", "launch")
    with running(*agent, *command) as started:
        started.wait_for_output('"line-1"', START_S)
        before = started.ranks()[victim]
        before.send_signal(signal.SIGKILL)
        outcome = started.wait(2 * START_S)
        started.check_nothing_left()
    assert outcome.returncode == ExitCode.OK, outcome.stderr
    # What the first attempt wrote comes before, perhaps up to half a line.
    assert list(map(json.loads, outcome.stdout.removesuffix("\n").split("\n")[-9:])) == alone.records()
