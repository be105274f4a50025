"""Request fields to grammar specs: canonical text, keys, and everything that must be refused at the door."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar_sync.spec import (
    MAX_BRANCHES,
    MAX_ENUM_VALUES,
    MAX_NESTING,
    MAX_PROPERTIES,
    MAX_REFERENCES,
    MAX_SOURCE_BYTES,
    GrammarError,
    GrammarOptions,
    GrammarSpec,
    parse_grammar,
)

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["心情", 'x"y']}}}


def nested(levels: int, key: str = "anyOf") -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(levels):
        schema = {key: [schema] if key == "anyOf" else schema}
    return schema


def reference_chain(length: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length - 1)}
    definitions[f"d{length - 1}"] = {"type": "null"}
    return {"$ref": "#/$defs/d0", "$defs": definitions}


@pytest.mark.parametrize(
    "fields", [{}, {"max_tokens": 4}, {"json_object": False}, {"json_schema": None, "regex": None}]
)
def test_no_grammar(fields: dict[str, object]) -> None:
    assert parse_grammar(fields) is None


@pytest.mark.parametrize(
    ("fields", "kind", "source"),
    [
        (
            {"json_schema": SCHEMA},
            "json_schema",
            json.dumps(dict(sorted(SCHEMA.items())), separators=(",", ":"), ensure_ascii=False),
        ),
        ({"json_schema": json.dumps(SCHEMA, indent=2)}, "json_schema", None),
        ({"json_schema": True}, "json_schema", "true"),
        ({"json_schema": {}}, "json_schema", "{}"),
        ({"json_object": True}, "json_object", '{"type":"object"}'),
        ({"json_object": True, "regex": None}, "json_object", '{"type":"object"}'),
        ({"json_object": False, "regex": "a+"}, "regex", "a+"),
        ({"regex": r"\((a|b)\)"}, "regex", r"\((a|b)\)"),
        ({"ebnf": ' root ::= "a" '}, "ebnf", ' root ::= "a" '),
        ({"choice": ["yes", "no", 'é "q"\n']}, "choice", '["yes","no","é \\"q\\"\\n"]'),
    ],
)
def test_each_kind(fields: dict[str, object], kind: str, source: str | None) -> None:
    spec = parse_grammar(fields)
    assert spec is not None
    assert spec.kind == kind
    assert source is None or spec.source == source


def test_equal_grammars_are_one_key_and_property_order_counts() -> None:
    as_dict, as_text = parse_grammar({"json_schema": SCHEMA}), parse_grammar({"json_schema": json.dumps(SCHEMA)})
    assert as_dict == as_text
    assert hash(as_dict) == hash(as_text)
    swapped = {"type": "object", "properties": dict(reversed(SCHEMA["properties"].items()))}
    assert parse_grammar({"json_schema": swapped}) != as_dict
    assert parse_grammar({"json_schema": SCHEMA, "strict": False}) != as_dict
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(as_dict), type=GrammarSpec) == as_dict


def test_what_order_means_nothing_is_put_in_order() -> None:
    one: dict[str, Any] = {
        "type": ["object", "null"],
        "properties": {"b": {"minimum": 1, "type": "integer"}, "a": {}},
        "required": ["b", "a"],
    }
    other = {
        "required": ["a", "b"],
        "properties": {"b": {"type": "integer", "minimum": 1}, "a": {}},
        "type": ["null", "object"],
    }
    assert parse_grammar({"json_schema": one}) == parse_grammar({"json_schema": other})
    swapped = {**one, "properties": dict(reversed(one["properties"].items()))}
    assert parse_grammar({"json_schema": swapped}) != parse_grammar({"json_schema": one})
    for kept in (
        {"enum": [{"b": 1, "a": 2}, 1]},
        {"required": ["b", "a"]},
        {"anyOf": [{"type": "null"}, {"const": 1}]},
    ):
        spec = parse_grammar({"json_schema": kept})
        assert spec is not None
        assert spec.source == json.dumps(kept, separators=(",", ":"))


def test_strict_is_an_option() -> None:
    spec = parse_grammar({"regex": "a", "strict": False})
    assert spec == GrammarSpec("regex", "a", GrammarOptions(strict=False))


BAD_FIELDS: list[tuple[str, object, str]] = [
    ("json_schema", "", "no JSON"),
    ("json_schema", "{", "no JSON"),
    ("json_schema", "[]", "expected a JSON Schema"),
    ("json_schema", [], "expected a JSON Schema"),
    ("json_schema", 3, "expected a JSON Schema"),
    ("json_schema", '""', "expected a JSON Schema"),
    ("json_schema", False, "allows no value"),
    ("json_schema", '{"a": NaN}', "finite"),
    ("json_schema", {"minimum": float("inf")}, "finite"),
    ("json_schema", '{"minimum": ' + "9" * 5000 + "}", "number"),
    ("json_schema", {"minimum": 10**5000}, "cannot be written"),
    ("json_schema", {1: {}}, "key 1"),
    ("json_schema", {"const": b"x"}, "bytes"),
    ("json_schema", {"const": "\ud800"}, r"lone surrogate U\+D800"),
    ("json_schema", '{"properties": {"\\udfff": {}}}', "lone surrogate"),
    ("json_schema", {"type": "string", "pattern": "a\0b"}, "/pattern has a NUL"),
    ("json_schema", nested(1000), f"deeper than {MAX_NESTING}"),
    ("json_schema", nested(100, "items"), f"deeper than {MAX_NESTING}"),
    ("json_schema", "[" * 100_000, f"deeper than {MAX_NESTING}"),
    ("json_schema", {"enum": list(range(MAX_ENUM_VALUES + 1))}, f"/enum has .* at most {MAX_ENUM_VALUES}"),
    ("json_schema", {"const": "x" * MAX_SOURCE_BYTES}, f"at most {MAX_SOURCE_BYTES}"),
    ("json_schema", reference_chain(MAX_REFERENCES + 2), f"at most {MAX_REFERENCES}"),
    ("json_schema", {"properties": {str(i): {} for i in range(MAX_PROPERTIES + 1)}}, f"at most {MAX_PROPERTIES}"),
    ("json_schema", {"anyOf": [{}] * (MAX_BRANCHES + 1)}, f"/anyOf has .* at most {MAX_BRANCHES}"),
    ("json_schema", {"name": "x", "strict": True, "schema": {"type": "object"}}, "what stands under schema"),
    ("json_schema", {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}, "under json_schema, then"),
    ("json_object", 1, "true or false"),
    ("json_object", "true", "true or false"),
    ("json_object", {}, "true or false"),
    ("regex", "", "non-empty"),
    ("regex", 3, "non-empty"),
    ("regex", "a\0b", "NUL character at position 1"),
    ("regex", "a\udc00", "lone surrogate"),
    ("regex", "(" * 10_000 + ")" * 10_000, f"at most {MAX_NESTING}"),
    ("regex", "x" * (MAX_SOURCE_BYTES + 1), f"at most {MAX_SOURCE_BYTES}"),
    ("ebnf", "", "non-empty"),
    ("ebnf", ["root"], "non-empty"),
    ("ebnf", 'root ::= "\0"', "NUL"),
    ("ebnf", "root ::= " + "(" * 65 + '"a"' + ")" * 65, "nested 65 deep"),
    ("choice", [], "non-empty list"),
    ("choice", "yes", "non-empty list"),
    ("choice", {"a": 1}, "non-empty list"),
    ("choice", ["a", ""], r"\[1\] is ''"),
    ("choice", ["a", 1], r"\[1\] is 1"),
    ("choice", ["a", "b", "a"], r"\[2\] repeats \[0\]"),
    ("choice", ["a\0"], "NUL"),
    ("choice", ["\ud83d"], "lone surrogate"),
    ("choice", [str(i) for i in range(MAX_ENUM_VALUES + 1)], f"at most {MAX_ENUM_VALUES}"),
    ("choice", ["x" * MAX_SOURCE_BYTES], f"at most {MAX_SOURCE_BYTES}"),
    ("structural_tag", [], "expected a JSON object"),
    ("structural_tag", "{", "no JSON"),
    ("structural_tag", {"structures": [], "triggers": ["a"]}, "has neither"),
    ("structural_tag", '{"format": {}, "format": {}}', "the key 'format' stands twice in one object"),
    ("structural_tag", {"format": {"type": "grammar", "grammar": "root ::= " + "(" * 65}}, "/format/grammar has paren"),
    ("json_schema", '{"properties": {"a": {"type": "null"}, "a": {}}}', "the key 'a' stands twice in properties"),
    ("max_whitespace", -1, "from 0 to"),
    ("max_string_length", True, "from 1 to"),
    ("max_items", 10**6, "from 1 to"),
    ("any_whitespace", "no", "true or false"),
    ("ebnf_root", "a b", "name of a rule"),
    ("strict", "yes", "true or false"),
]


@pytest.mark.parametrize(("param", "value", "message"), BAD_FIELDS)
def test_bad_fields_are_refused_by_name(param: str, value: object, message: str) -> None:
    with pytest.raises(GrammarError, match=message) as caught:
        parse_grammar({param: value})
    assert caught.value.param == param
    assert str(caught.value).startswith(f"{param}: ")
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


def test_at_most_one_grammar() -> None:
    with pytest.raises(GrammarError, match="together with json_schema") as caught:
        parse_grammar({"choice": ["a"], "json_schema": {}})
    assert caught.value.param == "choice"


def test_a_schema_that_contains_itself_is_refused() -> None:
    schema: dict[str, Any] = {}
    schema["items"] = schema
    with pytest.raises(GrammarError, match="deeper"):
        parse_grammar({"json_schema": schema})


def test_what_is_just_within_the_bounds_is_taken() -> None:
    for fields in (
        {"json_schema": nested(MAX_NESTING - 2, "items")},
        {"json_schema": {"enum": list(range(MAX_ENUM_VALUES))}},
        {"json_schema": reference_chain(MAX_REFERENCES)},
        {"json_schema": {"enum": ["a\0b"]}},
        {"regex": "x" * MAX_SOURCE_BYTES},
        {"regex": "[(]" * 100 + r"\(" * 100 + "(" * MAX_NESTING + ")" * MAX_NESTING},
        {"ebnf": 'root ::= "' + "(" * 200 + '"  # ' + "(" * 200 + "\n"},
    ):
        assert parse_grammar(fields) is not None


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


@settings(deadline=None, max_examples=200)
@given(schema=st.dictionaries(st.text(max_size=8), _JSON, max_size=4))
def test_the_source_is_the_schema(schema: dict[str, Any]) -> None:
    """Any JSON object is kept value by value, or refused with a reason; its source is its own source."""
    try:
        spec = parse_grammar({"json_schema": schema})
    except GrammarError:
        return
    assert spec is not None
    assert json.dumps(json.loads(spec.source), sort_keys=True) == json.dumps(schema, sort_keys=True)
    assert parse_grammar({"json_schema": spec.source}) == spec


@settings(deadline=None, max_examples=200)
@given(
    fields=st.dictionaries(
        st.sampled_from(["json_schema", "json_object", "regex", "ebnf", "choice", "structural_tag", "strict"]), _JSON
    )
)
def test_nothing_but_grammar_errors_comes_out(fields: dict[str, object]) -> None:
    try:
        spec = parse_grammar(fields)
    except GrammarError:
        return
    assert spec is None or spec.source


def test_the_parser_is_light() -> None:
    """A process that only checks requests loads neither torch nor xgrammar."""
    root = Path(__file__).resolve().parents[2]
    code = "import sys, grammar_sync.spec; print([name for name in ('torch', 'xgrammar') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
