"""The matrix of the engine's faults: enough cells, none impossible, every pair of properties, all of it data."""

from __future__ import annotations

import msgspec
import pytest

from launch.chaos.engine.axes import AXES, OPERATIONS, RANK_ROLES, RULES, engine_axes
from launch.chaos.engine.scenario import Scenario, engine_scenarios
from launch.chaos.faults import BY_ACTION, FAULTS
from launch.chaos.pairwise import allowed_combinations, pairs_of

PAIRWISE = engine_scenarios("pairwise")
FULL = engine_scenarios("full")


def as_tuple(scenario: Scenario) -> tuple[str, ...]:
    return tuple(getattr(scenario, axis) for axis in AXES)


def test_pairwise_has_at_least_150_cells_and_every_pair_that_can_be() -> None:
    met = {pair for scenario in PAIRWISE for pair in pairs_of(as_tuple(scenario))}
    assert met == {pair for scenario in FULL for pair in pairs_of(as_tuple(scenario))}
    assert 150 <= len(PAIRWISE) < len(FULL) / 20
    assert len({scenario.name for scenario in PAIRWISE}) == len(PAIRWISE)
    assert engine_scenarios("pairwise") == PAIRWISE
    assert engine_scenarios("pairwise", seed=1) != PAIRWISE


def test_every_value_of_every_axis_is_used() -> None:
    for axis, values in engine_axes().items():
        assert {getattr(scenario, axis) for scenario in PAIRWISE} == set(values)


def test_every_rule_excludes_something_that_no_other_does() -> None:
    for name in RULES:
        others = {other: rule for other, rule in RULES.items() if other != name}
        assert len(allowed_combinations(engine_axes(), others)) > len(FULL), name


def test_quick_has_every_fault_once() -> None:
    assert [scenario.action for scenario in engine_scenarios("quick")] == [it.action for it in FAULTS]


def test_a_scenario_travels() -> None:
    for scenario in PAIRWISE:
        assert msgspec.json.decode(msgspec.json.encode(scenario), type=Scenario) == scenario


def test_a_fault_at_a_call_is_one_injection_at_a_group_that_has_the_victim() -> None:
    for scenario in FULL:
        injections = scenario.injections(2, 2)
        expected = (scenario.moment == "recovery") + (not scenario.is_from_outside)
        assert len(injections) == expected, scenario.name
        for it in injections:
            if it.group != "*":
                assert it.rank in map(int, it.group.split(","))
            if it.action == "cut":
                assert it.peer is not None
                assert it.group == "*" or it.peer in map(int, it.group.split(","))
        if scenario.moment == "recovery":
            assert injections[0].rank != scenario.victim_rank(2, 2)
            assert [it.epoch for it in injections[1:]] == [1] * len(injections[1:])


@pytest.mark.parametrize(
    ("operation", "victim", "call", "group", "tag"),
    [
        ("intake", "first", "broadcast", "0,1", None),
        ("relay", "leader", "send", "0,2", 1),
        ("relay", "last", "recv", "1,3", 1),
        ("tokens", "source", "broadcast", "2,3", None),
        ("tokens_sent", "source", "send", "0,2", 5),
        ("tokens_sent", "leader", "recv", "0,2", 5),
        ("all_reduce", "last", "all_reduce", "2,3", None),
        ("warm_up", "first", "*", "*", None),
    ],
)
def test_what_an_operation_is_to_the_backend(
    operation: str, victim: str, call: str, group: str, tag: int | None
) -> None:
    moment = "init" if operation == "warm_up" else "decode"
    scenario = Scenario(
        action="kill", operation=operation, victim=victim, place="before", moment=moment, mode="end", numerics="default"
    )
    (it,) = scenario.injections(2, 2)
    assert (it.call, it.group, it.tag, it.number, it.epoch) == (call, group, tag, 0, 0)


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 1)])
def test_smaller_engines_have_smaller_matrices(tp: int, pp: int) -> None:
    scenarios = engine_scenarios("full", tp=tp, pp=pp)
    assert scenarios
    for scenario in scenarios:
        if scenario.victim in RANK_ROLES:
            assert scenario.victim_rank(tp, pp) in range(tp * pp)
        if not scenario.is_from_outside:
            assert OPERATIONS[scenario.operation].group not in (("tp",) if tp == 1 else ("pp",))
    ranks = {scenario.victim_rank(tp, pp) for scenario in scenarios if scenario.victim in RANK_ROLES}
    assert ranks == {0, 1}


def test_names_choose() -> None:
    names = [scenario.name for scenario in engine_scenarios("full", only=("kill/none/*",))]
    assert names
    assert all(name.startswith("kill/none/") for name in names)


def test_corruption_that_all_ranks_share_is_a_row_of_its_own() -> None:
    rows = {scenario.operation: scenario.row for scenario in FULL if scenario.action == "corrupt"}
    assert rows["all_reduce"] == rows["sample"] == "K8"
    assert BY_ACTION["corrupt"].row == "K7"
