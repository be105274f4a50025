from __future__ import annotations

import re
import time
from contextlib import suppress

import pytest
from hypothesis import assume, example, given, settings
from regular_cases import asserting_patterns, plain_patterns, texts

from grammar_sync.regular.chars import RegularError
from grammar_sync.regular.language import pattern, whole_regex

# Texts on which ECMA-262 and Python read a pattern alike, and texts on which they may not.
COMMON, DIFFERING = "ab-1", "ab\né٣\u2028\u00a0\x1c"


@settings(deadline=None, max_examples=60)
@given(asserting_patterns(), texts(COMMON))
@example("a^b", "ab")
@example("^a|b$", "xb")
@example("(?:^a|b)1", "1b1")
@example("ab$1", "ab1")
@example("(?:(?!b).)*$", "a1")
def test_search_agrees_with_re(expression: str, text: str) -> None:
    assume(text or r"\B" not in expression)  # in the empty string, \B is found by ECMA-262 and not by Python
    found = bool(re.search(expression, text))
    assert pattern(expression).fullmatch(text) == found
    assert pattern(expression, wide=True).fullmatch(text) == found


@settings(deadline=None, max_examples=60)
@given(asserting_patterns(), texts(DIFFERING))
@example("a$", "a\n")
@example("(?!a$)a", "a\n")
@example(r"\W", "é")
@example(r"\bé", "é")
def test_narrow_and_wide_readings_enclose_re(expression: str, text: str) -> None:
    found = bool(re.search(expression, text))
    assert found or not pattern(expression).fullmatch(text)
    assert not found or pattern(expression, wide=True).fullmatch(text)


@settings(deadline=None, max_examples=60)
@given(asserting_patterns(), texts(COMMON))
def test_whole_regex_agrees_with_re(expression: str, text: str) -> None:
    assert whole_regex(expression).fullmatch(text) == bool(re.fullmatch(expression, text))


@settings(deadline=None, max_examples=60)
@given(plain_patterns(), texts(DIFFERING))
def test_readings_differ_only_where_dialects_do(expression: str, text: str) -> None:
    narrow, wide = pattern(expression), pattern(expression, wide=True)
    assert narrow.is_subset(wide)


@pytest.mark.parametrize(
    ("expression", "yes", "no"),
    [
        (r"^\u{1F432}$", "🐲", "a"),
        (r"^\ud83d\udc32$", "🐲", "a"),
        (r"^\p{Lu}\P{L}$", "É1", "é1"),
        (r"^\cJ$", "\n", "J"),
        (r"^[\b]$", "\b", "b"),
        (r"^\/\.\-\0$", "/.-\0", "/.-0"),
        ("^(?<year>[0-9]{4})$", "2024", "24"),
        ("^a{,}$", "a{,}", "aaa"),
        ("^[]-a]$".replace("[]", r"[\]"), "^", "b"),
        ("^.$", "a", "\u2028"),
        (r"^\s$", "\u00a0", "\ufeff"),
        ("^[a-]$", "-", "b"),
        ("^(?!.*(?!a)b)", "xy", "xb"),
    ],
)
def test_spellings(expression: str, yes: str, no: str) -> None:
    language = pattern(expression)
    assert language.fullmatch(yes)
    assert not language.fullmatch(no)


@pytest.mark.parametrize(
    ("expression", "position"),
    [
        ("a(b", 1),
        ("ab)", 2),
        ("[a", 0),
        ("x[]", 1),
        ("[^]", 0),
        ("[b-a]", 1),
        ("*a", 0),
        ("a**", 2),
        ("a++", 2),
        ("a{3,2}", 1),
        ("a{,2}", 1),
        (r"(a)\1", 3),
        (r"\k<n>", 0),
        ("(?i)a", 0),
        ("(?P<n>a)", 0),
        (r"\ud800", 0),
        ("a\ud800", 1),
        ("[\udfff]", 1),
        (r"\p{Greek}", 0),
        (r"\q", 0),
        ("a\\", 2),
        (r"\x4", 0),
        (r"\u{110000}", 0),
        ("^*", 1),
        (r"[\1]", 1),
        (r"[a-\d]", 1),
    ],
)
def test_refusals_tell_the_position(expression: str, position: int) -> None:
    with pytest.raises(RegularError) as failure:
        pattern(expression)
    assert failure.value.position == position
    assert str(failure.value).endswith(f"at position {position}")


@pytest.mark.parametrize("expression", [r"(?<=a$)", r"(?<=a(?=b))", r"(?=.*(?<=a))", r"(?=\b)"])
def test_lookaround_that_is_too_involved_is_refused(expression: str) -> None:
    with pytest.raises(RegularError, match="inside a look"):
        pattern(expression).automaton()


HOSTILE = {
    "product of counts": "([a-z]{1,1000}){1,1000}",
    "three levels of counts": "(([a-z]{1,100}){1,100}){1,100}",
    "counts with gaps": "([a-z]{2,900} ?){2,900}",
    "long alternation": "|".join(f"word{number}" for number in range(100_000)),
    "shorter alternation": "|".join(f"w{number}" for number in range(5_000)),
    "parentheses": "(" * 10_000 + ")" * 10_000,
    "nested stars": "(" * 50 + "a" + ")*" * 50,
    "exponential automaton": "^(a|b)*a(a|b){30}$",
    "lookaheads": "^" + "".join(f"(?=.*{letter}.{{9}}b)" for letter in "abcdefghijkl"),
    "optional chain": "a?" * 5_000 + "b",
    "ambiguous counts": "^([a-z]+ ?){1,300}$",
    "wide classes": r"\w{1,50}\W{1,50}\d{1,50}\D\p{L}{1,20}\p{N}",
    "lookbehinds": "(?<=a.{12})b" * 12,
    "huge count": "a{999999999}",
    "NUL": "^\0+$",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_patterns_end_soon(name: str) -> None:
    start = time.process_time()
    with suppress(RegularError):
        language = pattern(HOSTILE[name])
        language.automaton()
        language.to_ebnf("root")
    assert time.process_time() - start < 2.5  # the aim is one second; a loaded machine counts more
