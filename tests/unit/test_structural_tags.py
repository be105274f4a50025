"""Structural tags: nothing in them is overlooked, and what is wrong is refused by its path."""

from __future__ import annotations

from typing import Any

import pytest
from schema_texts import taker

from grammar_sync.engines.prepared import CompileError

CALL = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": {"const": 1}}, "end": "</f>"}


def _content(**fields: Any) -> dict[str, Any]:
    return {"format": {"type": "tag", "begin": "<f>", "content": fields, "end": "</f>"}}


def _structure(**fields: Any) -> dict[str, Any]:
    return {"structures": [{"begin": "<f>", "end": "</f>", **fields}], "triggers": ["<f"]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"format": CALL, "foo": 1}, r"/foo is no field of a structural tag: these are type, format"),
    ({**_structure(schema=True), "format": CALL}, "/structures is no field of a structural tag"),
    ({**_structure(schema=True), "trigger": []}, "/trigger is no field of a structural tag"),
    ({"format": {"type": "any_text", "excludess": ["a"]}}, "/format/excludess is no field of a format of type any_te"),
    ({"format": {**CALL, "contents": {}}}, "/format/contents is no field of a format of type tag"),
    (_content(type="json_schema", json_schema={}, strict=False), "/format/content/strict is no field of"),
    (_content(type="json_schema", json_schema={}, any_order=True), "/format/content/any_order cannot be enforced"),
    (_content(type="json_schema", json_schema={}, excludes=["a"]), "/format/content/excludes cannot be enforced"),
    (_content(type="regexp", pattern="a"), "/format/content/type is 'regexp', expected one of any_text"),
    (_content(pattern="a"), "/format/content/type is missing, expected one of any_text"),
    ({"format": {"type": "triggered_tags", "triggers": ["<"], "tags": [{**CALL, "ends": ""}]}},
     "/format/tags/0/ends is no field of a format of type tag"),
    ({"format": {"type": "dispatch", "rules": [["a", {"type": "regex", "pattern": "a", "flags": "i"}]]}},
     "/format/rules/0/1/flags is no field of a format of type regex"),
    (_structure(schema=True, strict=False), "/structures/0/strict is no field of a structure"),
    (_structure(schema=True, json_schema=True), "/structures/0/schema is no field of a structure"),
    (_structure(schema="{"), "/structures/0/schema is no JSON: "),
    (_structure(schema='{"type": "string", "type": "null"}'),
     "/structures/0/schema is no JSON: the key 'type' stands twice in one object"),
    ({"format": {**CALL, "begin": "<\0>"}}, "/format/begin has a NUL character"),
    ({"format": {**CALL, "end": ["a", "\0"]}}, "/format/end/1 has a NUL character"),
    (_structure(begin="<\0>"), "/format/tags/0/begin has a NUL character"),
    (_content(type="grammar", grammar='root ::= "a" root'),
     "/format/content/grammar: the grammar allows no output at all: rule root never comes to an end"),
    (_content(type="grammar", grammar="root ::= ("), "/format/content/grammar: a parenthesis is never closed"),
]  # fmt: skip


@pytest.mark.parametrize(("tag", "message"), REFUSED)
def test_what_would_be_overlooked_is_refused_by_its_path(tag: dict[str, Any], message: str) -> None:
    with pytest.raises(CompileError, match=f"^{message}"):
        taker("xgrammar", structural_tag=tag)


@pytest.mark.parametrize(
    ("tag", "taken", "refused"),
    [
        ({"type": "structural_tag", "format": CALL}, "<f>1</f>", "<f>2</f>"),
        ({"format": {"type": "tags_with_separator", "tags": [CALL], "separator": ",", "at_least_one": True}},
         "<f>1</f>,<f>1</f>", ""),
        ({"format": {"type": "triggered_tags", "triggers": ["<f"], "excludes": [], "tags": [
            {"begin": "<f>", "content": {"type": "regex", "pattern": "[0-9]"}, "end": "</f>"}]}},
         "x<f>1</f>", "<f>a</f>"),
        (_structure(json_schema='{"const": 1}'), "x<f>1</f>y", "<f>2</f>"),
        (_content(type="grammar", grammar='root ::= "b" | "a" x\nx ::= "c" x'), "<f>b</f>", "<f>a"),
        (_content(type="json_schema", json_schema={"enum": ["a\0"]}, any_order=False), '<f>"a\\u0000"</f>', "<f>"),
    ],
)  # fmt: skip
def test_what_is_well_formed_is_taken(tag: dict[str, Any], taken: str, refused: str) -> None:
    grammar = taker("xgrammar", structural_tag=tag)
    assert grammar.takes(taken)
    assert not grammar.takes(refused)
