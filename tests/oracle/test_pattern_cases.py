"""Every pattern, regex and format of the case file: read, or refused with a reason, and true to its texts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from grammar_sync.regular.chars import RegularError
from grammar_sync.regular.formats import format_language
from grammar_sync.regular.language import not_pattern, pattern, whole_regex

CASES = Path(__file__).resolve().parents[3] / "shared" / "cases" / "grammars.jsonl"
pytestmark = pytest.mark.skipif(not CASES.exists(), reason=f"no case file at {CASES}")

TEXTS = [
    "",
    "a",
    "A-9",
    "x-1",
    "0",
    "12",
    "/a/",
    "a b",
    "v1",
    "é",
    "🐲🐲",
    "foo.png",
    "192.168.0.1/8",
    "-",
    "a\n",
    "日本",
]


def cases(kind: str) -> list[dict[str, Any]]:
    return [case for case in map(json.loads, CASES.read_text().splitlines()) if case["kind"] == kind]


def patterns_in(value: object) -> Iterator[str]:
    """Yields the patterns of a schema."""
    if isinstance(value, dict):
        if isinstance(value.get("pattern"), str):
            yield value["pattern"]
        if isinstance(value.get("patternProperties"), dict):
            yield from value["patternProperties"]
        for inner in value.values():
            yield from patterns_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from patterns_in(inner)


def test_patterns_are_read_as_python_reads_them() -> None:
    found = dict.fromkeys(text for case in cases("json_schema") for text in patterns_in(case["spec"]))
    refused: dict[str, str] = {}
    for text in found:
        try:
            language, others = pattern(text), not_pattern(text)
            language.to_regex(json_encoded=True)
        except RegularError as error:
            refused[text] = str(error)
            continue
        for candidate in TEXTS:
            matches = bool(re.search(text, candidate))
            assert not language.fullmatch(candidate) or matches, (text, candidate)
            assert not others.fullmatch(candidate) or not matches, (text, candidate)
            assert language.fullmatch(candidate) == matches or not candidate.isascii() or "\n" in candidate
    print(f"{len(found) - len(refused)} of {len(found)} patterns read; refused: {refused}")
    assert len(refused) <= 0.02 * len(found)


def test_regexes_take_their_texts_only() -> None:
    for case in cases("regex"):
        language = whole_regex(case["spec"])
        rewritten = language.to_regex()
        for text in case["accept"]:
            assert language.fullmatch(text), (case["id"], text)
            assert re.fullmatch(rewritten, text), (case["id"], text)
        for text in case["reject"]:
            assert not language.fullmatch(text), (case["id"], text)
            assert not re.fullmatch(rewritten, text), (case["id"], text)


def checker_of_languages() -> jsonschema.FormatChecker:
    """A format checker that asks this package alone."""
    checker = jsonschema.FormatChecker(formats=())
    for name in {name for case in cases("json_schema") for name in formats_in(case["spec"])}:
        language = format_language(name)
        if language is not None:
            checker.checks(name)(
                lambda value, language=language: not isinstance(value, str) or language.fullmatch(value)
            )
    return checker


def formats_in(value: object) -> Iterator[str]:
    """Yields the names of a schema's formats."""
    if isinstance(value, dict):
        if isinstance(value.get("format"), str):
            yield value["format"]
        for inner in value.values():
            yield from formats_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from formats_in(inner)


def test_formats_refuse_what_the_cases_refuse() -> None:
    checker = checker_of_languages()
    refused, missed, taken = 0, [], 0
    for case in cases("json_schema"):
        if not isinstance(case["spec"], dict) or not any(map(format_language, formats_in(case["spec"]))):
            continue
        validator = jsonschema.validators.validator_for(case["spec"])(case["spec"], format_checker=checker)
        for text in case["accept"]:
            assert validator.is_valid(json.loads(text)), (case["id"], text)
            taken += 1
        for text in case.get("reject_format", ()):
            if validator.is_valid(json.loads(text)):
                missed.append((case["id"], text))
            refused += 1
    print(f"{taken} texts taken; {refused - len(missed)} of {refused} refused; missed: {missed}")
    assert not [text for name, text in missed if not re.search("base64|regex|selector", text)]
