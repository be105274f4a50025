"""After a recovery the ranks are what they were: what was measured, read and made holds, and little is done again."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from tiny_checkpoints import write_tiny_checkpoint

from launch.environment import RUN_FOLDER
from launch.front.engine_process import StartedEngine, wait_until_ready
from launch.options import EngineOptions
from runtime.messages import EngineReady

START_S = 90.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path, "qwen3")


@pytest.fixture
def engine(folder: Path) -> Iterator[StartedEngine]:
    options = EngineOptions(model=folder, tp=1, pp=2, max_recoveries=3)
    argv = ["generate", "--model", str(folder), "--pp", "2", "--max-recoveries", "3", "x"]
    started = StartedEngine(options, argv)
    try:
        yield started
    finally:
        started.stop()


def ranks_of(agent: psutil.Process) -> list[psutil.Process]:
    """Returns the ranks' processes in order."""
    found = {}
    for process in agent.children(recursive=True):
        if process.name().startswith("lockstep r"):
            found[int(process.name().removeprefix("lockstep r"))] = process
    return [process for _, process in sorted(found.items())]


def told(ready: EngineReady) -> dict[str, object]:
    """Returns what the leader said, but for its epoch."""
    return {name: value for name, value in msgspec.structs.asdict(ready).items() if name != "epoch"}


def weight_mappings(process: psutil.Process) -> list[str]:
    lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    return sorted({line.split()[1] for line in lines if "memfd:lockstep-weights" in line})


def test_the_next_ranks_are_as_the_first(engine: StartedEngine, folder: Path) -> None:
    first = wait_until_ready(engine, START_S)
    agent = next(one for one in psutil.Process().children() if one.environ().get(RUN_FOLDER))
    assert "products" in first.compute, "it was measured, and the figures are told"
    before = ranks_of(agent)
    # From now on nothing of the model is there but what is in memory.
    for path in folder.iterdir():
        path.unlink()
    for victim in (1, 0):
        ranks_of(agent)[victim].send_signal(signal.SIGKILL)
        again = wait_until_ready(engine, START_S)
        assert told(again) == told(first), "not measured again"
        after = ranks_of(agent)
        assert {one.pid for one in after}.isdisjoint({one.pid for one in before})
        # Private: a write would stay in the process.
        assert [weight_mappings(one) for one in after] == [["rw-p"]] * 2
    assert [report.epoch for report in engine.faults_at_start] == [0, 1]
