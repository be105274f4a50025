"""Numbers that are constrained: what a grammar takes is valid as a reader of JSON sees it, rounded to a double."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from schema_texts import json_taker

from grammar_sync.engines.prepared import CompileError
from grammar_sync.schema.grammar import schema_grammar
from grammar_sync.schema.productions import Terminal
from grammar_sync.spec import GrammarOptions

TRAPS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        {"type": "number", "exclusiveMaximum": 1, "minimum": 0.5},
        ["0.5", "0.99", "0.99999999999999"],
        ["0.9999999999999999999999999", "1.0", "1"],
    ),
    ({"type": "number", "exclusiveMaximum": 0.3}, ["0.299999999999999", "-7.25", "0"], ["0.29999999999999998", "0.3"]),
    ({"type": "number", "exclusiveMinimum": 0}, ["0.000000000000001", "3", "12345.678"], [f"0.{'0' * 330}1", "0.0"]),
    ({"type": "number", "not": {"type": "integer"}}, ["0.5", "-12345.25"], ["4503599627370496.25", "5.0"]),
    ({"type": "number", "not": {"const": 0.1}}, ["0.2", "0.11", "1"], ["0.1", "0.10", "0.1000000000000000055"]),
    ({"type": "number", "exclusiveMinimum": 0.30000000000000004}, ["0.31"], ["0.3", "0.30000000000000004"]),
    ({"type": "number", "minimum": 0.30000000000000004}, ["0.31", "0.30000000000000004"], ["0.3"]),
    ({"type": "number", "maximum": 1e-20, "minimum": -1}, ["-0.5", "0"], ["0.1"]),
    ({"type": "integer", "exclusiveMaximum": 2**63}, ["9223372036854774784", "7"], ["9223372036854775807"]),
    ({"type": "integer", "maximum": 2**63 - 1}, ["9223372036854775807"], ["9223372036854775808"]),
    ({"type": "integer", "not": {"const": 2**53}}, ["9007199254740990"], ["9007199254740992", "9007199254740993"]),
    ({"type": "integer", "maximum": 1e23}, ["99999999999999991611392"], ["100000000000000000000000"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "taken", "refused"), TRAPS)
def test_a_text_is_decided_as_the_double_that_it_is_read_as(
    schema: dict[str, Any], taken: list[str], refused: list[str]
) -> None:
    grammar = json_taker(schema)
    assert [text for text in taken if not grammar.takes(text)] == []
    assert [text for text in refused if grammar.takes(text)] == []


@pytest.mark.parametrize(
    ("divisor", "taken", "refused"),
    [
        (2.5, ["0", "-2.5", "5", "7.5", "7.50", "0.0", "100000.0"], ["2", "5.5", "0.5", "7.55", "2.0"]),
        (0.75, ["0.75", "1.5", "2.25", "3", "-3.75", "30000.0"], ["0.5", "1.75", "2.2", "4"]),
        (0.0625, ["0.0625", "3.1875", "-7", "1.5"], ["0.03125", "0.06", "0.1"]),
        (1.5, ["1.5", "3", "3.0", "4.5"], ["1", "0.5", "2.5"]),
    ],
)
def test_multiples_of_fractions_that_are_exact(divisor: float, taken: list[str], refused: list[str]) -> None:
    grammar = json_taker({"type": "number", "multipleOf": divisor})
    assert [text for text in taken if not grammar.takes(text)] == []
    assert [text for text in refused if grammar.takes(text)] == []


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "number", "multipleOf": 0.1}, "^/multipleOf: multiples of 0.1 are not exact in binary"),
        ({"type": "number", "multipleOf": 0.015625}, "^/multipleOf: multiples of 0.015625 take too large an automaton"),
        ({"properties": {"a": {"type": "number", "exclusiveMinimum": 0.1, "exclusiveMaximum": 0.10000000000000003}},
          "required": ["a"]}, "^/properties/a/exclusiveMinimum: no number of at most 15 digits lies within the bounds"),
    ],
)  # fmt: skip
def test_what_cannot_be_decided_is_refused_with_the_true_reason(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(CompileError, match=message):
        json_taker(schema)


BOUNDS = st.one_of(
    st.integers(-30, 30),
    st.integers(-(2**64), 2**64),
    st.floats(-1e9, 1e9),
    st.sampled_from([0.1, 0.3, 0.30000000000000004, 1e-7, 1e-20, 2.5, 0.999999999999999, 123456789012345.6, 1e22]),
)
KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
CONSTRAINTS = st.one_of(
    st.dictionaries(st.sampled_from(KEYWORDS), BOUNDS, min_size=1, max_size=3),
    st.builds(lambda value: {"not": {"const": value}}, BOUNDS),
    st.builds(lambda value, keyword: {"not": {"enum": [value, 1]}, keyword: value}, BOUNDS, st.sampled_from(KEYWORDS)),
    st.just({"not": {"type": "integer"}}),
    st.builds(lambda value: {"multipleOf": value}, st.sampled_from([0.5, 2.5, 0.75, 0.0625, 3.125, 3, 7])),
)


def _near(value: float, offset: int, places: int) -> str:
    """Returns the text of a decimal next to a value: longer than a double can tell."""
    exact = Decimal(value) if offset % 2 else Decimal(str(value))
    return f"{exact + offset * Decimal(10) ** -places:f}"


def _numbers_in(schema: Any) -> list[float]:
    if isinstance(schema, dict | list):
        parts = schema.values() if isinstance(schema, dict) else schema
        return [number for part in parts for number in _numbers_in(part)]
    return [] if isinstance(schema, str) else [schema]


def _in_doubles(schema: Any) -> Any:
    """Returns a schema as a reader sees it that has no integers."""
    if isinstance(schema, dict):
        return {name: _in_doubles(part) for name, part in schema.items()}
    if isinstance(schema, list):
        return list(map(_in_doubles, schema))
    return schema if isinstance(schema, str) else float(schema)


@settings(deadline=None, max_examples=150)
@given(
    constraint=CONSTRAINTS,
    others=st.lists(BOUNDS, min_size=2, max_size=6),
    offsets=st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 40)), min_size=8, max_size=8),
)
@example({"exclusiveMaximum": 1}, [1], [(-1, 17), (-1, 25), (-1, 3)])
@example({"exclusiveMinimum": 2**53}, [2**53], [(1, 0), (2, 0), (3, 0)])
def test_what_is_taken_is_valid_however_it_is_read(
    constraint: dict[str, Any], others: list[float], offsets: list[tuple[int, int]]
) -> None:
    schema = {"type": "number", **constraint}
    try:
        grammar = schema_grammar(json.dumps(schema), GrammarOptions())
    except CompileError:
        return
    languages = [rule.language for rule in grammar.rules.values() if isinstance(rule, Terminal)]
    exactly, rounded = jsonschema.Draft202012Validator(schema), jsonschema.Draft202012Validator(_in_doubles(schema))
    for value in (*others, *_numbers_in(schema)):
        for text in (_near(value, *offset) for offset in offsets):
            if any(language.fullmatch(text) for language in languages):
                assert exactly.is_valid(json.loads(text)), text
                assert "multipleOf" in schema or rounded.is_valid(float(text)), text
