"""``lockstep chaos --script``: which cells there are, and what a run's end is called."""

from __future__ import annotations

import msgspec
import pytest

from launch.chaos.faults import BY_ACTION, FAULTS, Injection
from launch.chaos.figures import Percentiles, Score
from launch.chaos.pairwise import allowed_combinations, pairs_of
from launch.chaos.record import Fired
from launch.chaos.script.cells import script_axes, script_cells, script_rules
from launch.chaos.script.outcome import RankEnd, ScriptOutcome, judged, names_rank, verdict_of
from launch.chaos.script.report import plain_text

CALLS = {
    0: {"all_reduce@default": 9, "barrier@default": 1, "send:3@0,1": 4, "broadcast@0,1": 2},
    1: {"all_reduce@default": 9, "barrier@default": 1, "recv:3@0,1": 4, "broadcast@0,1": 2},
    2: {"all_reduce@default": 9, "barrier@default": 1},
}
WELL = [RankEnd(rank=rank, how="returned", after_s=1.0, result="4.0") for rank in range(3)]
FIRED = Fired(action="kill", rank=1, where="inside all_reduce@default #5", t_s=5.0)
UNDISTURBED = ScriptOutcome(fired=None, exit_code=0, ended_s=None, blamed=None, ranks=WELL, wall_s=9.0)
DISTURBED = msgspec.structs.replace(UNDISTURBED, fired=FIRED, ended_s=2.0)


def test_quick_has_every_fault_of_a_call_once_at_different_calls() -> None:
    cells = script_cells(CALLS, "quick")
    assert [cell.injection.action for cell in cells] == [fault.action for fault in FAULTS if fault.reach != "around"]
    assert len({cell.injection.call for cell in cells}) >= 4


def test_pairwise_meets_every_pair_that_can_be() -> None:
    allowed = allowed_combinations(script_axes(CALLS), script_rules(CALLS))
    names = {cell.name for cell in script_cells(CALLS, "pairwise")}
    met = {
        pair
        for action, call, victim, place, moment in allowed
        if f"{action}/{call}/r{victim}/{place}/{moment}" in names
        for pair in pairs_of((action, call, victim, place, moment))
    }
    assert met == {pair for it in allowed for pair in pairs_of(it)}
    assert len(names) < len(allowed) / 3


def test_every_cell_can_happen() -> None:
    """The call is one that the victim makes, and often enough."""
    cells = script_cells(CALLS, "full")
    assert len({cell.name for cell in cells}) == len(cells) > 300
    for _, it in cells:
        name = f"{it.call}@{it.group}" if it.tag is None else f"{it.call}:{it.tag}@{it.group}"
        assert 0 <= it.number < CALLS[it.rank][name]
        if BY_ACTION[it.action].reach == "call":
            assert it.place == "inside"
        if it.action == "cut":
            assert it.peer not in (None, it.rank)
        if it.action in ("corrupt", "wrong_size", "wrong_dtype"):
            assert it.call != "barrier"


def test_only_chooses_by_name() -> None:
    names = [cell.name for cell in script_cells(CALLS, "full", only=("kill/all_reduce@*/r1/*/last", "none/*"))]
    assert names == [f"kill/all_reduce@default/r1/{place}/last" for place in ("before", "inside", "after")]


def test_an_injection_travels() -> None:
    for cell in script_cells(CALLS, "full"):
        assert msgspec.json.decode(msgspec.json.encode(cell.injection), type=Injection) == cell.injection


@pytest.mark.parametrize(
    ("outcome", "verdict"),
    [
        (msgspec.structs.replace(DISTURBED, fired=None), "missed"),
        (msgspec.structs.replace(DISTURBED, exit_code=None), "hung"),
        (msgspec.structs.replace(DISTURBED, exit_code=1), "ended"),
        (DISTURBED, "unharmed"),
        (
            msgspec.structs.replace(DISTURBED, ranks=[msgspec.structs.replace(WELL[0], result="5.0"), *WELL[1:]]),
            "wrong",
        ),
        (
            msgspec.structs.replace(DISTURBED, ranks=[WELL[0], RankEnd(rank=1, how="gone", after_s=0.0), WELL[2]]),
            "unnoticed",
        ),
    ],
)
def test_what_became_of_a_run(outcome: ScriptOutcome, verdict: str) -> None:
    assert verdict_of(outcome, UNDISTURBED) == verdict


def test_a_judged_cell_tells_of_survivors_only() -> None:
    ends = [
        RankEnd(rank=0, how="raised", after_s=0.25, error="RuntimeError: rank 1 is gone"),
        RankEnd(rank=1, how="gone", after_s=0.0),
        RankEnd(rank=2, how="waiting", after_s=None, where="all_reduce@default #5"),
    ]
    outcome = msgspec.structs.replace(DISTURBED, exit_code=1, ranks=ends, blamed=0)
    injection = Injection(action="kill", rank=1)
    report = judged("kill", injection, outcome, UNDISTURBED)
    assert (report.verdict, report.row, report.victim, report.left_s) == ("ended", "K1", 1, [0.25])
    assert report.told is True
    assert report.blamed_right is False
    quiet = msgspec.structs.replace(outcome, ranks=[ends[2], ends[1], ends[2]], blamed=None)
    report = judged("kill", injection, quiet, UNDISTURBED)
    assert (report.told, report.blamed_right, report.left_s) == (None, None, [])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("RuntimeError: rank 1 did not answer", True),
        ("RuntimeError: [Rank 0]: Ranks 0, 1 failed to pass monitoredBarrier in 3000 ms", True),
        ("[Rank 1]: Rank 0 failed", False),
        ("RuntimeError: [Rank 1]: Ranks 2 failed to pass monitoredBarrier", False),
        ("rank 11 is gone", False),
        ("Connection closed by peer [127.0.0.1]:1", False),
        ("rank: 1", True),
    ],
)
def test_whether_a_text_names_a_rank(text: str, named: bool) -> None:
    assert names_rank(text, 1) is named


def test_texts_are_alike_whatever_ports_and_paths_they_name() -> None:
    one = "RuntimeError: [/build/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:51841. more"
    other = "RuntimeError: [/src/gloo/transport/tcp/pair.cc:501] Connection closed by peer [10.0.0.2]:7. more"
    assert plain_text(one) == plain_text(other) == "RuntimeError:  Connection closed by peer [ADDRESS]. more"


def test_figures() -> None:
    assert Percentiles.of([]) is None
    figures = Percentiles.of([float(number) for number in range(11)])
    assert figures == Percentiles(count=11, p50=5.0, p90=9.0, most=10.0)
    assert Score.count([True, None, False, True]).sentence() == "2 of 3"
