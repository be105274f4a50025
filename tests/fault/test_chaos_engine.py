"""``lockstep chaos`` on a real engine of TP2 x PP2: faults happen, their promises are kept, nothing is left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import LOCKSTEP, run

from launch.chaos.engine.judge import PROMISES
from launch.exit_codes import ExitCode

pytestmark = pytest.mark.long(20)

CELLS = {
    "kill/tokens/source/inside/decode/refork/invariant": "inside broadcast@2,3",
    "none/none/nobody/inside/decode/end/invariant": None,
}
STOP = {"stop/none/last/inside/decode/end/invariant": "process"}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_cells(tmp_path_factory.mktemp("chaos") / "report.json", CELLS)


@pytest.fixture(scope="module")
def stop_report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_cells(tmp_path_factory.mktemp("chaos") / "report.json", STOP)


def run_cells(path: Path, cells: dict[str, Any]) -> dict[str, Any]:
    """Returns the report of cells, after showing that they kept their promises.

    Those about time (D, B) are for a machine that does nothing else: the command judges them, this test does not.
    """
    only = [word for name in cells for word in ("--only", name)]
    outcome = run(*LOCKSTEP, "chaos", "--matrix", "full", "--json", str(path), *only, timeout_s=280)
    assert outcome.returncode in (ExitCode.OK, ExitCode.CHAOS_FAILED), outcome.stderr
    document: dict[str, Any] = json.loads(path.read_text())
    broken = [(it["name"], *kept) for it in document["cells"] for kept in it["judgement"]["promises"].items()]
    assert [one for one in broken if one[2] != "kept" and one[1] not in "DB"] == [], outcome.stdout
    assert [it["name"] for it in document["cells"]] == list(cells)
    return document


def cell(report: dict[str, Any], fault: str) -> dict[str, Any]:
    (found,) = [it for it in report["cells"] if it["scenario"]["action"] == fault]
    assert isinstance(found, dict)
    return found


def test_every_fault_happened_where_it_was_to(report: dict[str, Any]) -> None:
    for it in report["cells"]:
        wanted = CELLS[it["name"]]
        fired = it["outcome"]["fired"]
        assert [one["where"].startswith(wanted) for one in fired] == ([] if wanted is None else [True])


def test_a_killed_rank_is_named_and_costs_no_request(report: dict[str, Any]) -> None:
    found = cell(report, "kill")
    assert found["judgement"]["promises"].keys() == set("SDARBL")
    assert found["judgement"]["named_exactly"] is True
    assert found["judgement"]["texts_that_differ"] == 0
    front = found["outcome"]["front"]
    assert front["blamed"] == [[2]]
    assert [seen["epoch"] for seen in front["epochs"]] == [0, 1]


@pytest.mark.sweep
def test_a_stopped_rank_is_named_after_the_stall_limit_and_ends_the_run(stop_report: dict[str, Any]) -> None:
    found = cell(stop_report, "stop")
    assert found["outcome"]["front"]["failure"].startswith("rank 3 ")
    assert found["judgement"]["promises"].keys() == set("SDAL")
    assert found["outcome"]["front"]["blamed"] == [[3]]
    assert found["judgement"]["noticed_s"] > 2.5


def test_requests_run_to_their_ends_without_a_fault(report: dict[str, Any]) -> None:
    found = cell(report, "none")
    assert found["judgement"]["promises"] == dict.fromkeys("SLQ", "kept")
    requests = found["outcome"]["front"]["requests"]
    assert len(requests) == 6
    assert all(len(it["token_ids"]) == len(it["times_s"]) > 10 for it in requests)
    assert any(it["name"] == "regex" and set(it["text"]) <= set("abcdef") for it in requests)


def test_sums(report: dict[str, Any]) -> None:
    assert set(report["promises"]) == set(PROMISES)
    assert report["named"] == {"K1": {"right": 1, "of": 1}}
    assert report["load"]["count"] == 2
    assert report["noticed"]["count"] >= 1


def test_names_without_running() -> None:
    outcome = run(*LOCKSTEP, "chaos", "--matrix", "pairwise", "--list")
    assert outcome.returncode == ExitCode.OK
    assert len(outcome.stdout.splitlines()) >= 150
    outcome = run(*LOCKSTEP, "chaos", "--only", "nothing/*")
    assert outcome.returncode == ExitCode.USAGE
    assert outcome.message == "lockstep: --only nothing/*: no cell of the quick matrix has such a name"
