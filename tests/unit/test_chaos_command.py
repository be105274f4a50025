"""The command that runs an engine's cells, with runs made up: order, words on stderr, files, exit code."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from launch.chaos.engine import command as module
from launch.chaos.engine.outcome import EngineOutcome, EpochSeen, FrontOutcome, RequestEnd
from launch.chaos.engine.plan import REQUESTS, FrontPlan
from launch.chaos.error import ChaosError
from launch.chaos.processes import Leftovers
from launch.chaos.record import Fired
from launch.commands import ChaosCommand
from launch.exit_codes import ExitCode
from launch.node.rank_processes import Terminated, raise_on_signals

COMMAND = ChaosCommand(
    script=None,
    ranks=2,
    model=None,
    tp=2,
    pp=2,
    matrix="quick",
    only=("kill/*", "exit/*", "none/*"),
    repeat=2,
    seed=0,
    limit_s=20.0,
    start_limit_s=120.0,
    group_timeout_s=None,
    json_file=None,
    plot_file=None,
    list_only=False,
    nccl_shim=False,
    jobs=2,
)


class MadeUpRuns:
    """Runs that take no engine: ranks are killed and recover; the first of a repeat takes longest."""

    def __init__(self, *, leaves: str = "", finish_reason: str | None = "length", signal_at: str = "") -> None:
        self.leaves = leaves
        self.signal_at = signal_at
        self.finish_reason = finish_reason
        self.most = 0
        self._now = 0
        self._lock = threading.Lock()

    def __call__(self, plan: FrontPlan, _path: Path, _limit_s: float) -> EngineOutcome:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        action = "none" if plan.scenario is None else plan.scenario.action
        if plan.scenario is not None and action == self.signal_at:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
        time.sleep(0.2 if action == "kill" else 0.05)
        with self._lock:
            self._now -= 1
        return self._outcome(plan, action)

    def _outcome(self, plan: FrontPlan, action: str) -> EngineOutcome:
        is_calm = action == "none"
        ends = [
            RequestEnd(
                name=name,
                token_ids=[1, 2],
                times_s=[9.0, 10.5],
                text="ab",
                finish_reason=self.finish_reason,
                error="",
            )
            for name in REQUESTS
        ]
        rank = None if plan.scenario is None else plan.scenario.victim_rank(2, 2)
        front = FrontOutcome(
            epochs=[EpochSeen(epoch=epoch, ready_s=1.0 + 9.2 * epoch) for epoch in range(1 if is_calm else 2)],
            requests=ends,
            failure="",
            failed_s=None,
            blamed=[] if rank is None else [[rank]],
            seen_s=[] if is_calm else [10.05],
            tokens=[] if is_calm else [6],
            answers_after=True,
            closed_in_s=0.1,
        )
        fired = [] if is_calm else [Fired(action=action, rank=rank or 0, where="inside all_reduce@0,1 #1", t_s=10.0)]
        left = Leftovers(
            processes=[], files=[self.leaves] if action == "exit" and self.leaves else [], shared_memory=[]
        )
        return EngineOutcome(
            front=front, fired=fired, exit_code=0, gone_s=12.0, left=left, load=2.0, wall_s=3.0, said=""
        )


def run_with(runs: MadeUpRuns, monkeypatch: pytest.MonkeyPatch, command: ChaosCommand) -> ExitCode:
    monkeypatch.setattr(module, "run_engine", runs)
    return module.run_engine_chaos(command)


def test_cells_run_side_by_side_and_are_told_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs = MadeUpRuns()
    command = msgspec.structs.replace(COMMAND, json_file=tmp_path / "a.json", plot_file=tmp_path / "a.svg")
    assert run_with(runs, monkeypatch, command) == ExitCode.OK
    assert runs.most == 2
    document = json.loads((tmp_path / "a.json").read_text())
    assert [cell["scenario"]["action"] for cell in document["cells"]] == ["kill", "exit", "none"] * 2
    assert document["by_kind"]["kill"]["recovered"] == {"count": 2, "p50": 0.5, "p90": 0.5, "most": 0.5}
    assert document["by_kind"]["none"] == {"noticed": None, "recovered": None}
    assert sum(document["finished"].values()) == 4 * len(REQUESTS)
    assert document["texts_that_differ"] == {"default": 0, "invariant": 0}
    assert (tmp_path / "a.svg").read_text().startswith("<svg ")


def test_what_broke_is_said_at_once_and_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = msgspec.structs.replace(COMMAND, repeat=1)
    assert run_with(MadeUpRuns(leaves="socket"), monkeypatch, command) == ExitCode.CHAOS_FAILED
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert line.startswith("lockstep: exit/")
    assert line.endswith(": L: left: socket")
    assert "2 of 3 cells kept what is promised of them" in said.out


def test_an_engine_that_fails_by_itself_is_put_to_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ChaosError, match="the engine fails without a fault: no word of why"):
        run_with(MadeUpRuns(finish_reason=None), monkeypatch, COMMAND)


@pytest.mark.parametrize(("signal_at", "finished"), [("none", ["kill", "exit"]), ("kill", ["exit", "none"])])
def test_a_signal_loses_no_cell_that_was_finished(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    signal_at: str,
    finished: list[str],
) -> None:
    """Whoever ends it, as a scheduler does whose time is over, has what was run until then."""
    command = msgspec.structs.replace(COMMAND, repeat=1, jobs=1, json_file=tmp_path / "a.json")
    if signal_at == "kill":
        # Two that come behind it are finished before it.
        command = msgspec.structs.replace(command, jobs=2)
    with terminated_by_signals(), pytest.raises(Terminated):
        run_with(MadeUpRuns(signal_at=signal_at), monkeypatch, command)
    document = json.loads((tmp_path / "a.json").read_text())
    assert document["is_cut"] is True
    assert [cell["scenario"]["action"] for cell in document["cells"]] == finished
    assert "the run was ended before all cells were run" in capsys.readouterr().out


@contextmanager
def terminated_by_signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    raise_on_signals()
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
