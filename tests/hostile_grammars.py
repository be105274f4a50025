"""Grammars that broke comparable systems: wrong ones, ones that crash, hang or blow up an engine, ones it loosens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Hostile:
    """A grammar that must not harm anybody.

    Args:
        scenario: Its number in the list of scenarios, for example ``T5``.
        fields: The request's grammar fields.
        must_fail: Whether no engine can take it; else it may run, if its outputs are right.
        at_the_door: Whether it must be refused before anything is compiled.
        takes: Texts that the grammar allows.
        refuses: Texts that it does not allow.
        path: Where in the schema the difficulty lies.
    """

    scenario: str
    fields: dict[str, Any]
    must_fail: bool = False
    at_the_door: bool = False
    takes: tuple[str, ...] = ()
    refuses: tuple[str, ...] = ()
    path: str = ""


def _nested(depth: int, key: str, innermost: Any) -> Any:
    value = innermost
    for _ in range(depth):
        value = {"type": "array", "items": value} if key == "items" else {key: [value, {"type": "null"}]}
    return value


def _chain(length: int) -> dict[str, Any]:
    steps = {f"d{index}": {"$ref": f"#/$defs/d{index + 1}"} for index in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**steps, f"d{length}": {"type": "null"}}}


def _optional(count: int, **more: Any) -> dict[str, Any]:
    properties = {f"p{index}": {"type": "integer"} for index in range(count)}
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}


def _t5(**fields: Any) -> Hostile:
    return Hostile("T5", fields, must_fail=True)


def _door(scenario: str, **fields: Any) -> Hostile:
    return Hostile(scenario, fields, must_fail=True, at_the_door=True)


def _heavy(scenario: str, **fields: Any) -> Hostile:
    return Hostile(scenario, fields)


@dataclass(frozen=True)
class _Ab:
    """An object schema with the optional properties ``a`` and ``b``, both of any type, and more keywords."""

    more: dict[str, Any] = field(default_factory=dict)

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "object", "properties": {"a": {}, "b": {}}, "additionalProperties": False, **self.more}


def _t9(schema: Any, path: str, takes: tuple[str, ...], refuses: tuple[str, ...]) -> Hostile:
    return Hostile("T9", {"json_schema": schema}, takes=takes, refuses=refuses, path=path)


_INTEGERS = {"type": "array", "items": {"type": "integer"}}
_SLOW_REGEX = "([a-z]{1,1000}){1,1000}"
_REPEATED_TAG = {
    "format": {
        "type": "repeat",
        "min": 1,
        "max": 1_000_000_000,
        "content": {"type": "regex", "pattern": "[a-z]{1,9}"},
    }
}

HOSTILE: dict[str, Hostile] = {
    # T5: grammars that are wrong.
    "schema empty text": _door("T5", json_schema=""),
    "schema list": _door("T5", json_schema=[]),
    "schema number": _door("T5", json_schema=3),
    "schema false": _door("T5", json_schema=False),
    "json_object text": _door("T5", json_object="xml"),
    "open parenthesis": _t5(regex="("),
    "reversed range": _t5(regex="[z-a]"),
    "reversed bounds": _t5(regex="a{2,1}"),
    "double star": _t5(regex="a**"),
    "back-reference": _t5(regex=r"(a)\1"),
    "look-ahead": _t5(regex="a(?=b)b"),
    "unicode class": _t5(regex=r"\p{L}+"),
    "word boundary": _t5(regex=r"\bfoo\b"),
    "inline flag": _t5(regex="(?i)a"),
    "undefined rule": _t5(ebnf="root ::= foo"),
    "open group": _t5(ebnf="root ::= ("),
    "no root rule": _t5(ebnf='rout ::= "a"'),
    "empty ebnf": _door("T5", ebnf=""),
    "unknown type": _t5(json_schema={"type": "strnig"}),
    "reference to itself": _t5(json_schema={"$ref": "#"}),
    "reference in a circle": _t5(
        json_schema={"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    ),
    "missing definition": _t5(json_schema={"$ref": "#/$defs/no"}),
    "everything refers to itself": _t5(json_schema={"allOf": [{"$ref": "#"}]}),
    # T6: what crashed an engine.
    "NUL in a regex": _door("T6", regex="a\0b"),
    "NUL in a pattern": _door("T6", json_schema={"type": "string", "pattern": "a\0"}),
    "lone surrogate": _door("T6", regex="a\ud800"),
    "class without line ends": _heavy("T6", json_schema={"type": "string", "pattern": r"^[^\n\r]{1,129}$"}),
    "chain of 5,000 definitions": _door("T6", json_schema=_chain(5000)),
    "chain of 400 definitions": _heavy("T6", json_schema=_chain(400)),
    "anyOf 1,000 deep": _door("T6", json_schema='{"anyOf":[' * 1000 + "{}" + ',{"type":"null"}]}' * 1000),
    "10,000 parentheses": _door("T6", regex="(" * 10_000 + "a" + ")" * 10_000),
    # T7: compiles without end.
    "arrays 200 deep": _door("T7", json_schema=_nested(200, "items", {})),
    "arrays 800 deep": _door("T7", json_schema=_nested(800, "items", {})),
    "arrays 31 deep": _heavy("T7", json_schema=_nested(31, "items", {})),
    "oneOf 15 deep": _heavy("T7", json_schema=_nested(15, "oneOf", {"type": "integer"})),
    "enum of 5,000": _door("T7", json_schema={"enum": [f"{index:05}" + "x" * 15 for index in range(5000)]}),
    "enum of 100,000": _door("T7", json_schema={"enum": list(range(100_000))}),
    "enum of 2,000": _heavy("T7", json_schema={"enum": [f"{index:05}" + "x" * 40 for index in range(2000)]}),
    "literal of 1 MB": _door("T7", json_schema={"const": "x" * 1_000_000}),
    "regex of 1 MB": _door("T7", regex="x" * 1_000_000),
    "ebnf of 1 MB": _door("T7", ebnf=f'root ::= "{"x" * 1_000_000}"'),
    "20,000 properties": _door("T7", json_schema=_optional(20_000)),
    "1,000 optional properties": _heavy("T7", json_schema=_optional(1000)),
    "300 optional, 5 needed": _heavy("T7", json_schema=_optional(300, minProperties=5)),
    "alternation of 15,000": _heavy("T7", regex="|".join(map(str, range(15_000)))),
    "pattern of words": _heavy("T7", json_schema={"type": "string", "pattern": "^([a-z]+ ?){1,100}$"}),
    # T7b: masks without end.
    "bounds times bounds": _heavy("T7b", regex=_SLOW_REGEX),
    "bounds three deep": _heavy("T7b", regex="(([a-z]{1,100}){1,100}){1,100}"),
    "bounds in ebnf": _heavy("T7b", ebnf="root ::= ([a-z]{1,1000}){1,1000}"),
    "ambiguous blanks": _heavy("T7b", ebnf='root ::= ws "a" ws\nws ::= ws ws | [ ]*'),
    "tag a billion times": _heavy("T7b", structural_tag=_REPEATED_TAG),
    "words": _heavy("T7b", regex="([a-z]+ ?){1,30}"),
    # T9: what an engine leaves out without a word.
    "allOf": _t9(
        {"allOf": [{"type": "integer", "minimum": 3}, {"$ref": "#/$defs/small"}], "$defs": {"small": {"maximum": 5}}},
        "/allOf",
        ("3", "5"),
        ("2", "6"),
    ),
    "uniqueItems": _t9({**_INTEGERS, "uniqueItems": True}, "/uniqueItems", ("[]", "[1, 2]"), ("[1, 1]",)),
    "contains": _t9({**_INTEGERS, "contains": {"const": 7}}, "/contains", ("[7]", "[1, 7]"), ("[]", "[1]")),
    "not": _t9({"type": "integer", "not": {"enum": [3, 4]}}, "/not", ("2", "5"), ("3", "4")),
    "if": _t9(
        _Ab({"if": {"properties": {"a": {"const": 1}}, "required": ["a"]}, "then": {"required": ["b"]}}).schema,
        "/if",
        ('{"a": 1, "b": 0}', '{"a": 2}', "{}"),
        ('{"a": 1}',),
    ),
    "dependentRequired": _t9(
        _Ab({"dependentRequired": {"a": ["b"]}}).schema,
        "/dependentRequired",
        ('{"a": 1, "b": 2}', '{"b": 2}'),
        ('{"a": 1}',),
    ),
    "oneOf": _t9(
        {"oneOf": [{"type": "integer", "minimum": 2}, {"type": "integer", "maximum": 4}]},
        "/oneOf",
        ("1", "5"),
        ("2", "3", "4"),
    ),
    "unknown format": _t9({"type": "string", "format": "iban"}, "/format", (), ()),
    "pattern and maxLength": _t9(
        {"type": "string", "pattern": "^[ab]+$", "maxLength": 3}, "/maxLength", ('"ab"', '"bbb"'), ('"abab"', '"c"')
    ),
    "multipleOf": _t9({"type": "number", "multipleOf": 0.5}, "/multipleOf", ("1.5", "2"), ("0.3",)),
    "required alone": _t9({"type": "object", "required": ["a"]}, "/required", ('{"a": 1}',), ("{}", '{"b": 1}')),
    "remote reference": _t9({"$ref": "https://example.com/schema.json"}, "/$ref", (), ()),
    "anchor inside": Hostile("T9", {"regex": "abc$x"}, refuses=("abcx", "abc", "abc$x")),
    "uniqueItems in a tag": Hostile(
        "T9",
        {
            "structural_tag": {
                "format": {"type": "json_schema", "json_schema": {**_INTEGERS, "uniqueItems": True}},
            }
        },
        takes=("[1, 2]",),
        refuses=("[1, 1]",),
        path="/uniqueItems",
    ),
    # T11: no way on.
    "rule of itself": Hostile("T11", {"ebnf": "root ::= root"}, must_fail=True),
    "rules in a circle": Hostile("T11", {"ebnf": 'a ::= b\nb ::= a\nroot ::= "x" a'}, must_fail=True),
}
