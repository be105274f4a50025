"""JSON Schemas as grammars: what each keyword allows and refuses, alone and beside others; what is said of the rest."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schema_texts import json_taker, taker

from grammar_sync.engines.preparation import prepare
from grammar_sync.engines.prepared import CompileError
from grammar_sync.schema.keywords import KEYWORDS
from grammar_sync.schema.negative import NEGATIVE
from grammar_sync.schema.positive import POSITIVE
from grammar_sync.spec import parse_grammar

Case = tuple[dict[str, Any], list[Any], list[Any]]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}

CASES: dict[str, Case] = {
    "allOf of objects": (
        {"allOf": [{"$ref": "#/$defs/a"}, {"properties": {"b": {"type": "string"}}, "required": ["b"]}],
         "$defs": {"a": {"properties": {"a": {"type": "integer"}}, "required": ["a"]}}},
        [{"a": 1, "b": "x"}, 3],
        [{"a": 1}, {"b": "x"}, {"a": "1", "b": "x"}],
    ),
    "siblings of $ref": (
        {"$ref": "#/$defs/n", "maximum": 5, "$defs": {"n": {"type": "integer"}}}, [5, -3], [6, "a", 1.5]
    ),
    "anyOf beside properties": (
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
         "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": 1}, {"a": 1, "b": 2}],
        [{}, {"a": "x"}],
    ),
    "oneOf that overlaps": (
        {"oneOf": [{"type": "integer"}, {"minimum": 2}]}, [1, 2.5, "a", None][:2], [3, 1.5]
    ),
    "oneOf by a constant": (
        {"oneOf": [
            {"type": "object", "properties": {"kind": {"const": "a"}, "x": {"type": "integer"}}, "required": ["kind"]},
            {"type": "object", "properties": {"kind": {"const": "b"}, "y": {"type": "string"}}, "required": ["kind"]},
        ]},
        [{"kind": "a", "x": 1}, {"kind": "b", "y": "z"}, {"kind": "b"}],
        [{"kind": "a", "x": "1"}, {"kind": "c"}, {}],
    ),
    "assertions without a type": ({"minLength": 2}, ["ab", 1, None, []], ["a", ""]),
    "required without properties": (
        {"type": "object", "required": ["a"]}, [{"a": 1}, {"z": 1, "a": 2}], [{}, {"b": 1}]
    ),
    "not": ({"not": {"type": ["integer", "boolean"]}}, ["a", None, 1.5, {}], [1, True, False]),
    "not of an object": (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "not": {"required": ["a"]}}, [{}], [{"a": 1}]
    ),
    "if, then, else": (
        {"type": "object", "properties": {"t": {"enum": ["n", "s"]}, "v": {}}, "required": ["t", "v"],
         "if": {"properties": {"t": {"const": "n"}}},
         "then": {"properties": {"v": {"type": "number"}}}, "else": {"properties": {"v": {"type": "string"}}}},
        [{"t": "n", "v": 1}, {"t": "s", "v": "x"}],
        [{"t": "n", "v": "x"}, {"t": "s", "v": 1}],
    ),
    "dependentRequired": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
        [{}, {"b": 1}, {"a": 1, "b": 2}],
        [{"a": 1}],
    ),
    "dependentSchemas": (
        {"type": "object", "properties": {"a": {}, "b": {}},
         "dependentSchemas": {"a": {"properties": {"b": {"const": 1}}}}},
        [{"b": 2}, {"a": 0, "b": 1}, {"a": 0}],
        [{"a": 0, "b": 2}],
    ),
    "uniqueItems of an enum": (
        {"type": "array", "items": {"enum": ["a", "b", 3]}, "uniqueItems": True, "minItems": 1},
        [["a"], [3, "b", "a"]],
        [[], ["a", "a"], ["c"]],
    ),
    "contains, counted": (
        {"type": "array", "items": {"type": "integer"}, "contains": {"minimum": 5}, "minContains": 1, "maxContains": 2},
        [[5], [1, 6, 7]],
        [[], [1], [5, 6, 7], ["a"]],
    ),
    "prefixItems": (
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
        [[], [1], [1, "a"]],
        [[1, "a", 2], ["a"], [1, 2]],
    ),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^n_": {"type": "integer"}, "_s$": {"minimum": 3}},
         "additionalProperties": False},
        [{"n_a": 1}, {"a_s": 3}, {"a_s": "x"}, {"n_s": 4}],
        [{"n_a": "x"}, {"a_s": 1}, {"n_s": 2}, {"n_s": "x"}, {"z": 1}],
    ),
    "additionalProperties": (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
        [{"a": 1, "b": "x"}, {"b": "x", "c": "y"}, {}],
        [{"a": "x"}, {"b": 1}],
    ),
    "propertyNames": (
        {"type": "object", "propertyNames": {"maxLength": 2}, "additionalProperties": True},
        [{"ab": 1}, {}],
        [{"abc": 1}],
    ),
    "minProperties and maxProperties": (
        {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 1, "maxProperties": 2},
        [{"a": 1}, {"b": 1, "c": 2}],
        [{}, {"a": 1, "b": 2, "c": 3}],
    ),
    "unevaluatedProperties": (
        {"type": "object", "allOf": [{"properties": {"a": {}}}], "properties": {"b": {}},
         "unevaluatedProperties": False},
        [{"b": 1, "a": 2}, {}],
        [{"c": 1}],
    ),
    "numbers": (
        {"type": "number", "minimum": -1.5, "exclusiveMaximum": 10}, [-1.5, 0, 9.99, -1], [10, -1.51, -2, "1"]
    ),
    "multiples": ({"type": "integer", "multipleOf": 7, "minimum": 1}, [7, 14, 70], [0, 1, 8, 71]),
    "halves": ({"type": "number", "multipleOf": 0.5}, [1, 0.5, -2.5], [0.25, 1.1]),
    "pattern and length": (
        {"type": "string", "pattern": "^a*b", "maxLength": 3}, ["b", "aab", "abc"], ["aaab", "abcd", "a"]
    ),
    "pattern searches": ({"type": "string", "pattern": "b"}, ["abc", "b"], ["a", ""]),
    "length counts characters": ({"type": "string", "minLength": 2, "maxLength": 2}, ["ab", "😀é"], ["a", "abc", "😀"]),
    "format": ({"type": "string", "format": "date"}, ["2024-02-29"], ["2023-02-29", "x"]),
    "two formats of one string": (
        {"allOf": [{"format": "date"}, {"pattern": "^2024"}], "type": "string"}, ["2024-01-31"], ["2023-01-31"]
    ),
    "enum beside type": ({"type": "string", "enum": ["a", 1, None, "b"]}, ["a", "b"], [1, None]),
    "enum of objects": ({"enum": [{"a": [1, {"b": None}]}, 1]}, [{"a": [1, {"b": None}]}, 1], [{"a": [1]}, True]),
    "const beside not": ({"enum": [1, 2, 3], "not": {"const": 2}}, [1, 3], [2]),
    "names are not spelled again": (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
        [{"a": 1}],
        [{"a": "x"}],
    ),
    "boolean schemas": ({"type": "object", "properties": {"a": False, "b": True}}, [{}, {"b": [1]}], [{"a": 1}]),
}  # fmt: skip


@pytest.mark.parametrize("policy", ["xgrammar", "llguidance"])
@pytest.mark.parametrize("name", CASES)
def test_keywords(name: str, policy: Any) -> None:
    schema, valid, invalid = CASES[name]
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    assert all(validator.is_valid(value) for value in valid), "the case itself"
    assert not any(validator.is_valid(value) for value in invalid), "the case itself"
    grammar = json_taker(schema, policy)
    assert [value for value in valid if not grammar.takes_value(value)] == []
    assert [value for value in invalid if grammar.takes_value(value)] == []
    assert grammar.prepared.not_enforced == ()


def test_a_declared_name_cannot_come_again_in_another_spelling() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    grammar = json_taker(schema)
    assert not grammar.takes('{"a": 1, "\\u0061": "x"}')
    assert not grammar.takes('{"a": 1, "a": 2}')


@pytest.mark.parametrize("policy", ["xgrammar", "llguidance"])
def test_unicode_is_exact_raw_and_escaped(policy: Any) -> None:
    words = ["在线", "Sjöfart", "😀", 'a"b\\c\n']
    schema = {
        "type": "object",
        "properties": {"心情": {"enum": words}},
        "required": ["心情"],
        "additionalProperties": False,
    }
    grammar = json_taker(schema, policy)
    for word in words:
        assert grammar.takes(json.dumps({"心情": word}))
        assert grammar.takes(json.dumps({"心情": word}, ensure_ascii=False))
    assert not grammar.takes(json.dumps({"心情": "在"}))
    assert not grammar.takes(json.dumps({"心": "在线"}))


@pytest.mark.parametrize("policy", ["xgrammar", "llguidance"])
def test_recursion_goes_deep(policy: Any) -> None:
    node = {
        "type": "object",
        "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "required": ["v", "next"],
        "additionalProperties": False,
    }
    grammar = json_taker({"$ref": "#/$defs/node", "$defs": {"node": node}}, policy)
    text = '{"v": 1, "next": ' * 300 + "null" + "}" * 300
    assert grammar.takes(text)
    assert not grammar.takes(text.replace("null", "1"))


REFUSED: list[tuple[Any, str]] = [
    ({"$ref": "#"}, "refers to itself"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "refers to itself"),
    ({"$ref": "#/$defs/missing"}, r"^/\$ref: there is no schema at #/\$defs/missing"),
    ({"$ref": "https://example.com/s.json"}, r"^/\$ref is 'https://example.com/s.json': only references within"),
    ({"properties": {"a": {"$ref": "other.json#/x"}}}, r"^/properties/a/\$ref is "),
    ({"type": "array", "uniqueItems": True}, "^/uniqueItems: "),
    ({"properties": {"a": {"uniqueItems": True, "items": {"type": "string"}}}}, "^/properties/a/uniqueItems: "),
    ({"type": "number", "multipleOf": 0.01}, "multiples of 0.01 are not exact"),
    ({"type": "string", "format": "regex"}, "^/format: the format 'regex' cannot be enforced"),
    ({"type": "string", "pattern": "("}, "^/pattern: "),
    ({"type": "string", "pattern": r"^(a)\1$"}, "^/pattern: "),
    ({"not": {"propertyNames": {"pattern": "^a"}}}, "^/not/propertyNames: cannot be negated"),
    ({"not": {"patternProperties": {"^a": {"type": "string"}}}}, "^/not/patternProperties: cannot be negated"),
    ({"not": {"const": {"a": 1}}}, "^/not/const: cannot be negated"),
    ({"type": "object", "minProperties": 3}, "^/minProperties: "),
    ({"type": "foo"}, "^/type is 'foo', expected one or more of array"),
    ({"minimum": "1"}, "^/minimum is '1', expected a number"),
    ({"required": "a"}, "^/required is 'a', expected a list of names"),
    ({"properties": {"a": 3}}, "^/properties/a is no JSON Schema"),
    ({"type": "integer", "minimum": 2, "maximum": 1}, "^the schema: the grammar allows no output at all"),
    ({"properties": {"a": {"type": "object", "required": ["b"], "properties": {"b": {"enum": [1], "type": "string"}}}},
      "required": ["a"], "type": "object"}, "^/properties/a/properties/b: the grammar allows no output at all"),
    ({"type": "object", "patternProperties": {"^a": {}, "(": {}}}, r"^/patternProperties/\(: a group that is not"),
    ({"properties": {"x": {}}, "patternProperties": {"(?i)a": {}}}, r"^/patternProperties/\(\?i\)a: a kind of group"),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "allows no output at all"),
    ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "allows no output at all"),
    ({"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1}}, "$ref": "#/$defs/n"},
     "no output"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "message"), REFUSED)
def test_what_cannot_be_enforced_is_refused_by_path(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(CompileError, match=message) as caught:
        json_taker(schema)
    assert "\n" not in str(caught.value)


def test_without_strict_it_is_listed_and_the_rest_is_enforced() -> None:
    schema = {"type": "array", "items": {"type": "string", "format": "regex"}, "uniqueItems": True, "maxItems": 3}
    grammar = json_taker(schema, strict=False)
    assert {(finding.path, finding.keyword) for finding in grammar.prepared.not_enforced} == {
        ("/uniqueItems", "uniqueItems"),
        ("/items/format", "format"),
    }
    assert grammar.takes('["(", "("]')
    assert not grammar.takes("[1]")
    assert not grammar.takes('["a", "b", "c", "d"]')


def test_unknown_formats_pass_and_are_said() -> None:
    grammar = json_taker({"type": "string", "format": "phone-number"})
    assert [(finding.path, finding.keyword) for finding in grammar.prepared.not_enforced] == [("/format", "format")]
    assert grammar.takes('"anything"')


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("int32", "the format 'int32' is an annotation (about numbers, not strings): any value passes"),
        ("binary", "the format 'binary' is an annotation (any data): any value passes"),
        ("phone-number", "the format 'phone-number' is not known: any value passes"),
    ],
)
def test_formats_that_say_nothing_are_told_apart(name: str, told: str) -> None:
    assert [finding.message for finding in json_taker({"format": name}).prepared.not_enforced] == [told]


def test_undeclared_properties_are_left_out_and_it_is_said() -> None:
    grammar = json_taker(PERSON)
    assert not grammar.takes('{"name": "A", "x": 1}')
    assert [(finding.path, finding.keyword) for finding in grammar.prepared.rewritten] == [("", "additionalProperties")]
    opened = json_taker({**PERSON, "additionalProperties": True})
    assert opened.takes('{"name": "A", "x": 1}')
    assert opened.prepared.rewritten == ()
    assert json_taker({"type": "object"}).takes('{"x": 1}')


def test_properties_come_in_their_declared_order() -> None:
    grammar = json_taker(PERSON)
    assert grammar.takes('{"name": "A", "age": 1}')
    assert not grammar.takes('{"age": 1, "name": "A"}')


def test_bounds_for_what_a_schema_leaves_open() -> None:
    schema = {"type": "array", "items": {"type": "string"}}
    grammar = json_taker(schema, max_string_length=3, max_items=2)
    assert grammar.takes('["abc", "d"]')
    assert not grammar.takes('["abcd"]')
    assert not grammar.takes('["a", "b", "c"]')
    assert {finding.keyword for finding in grammar.prepared.rewritten} == {"max_string_length", "max_items"}
    own = {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 3}
    assert json_taker(own, max_string_length=3, max_items=2).takes('["abcde", "b", "c"]')


def test_whitespace_is_bounded_or_none() -> None:
    grammar = json_taker(PERSON)
    assert grammar.takes('{\n                    "name" :\t"A"\r\n}')
    assert not grammar.takes("{" + " " * 22 + '"name": "A"}')
    assert not json_taker(PERSON, max_whitespace=2).takes('{   "name": "A"}')
    tight = json_taker(PERSON, any_whitespace=False)
    assert tight.takes('{"name": "A", "age": 1}')
    assert not tight.takes('{"name":"A"}')
    assert not tight.takes('{ "name": "A"}')


def test_drafts_differ() -> None:
    old = "http://json-schema.org/draft-04/schema#"
    assert not json_taker({"$schema": old, "minimum": 1, "exclusiveMinimum": True, "type": "integer"}).takes("1")
    seventh = {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/n", "maximum": 1}
    definitions = {"definitions": {"n": {"type": "integer"}}}
    assert json_taker({**seventh, **definitions}).takes("5"), "draft 7 ignores what stands beside $ref"
    pair = {"items": [{"type": "integer"}], "additionalItems": {"type": "string"}, "type": "array"}
    assert json_taker({**pair, "$schema": seventh["$schema"]}).takes('[1, "a"]')


def test_anchors_and_identifiers() -> None:
    schema = {
        "$id": "https://example.com/a/root.json",
        "$defs": {"x": {"$anchor": "here", "type": "integer"}, "y": {"$id": "other.json", "type": "string"}},
        "anyOf": [{"$ref": "#here"}, {"$ref": "other.json"}, {"$ref": "https://example.com/a/root.json#/$defs/y"}],
    }
    grammar = json_taker(schema)
    assert grammar.takes("1")
    assert grammar.takes('"a"')
    assert not grammar.takes("null")


@pytest.mark.parametrize("policy", ["xgrammar", "llguidance"])
def test_json_object_is_any_object(policy: Any) -> None:
    grammar = taker(policy, json_object=True)
    assert grammar.takes('{"a": [1, -2.5e3, "\\ud83d\\ude00\\/"], "b": {}}')
    assert not grammar.takes("[]")
    assert not grammar.takes('{"a": "\\ud83d"}'), "half a character is no text"
    assert not grammar.takes('{"a": 01}')


SCALARS = st.sampled_from([None, True, False, 0, 1, 2, -1, 3, 1.5, "", "a", "b", "ab", "é", 10])
NAMES = st.sampled_from(["a", "b", "c"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), inner, max_size=3).map(
            lambda value: dict(sorted(value.items()))
        )
    ),
    max_leaves=6,
)


def _keywords(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    small = st.integers(0, 2)
    bounds = st.sampled_from([-1, 0, 1, 1.5])
    types = ["object", "array", "string", "integer", "number", "null", "boolean"]
    schemas = st.lists(inner, min_size=1, max_size=2)
    by_name = st.dictionaries(NAMES, inner, max_size=3).map(lambda value: dict(sorted(value.items())))
    options: dict[str, st.SearchStrategy[Any]] = {
        "type": st.sampled_from(types) | st.lists(st.sampled_from(types), min_size=1, max_size=3, unique=True),
        "enum": st.lists(VALUES, min_size=1, max_size=3),
        "const": VALUES,
        "properties": by_name,
        "patternProperties": st.dictionaries(st.sampled_from(["^a", "[bc]", "d$"]), inner, max_size=2),
        "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=2, unique=True), max_size=1),
        "dependentSchemas": st.dictionaries(NAMES, inner, max_size=1),
        "required": st.lists(NAMES, max_size=2, unique=True).map(sorted),
        "pattern": st.sampled_from(["^a", "b$", "^[ab]*$", ".", "^$"]),
        "multipleOf": st.sampled_from([1, 2, 3, 0.5]),
        "uniqueItems": st.booleans(),
        **dict.fromkeys(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"], bounds),
        **dict.fromkeys(["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"], small),
        **dict.fromkeys(["items", "contains", "additionalProperties", "propertyNames", "not"], inner),
        **dict.fromkeys(["if", "then", "else", "unevaluatedProperties", "unevaluatedItems"], inner),
        **dict.fromkeys(["allOf", "anyOf", "oneOf", "prefixItems"], schemas),
        "$ref": st.just("#/$defs/x"),
    }
    chosen = st.lists(st.sampled_from(sorted(options)), min_size=1, max_size=4, unique=True)
    return chosen.flatmap(lambda names: st.fixed_dictionaries({name: options[name] for name in names}))


SCHEMAS = st.recursive(st.booleans() | st.just({"type": "integer"}) | st.just({}), _keywords, max_leaves=6)


def _faults(schema: Any, target: Any, values: list[Any]) -> list[str]:
    """Returns what is wrong with a schema's grammar, or with its refusal.

    The grammar takes a value only if it is valid, and every valid one but for the two documented rules.
    """
    whole = {"allOf": [schema], "$defs": {"x": target}}
    validator = jsonschema.Draft202012Validator(whole)
    refusal = ""
    try:
        grammar = json_taker(whole)
    except CompileError as error:
        refusal = str(error)
    if refusal:
        is_wrong = "no output" in refusal and any(validator.is_valid(value) for value in values)
        return [refusal] if is_wrong else []
    narrowed = bool(grammar.prepared.rewritten) or "required" in json.dumps(whole) or "dependent" in json.dumps(whole)
    found = []
    for value in values:
        valid, taken = validator.is_valid(value), grammar.takes_value(value)
        if taken and not valid:
            found.append(f"loose: {value}")
        if valid and not taken and not narrowed:
            found.append(f"over-tight: {value}")
    return found


@settings(deadline=None, max_examples=60)
@given(schema=SCHEMAS, target=SCHEMAS, values=st.lists(VALUES, min_size=8, max_size=8))
def test_a_grammar_is_its_schema(schema: Any, target: Any, values: list[Any]) -> None:
    assert _faults(schema, target, values) == []


@pytest.mark.sweep
@settings(deadline=None, max_examples=4000)
@given(schema=SCHEMAS, target=SCHEMAS, values=st.lists(VALUES, min_size=15, max_size=15))
def test_many_grammars_are_their_schemas(schema: Any, target: Any, values: list[Any]) -> None:
    assert _faults(schema, target, values) == []


def test_the_table_of_keywords_is_what_the_code_knows() -> None:
    handled = {keyword for group in (*POSITIVE, *NEGATIVE) for keyword in group}
    together = {"minContains", "maxContains", "then", "else"}
    asserted = {name for name, enforcement in KEYWORDS.items() if enforcement.status != "annotation"}
    assert asserted == handled | together


def test_what_is_slow_in_one_engine_goes_to_the_other() -> None:
    def engines(schema: dict[str, Any]) -> list[str]:
        spec = parse_grammar({"json_schema": schema})
        assert spec is not None
        return [prepared.engine for prepared in prepare(spec, ("xgrammar", "llguidance"))]

    assert engines(PERSON) == ["xgrammar", "llguidance"]
    assert engines({"type": "string", "maxLength": 200}) == ["llguidance", "xgrammar"]
