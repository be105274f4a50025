"""Pairwise matrices: every pair that may meet does, nothing impossible is chosen, the same seed chooses alike."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from launch.chaos.pairwise import Combination, Rule, allowed_combinations, pairs_of, pairwise

AXES = st.dictionaries(
    st.sampled_from(["a", "b", "c", "d"]),
    st.lists(st.sampled_from("uvwxyz"), min_size=1, max_size=4, unique=True),
    min_size=1,
    max_size=4,
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, list[str]], dict[str, Rule]]:
    """Returns axes, and rules that exclude pairs of values."""
    axes = draw(AXES)
    values = [(name, value) for name, own in axes.items() for value in own]
    bad = draw(st.lists(st.tuples(st.sampled_from(values), st.sampled_from(values)), max_size=4))

    def rule(one: tuple[str, str], other: tuple[str, str]) -> Rule:
        return lambda cell: cell[one[0]] == one[1] and cell[other[0]] == other[1]

    return axes, {f"rule {number}": rule(*pair) for number, pair in enumerate(bad)}


@settings(deadline=None, max_examples=200)
@given(case=cases(), seed=st.integers(0, 5))
def test_every_allowed_pair_is_met_and_nothing_else(
    case: tuple[dict[str, list[str]], dict[str, Rule]], seed: int
) -> None:
    axes, rules = case
    allowed = allowed_combinations(axes, rules)
    chosen = pairwise(allowed, seed)
    assert set(chosen) <= set(allowed)
    assert len(set(chosen)) == len(chosen)
    assert {pair for it in chosen for pair in pairs_of(it)} == {pair for it in allowed for pair in pairs_of(it)}
    assert chosen == pairwise(allowed, seed)


def test_it_is_much_less_than_everything() -> None:
    axes = {str(axis): [str(value) for value in range(6)] for axis in range(4)}
    everything = allowed_combinations(axes, {})
    assert len(everything) == 6**4
    assert 36 <= len(pairwise(everything)) <= 60


def test_a_rule_sees_values_by_their_axes() -> None:
    seen: list[Mapping[str, str]] = []

    def rule(cell: Mapping[str, str]) -> bool:
        seen.append(dict(cell))
        return cell["one"] == "b"

    allowed: list[Combination] = allowed_combinations({"one": "ab", "two": "xy"}, {"no b": rule})
    assert allowed == [("a", "x"), ("a", "y")]
    assert seen == [{"one": "a"}, {"one": "b"}], "asked as early as it can answer"
