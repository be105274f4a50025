from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from regular_cases import asserting_patterns, plain_patterns, texts

from grammar_sync.regular.chars import RegularError
from grammar_sync.regular.language import Language, not_pattern, pattern, strings, whole_regex, words


@settings(deadline=None, max_examples=25)
@given(asserting_patterns(), asserting_patterns(), texts())
def test_boolean_operations(left: str, right: str, text: str) -> None:
    one, two = pattern(left), pattern(right)
    in_one, in_two = one.fullmatch(text), two.fullmatch(text)
    assert one.intersect(two).fullmatch(text) == (in_one and in_two)
    assert one.union(two).fullmatch(text) == (in_one or in_two)
    assert one.minus(two).fullmatch(text) == (in_one and not in_two)
    assert one.complement().fullmatch(text) == (not in_one)
    assert one.complement().complement().equals(one)
    assert one.intersect(two).complement().equals(one.complement().union(two.complement()))
    assert one.is_subset(two) == one.minus(two).is_empty()
    assert one.is_disjoint(two) == one.intersect(two).is_empty()
    assert not not_pattern(left).fullmatch(text) or not re.search(left, text)


@settings(deadline=None, max_examples=25)
@given(plain_patterns(), st.integers(0, 4), st.one_of(st.none(), st.integers(0, 6)), texts())
@example("a{2}[ab]*-", 1, 4, "aab-")
@example("(?:ab){1,9}1", 4, 6, "ababab1")
@example("(?:a+-?){1,9}", 2, 3, "a-a")
def test_length_bounds(expression: str, minimum: int, maximum: int | None, text: str) -> None:
    language = whole_regex(expression)
    limited = language.with_length(minimum, maximum)
    fits = minimum <= len(text) and (maximum is None or len(text) <= maximum)
    assert limited.fullmatch(text) == (fits and language.fullmatch(text))
    assert limited.equals(language.intersect(strings(minimum, maximum)))
    bounds = limited.lengths()
    if bounds is None:
        assert limited.is_empty()
    else:
        shortest = limited.shortest()
        assert shortest is not None
        assert len(shortest) == bounds[0] >= minimum
        assert maximum is None or (bounds[1] is not None and bounds[1] <= maximum)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.text(st.sampled_from('ab"\\\né🐲'), max_size=4), max_size=6, unique=True), texts())
def test_finite_languages(listed: list[str], text: str) -> None:
    language = words(listed)
    expected = tuple(sorted(listed, key=lambda word: (len(word), word)))
    assert language.enumerate(6) == expected
    assert language.fullmatch(text) == (text in listed)
    if listed:
        assert language.enumerate(len(listed) - 1) is None
        assert language.shortest() == expected[0] or len(expected[0]) == len(language.shortest() or "")


def test_enumeration_is_bounded() -> None:
    assert pattern("^(a|b){3}$").enumerate(8) == ("aaa", "aab", "aba", "abb", "baa", "bab", "bba", "bbb")
    assert pattern("^(a|b){3}$").enumerate(7) is None
    assert pattern("^a*$").enumerate(1000) is None
    assert pattern("^.{60}$").enumerate(1000) is None
    assert pattern("^(a|b){60}$").enumerate(1000) is None


def test_pattern_and_length_without_an_automaton() -> None:
    assert pattern("^[a-z0-9_-]+$").with_length(3, 500).to_regex() == r"[\-0-9_a-z]{3,500}"
    assert pattern("^x-").with_length(0, 65_535).to_regex() == r"x-[\u0000-\ud7ff\ue000-\U0010ffff]{0,65533}"
    assert strings(0, 100_000).to_regex(json_encoded=True).endswith("{0,100000}")
    assert pattern("^[a-z]+$").with_length(0, 0).is_empty()
    assert strings(3, 2).is_empty()


def test_counts_beyond_the_length_cost_nothing() -> None:
    limited = pattern("^([a-z]+ ?){1,100}$").with_length(0, 40)
    assert limited.fullmatch("a b c " * 6 + "d")
    assert not limited.fullmatch("a b c " * 7)
    assert len(limited.automaton().moves) < 100


def test_limits_are_told() -> None:
    with pytest.raises(RegularError, match="length bound beside this pattern"):
        pattern("^([a-z]+-?)*$").with_length(0, 1_000_000)
    with pytest.raises(RegularError, match="repetition counts"):
        strings(0, 10_000_000)
    with pytest.raises(RegularError, match="surrogate"):
        words(["\ud800"])


def test_keys_of_pattern_properties() -> None:
    keys = pattern("^x-").minus(words(["x-a", "x-b"]), pattern("^x-internal-", wide=True))
    assert keys.fullmatch("x-c")
    assert not keys.fullmatch("x-a")
    assert not keys.fullmatch("x-internal-a")
    assert not keys.fullmatch("y")
    assert pattern("^[0-9]$").is_disjoint(pattern("^v", wide=True))


def test_a_language_matches_no_surrogate() -> None:
    assert not strings().fullmatch("\ud800")
    assert not Language(strings().automaton()).complement().fullmatch("a")
