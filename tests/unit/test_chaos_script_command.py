"""``lockstep chaos --script`` with runs made up: what was finished when a signal came is reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.chaos.faults import Injection
from launch.chaos.record import Fired
from launch.chaos.script import command as module
from launch.chaos.script.outcome import RankEnd, ScriptOutcome
from launch.chaos.script.run import ScriptRun
from launch.chaos.script.words import LastWord
from launch.commands import ChaosCommand
from launch.exit_codes import ExitCode
from launch.front.exit import exit_code_of
from launch.node.rank_processes import Interrupted, Terminated

CALLS = {"all_reduce@default": 3}


class MadeUpRuns:
    """Runs of two ranks, of which the victim's end is the other's; ``ends_at`` comes instead of the third fault."""

    def __init__(self, ends_at: BaseException) -> None:
        self._ends_at = ends_at
        self._faults = 0

    def __call__(
        self, _run: ScriptRun, _path: Path, injection: Injection | None
    ) -> tuple[ScriptOutcome, dict[int, LastWord]]:
        if injection is not None:
            self._faults += 1
            if self._faults == 3:
                raise self._ends_at
        fired = None if injection is None else Fired(action=injection.action, rank=injection.rank, where="", t_s=1.0)
        ends = [RankEnd(rank=rank, how="returned", after_s=2.0, result="1") for rank in range(2)]
        words = {rank: LastWord(rank=rank, how="returned", t_s=2.0, result="1", calls=CALLS) for rank in range(2)}
        outcome = ScriptOutcome(
            fired=fired, exit_code=0 if injection is None else 1, ended_s=1.0, blamed=None, ranks=ends, wall_s=3.0
        )
        return outcome, words


@pytest.mark.parametrize(("came", "code"), [(Interrupted(), ExitCode.INTERRUPTED), (Terminated(), ExitCode.TERMINATED)])
def test_a_signal_loses_no_cell_that_was_finished(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    came: BaseException,
    code: ExitCode,
) -> None:
    monkeypatch.setattr(module, "run_script", MadeUpRuns(came))
    command = ChaosCommand(
        script="m:f",
        ranks=2,
        model=None,
        tp=2,
        pp=2,
        matrix="quick",
        only=(),
        repeat=1,
        seed=0,
        limit_s=20.0,
        start_limit_s=120.0,
        group_timeout_s=None,
        json_file=tmp_path / "a.json",
        plot_file=None,
        list_only=False,
        nccl_shim=False,
        jobs=None,
    )
    assert exit_code_of(lambda: module.run_script_chaos(command)) == code
    document = json.loads((tmp_path / "a.json").read_text())
    assert document["is_cut"] is True
    assert [cell["verdict"] for cell in document["cells"]] == ["ended", "ended"]
    assert "the run was ended before all cells were run" in capsys.readouterr().out
