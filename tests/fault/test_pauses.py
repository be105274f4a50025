"""What a lost rank costs: the pause after SIGKILL and SIGSTOP of each rank, texts that differ, and a torchrun restart.

``scripts/test -m sweep tests/fault/test_pauses.py`` prints the figures.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from command_line import LOCKSTEP, TORCHRUN, run, running, wait_until

from launch.chaos.engine.axes import RANK_ROLES
from launch.chaos.engine.tiny_model import write_tiny_model
from launch.exit_codes import ExitCode

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(1800)]

CELLS = [f"{kind}/none/{role}/*/decode/refork/*" for kind in ("kill", "stop") for role in RANK_ROLES]
PAUSE_S = 1.0
STALL_S = 3.0
RESTART_S = 120.0


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("pauses") / "report.json"
    only = [word for name in CELLS for word in ("--only", name)]
    command = (*LOCKSTEP, "chaos", "--matrix", "full", "--jobs", "1", "--json", str(path), *only)
    outcome = run(*command, timeout_s=1500, executed=True)
    assert outcome.returncode in (ExitCode.OK, ExitCode.CHAOS_FAILED), outcome.stderr
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def restart_s(folder: Path) -> float:
    """Returns how long it is from SIGKILL of a rank until torchrun's next ranks have a first token."""
    lines = [{"prompt": f"{at}", "max_tokens": 150, "ignore_eos": True, "temperature": 0} for at in range(9)]
    lines[0]["max_tokens"] = 1
    (folder / "input.jsonl").write_text("\n".join(map(json.dumps, lines)))
    model = write_tiny_model(folder / "model")
    options = ("--model", str(model), "--input", str(folder / "input.jsonl"), "--tp", "2", "--pp", "2")
    agent = (*TORCHRUN, "--standalone", "--nproc-per-node", "4", "--max-restarts", "1", "-m", "launch")
    command = (*agent, "generate", *options, "--threads-per-rank", "1", "--max-num-seqs", "4")
    with running(*command, executed=True) as started:
        started.wait_for_output('"line-1"', RESTART_S)
        began_s = time.monotonic()
        started.ranks()[3].send_signal(signal.SIGKILL)
        stdout = started.folder / "stdout"
        wait_until(lambda: stdout.read_text().count('"line-1"') == 2, RESTART_S, "the next attempt's first token")
        seconds = time.monotonic() - began_s
        assert started.wait(RESTART_S).returncode == ExitCode.OK
    return seconds


def test_a_lost_rank_costs_a_pause(report: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = max(1.0, report["load"]["p50"])
    pause = {kind: times["recovered"]["p50"] for kind, times in report["by_kind"].items()}
    restart = restart_s(tmp_path)
    with capsys.disabled():
        print(f"\nload factor of the machine: {load:.1f}; medians over {len(report['cells']) // 2} runs each")
        print(f"SIGKILL: tokens again after {pause['kill']:.2f} s")
        print(f"SIGSTOP: tokens again after {pause['stop']:.2f} s, of which {STALL_S:g} s are the stall limit")
        print(f"torchrun restart, for comparison: {restart:.2f} s, and the batch from its beginning")
        for numerics, count in report["finished"].items():
            print(
                f"texts that differ behind a recovery, {numerics}: {report['texts_that_differ'][numerics]} of {count}"
            )
    assert pause["kill"] <= PAUSE_S * load
    assert pause["stop"] <= STALL_S + PAUSE_S * load
    assert report["texts_that_differ"]["invariant"] == 0
    assert report["finished"]["invariant"] == report["finished"]["default"] > 40
    assert restart > pause["kill"]
    broken = [it["name"] for it in report["cells"] for kept in it["judgement"]["promises"].values() if kept != "kept"]
    assert broken == []
