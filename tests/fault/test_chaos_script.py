"""``lockstep chaos --script`` on a real program under torchrun: faults happen, and what becomes of the run is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import LOCKSTEP, ROOT, run

from launch.exit_codes import ExitCode

CALL = "all_reduce@default/r1/inside/middle"
ENVIRON = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
BASE = (*LOCKSTEP, "chaos", "--script", "faulted_script:main", "--matrix", "full")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_cells(tmp_path_factory.mktemp("chaos") / "report.json", "raise", "corrupt")


@pytest.fixture(scope="module")
def slow_report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_cells(tmp_path_factory.mktemp("chaos") / "report.json", "slow", "stop")


def run_cells(path: Path, *faults: str) -> dict[str, Any]:
    """Returns the report of one cell for each fault."""
    only = [word for fault in faults for word in ("--only", f"{fault}/{CALL}")]
    outcome = run(*BASE, "--limit", "28", "--json", str(path), *only, environ=ENVIRON, timeout_s=280)
    assert outcome.returncode == ExitCode.CHAOS_FAILED, outcome.stderr
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def cell(report: dict[str, Any], fault: str) -> dict[str, Any]:
    (found,) = [it for it in report["cells"] if it["name"] == f"{fault}/{CALL}"]
    assert isinstance(found, dict)
    return found


def test_every_fault_happened_where_it_was_to(report: dict[str, Any]) -> None:
    assert len(report["cells"]) == 2
    for it in report["cells"]:
        fired = it["outcome"]["fired"]
        assert (fired["rank"], fired["where"]) == (1, "inside all_reduce@default #3")


def test_an_undisturbed_run_is_what_others_are_compared_with(report: dict[str, Any]) -> None:
    results = {end["result"] for end in report["undisturbed"]["ranks"]}
    assert len(results) == 1
    assert report["calls"]["0"]["all_reduce@default"] == 4


def test_a_rank_that_ends_ends_the_run(report: dict[str, Any]) -> None:
    found = cell(report, "raise")
    assert found["verdict"] == "ended"
    assert found["outcome"]["exit_code"] == 1
    assert len(found["left_s"]) == 1
    assert found["left_s"][0] < 28


def test_what_a_victim_raised_is_known(report: dict[str, Any]) -> None:
    victim = cell(report, "raise")["outcome"]["ranks"][1]
    assert victim["error"] == "InjectedError: injected: the program raises"


def test_corruption_is_found_in_the_results_alone(report: dict[str, Any]) -> None:
    found = cell(report, "corrupt")
    assert found["verdict"] == "wrong"
    assert found["told"] is None


@pytest.mark.sweep
def test_a_slow_call_harms_nothing(slow_report: dict[str, Any]) -> None:
    assert cell(slow_report, "slow")["verdict"] == "unharmed"


@pytest.mark.sweep
def test_a_stopped_rank_is_waited_for(slow_report: dict[str, Any]) -> None:
    """The survivor leaves at the script's own time-out of 8 s; torchrun waits far longer for the stopped rank."""
    found = cell(slow_report, "stop")
    assert found["verdict"] == "hung"
    assert found["outcome"]["ranks"][1]["how"] == "waiting"
    (left,) = found["left_s"]
    assert 7 < left < 28
    assert any("time" in text.lower() for text in slow_report["texts"])


def test_sums(report: dict[str, Any]) -> None:
    assert sum(report["verdicts"].values()) == 2
    assert report["blamed"]["of"] >= 1


def test_a_script_that_fails_by_itself_is_told(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def main() -> None:\n    raise ValueError('no such thing')\n")
    command = (*LOCKSTEP, "chaos", "--script", "broken:main")
    outcome = run(*command, environ={"PYTHONPATH": f"{ROOT}:{tmp_path}"})
    assert outcome.returncode == ExitCode.INTERNAL
    assert outcome.message == "lockstep: broken:main fails without a fault: ValueError: no such thing"


def test_wrong_usage() -> None:
    outcome = run(*LOCKSTEP, "chaos", "--script", "no function")
    assert outcome.returncode == ExitCode.USAGE
    assert "--script is 'no function'" in outcome.message
