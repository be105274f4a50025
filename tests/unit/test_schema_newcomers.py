"""What a new user writes first: lengths beside formats, large divisors, forms of OpenAPI and of older drafts."""

from __future__ import annotations

from typing import Any

import pytest
from schema_texts import json_taker

from grammar_sync.engines.prepared import CompileError, Finding


def _places(findings: tuple[Finding, ...]) -> set[tuple[str, str]]:
    return {(finding.path, finding.keyword) for finding in findings}


@pytest.mark.parametrize("policy", ["xgrammar", "llguidance"])
def test_a_length_for_patterns_that_leave_it_open(policy: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a+$"}}, "required": ["a"]}
    grammar = json_taker(schema, policy, max_string_length=3)
    assert grammar.takes('{"a": "aaa"}')
    assert not grammar.takes('{"a": "aaaa"}')
    assert ("/properties/a", "max_string_length") in _places(grammar.prepared.rewritten)


def test_a_length_is_not_shorter_than_what_a_pattern_needs() -> None:
    grammar = json_taker({"type": "string", "pattern": "^a{5,}$"}, max_string_length=3)
    assert grammar.takes('"aaaaa"')
    assert not grammar.takes('"aaaaaa"')
    date = json_taker({"type": "string", "format": "date"}, max_string_length=3)
    assert date.takes('"2024-02-29"')
    assert "max_string_length" not in {finding.keyword for finding in date.prepared.rewritten}


def test_a_length_that_cannot_be_applied_is_said() -> None:
    grammar = json_taker({"type": "string", "format": "uri"}, max_string_length=30)
    assert grammar.takes('"https://example.com/a-path-that-is-longer-than-that"')
    assert _places(grammar.prepared.not_enforced) == {("", "max_string_length")}


@pytest.mark.parametrize("lengths", [{"maxLength": 30}, {"minLength": 1, "maxLength": 2083}])
def test_a_length_beside_a_large_format(lengths: dict[str, int]) -> None:
    schema = {"type": "object", "properties": {"u": {"type": "string", "format": "uri", **lengths}}, "required": ["u"]}
    with pytest.raises(
        CompileError, match=r"^/properties/u/maxLength: maxLength \d+ together with format 'uri'.*strict"
    ):
        json_taker(schema)
    grammar = json_taker(schema, strict=False)
    assert _places(grammar.prepared.not_enforced) == {("/properties/u/maxLength", "maxLength")}
    assert grammar.takes('{"u": "https://example.com/"}')
    assert not grammar.takes('{"u": "no uri"}')


@pytest.mark.parametrize("divisor", [251, 1023, 1024, 5000])
def test_a_divisor_that_is_too_great_is_refused_by_path(divisor: int) -> None:
    schema = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}
    schema["$defs"] = {"n": {"type": "integer", "multipleOf": divisor}}
    with pytest.raises(CompileError, match=rf"^/\$defs/n/multipleOf: .*{divisor}.* give strict: false"):
        json_taker(schema)
    grammar = json_taker(schema, strict=False)
    assert _places(grammar.prepared.not_enforced) == {("/$defs/n/multipleOf", "multipleOf")}
    assert grammar.takes('{"n": 3}')


@pytest.mark.parametrize(
    "schema",
    [
        {"multipleOf": 128},
        {"multipleOf": 512},
        {"multipleOf": 1000},
        {"multipleOf": 251, "minimum": 0, "maximum": 100_000},
    ],
)
def test_divisors_that_work(schema: dict[str, int]) -> None:
    grammar = json_taker({"type": "integer", **schema})
    assert grammar.takes(str(3 * schema["multipleOf"]))
    assert not grammar.takes(str(3 * schema["multipleOf"] + 1))


def test_a_bound_of_too_many_digits_is_dropped_without_strict() -> None:
    with pytest.raises(CompileError, match=r"^/maximum: "):
        json_taker({"type": "number", "maximum": 1e50})
    assert json_taker({"type": "number", "maximum": 1e50}, strict=False).takes("1")


def test_bounds_as_openapi_writes_them() -> None:
    schema = {"type": "integer", "minimum": 0, "exclusiveMinimum": True, "maximum": 9, "exclusiveMaximum": False}
    grammar = json_taker(schema)
    assert [number for number in range(12) if grammar.takes(str(number))] == list(range(1, 10))
    assert _places(grammar.prepared.rewritten) == {
        ("/exclusiveMinimum", "exclusiveMinimum"),
        ("/exclusiveMaximum", "exclusiveMaximum"),
    }
    chosen = json_taker({"enum": [0, 1, 50, 100], "maximum": 100, "exclusiveMaximum": True})
    assert [number for number in (0, 1, 50, 100) if chosen.takes(str(number))] == [0, 1, 50]


def test_nullable_is_said_to_do_nothing() -> None:
    grammar = json_taker({"type": "object", "properties": {"a": {"type": "string", "nullable": True}}})
    assert not grammar.takes('{"a": null}')
    assert ("/properties/a/nullable", "nullable") in _places(grammar.prepared.rewritten)
