"""Texts walked through grammars: taken or not, where not, and what was expected there, whatever the tokenisation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from grammars import END, START, Speller, small_tokenizer, small_vocabulary
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar_sync.engines.backend import CompiledGrammar, Matcher, MatcherError, compile_spec
from grammar_sync.engines.xgrammar_backend import XGrammarBackend
from grammar_sync.expectation import describe
from grammar_sync.spec import parse_grammar
from grammar_sync.text_check import TextChecker, TextVerdict

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "mood": {"enum": ["red", "green", "grün"]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
VALUE = "'-', 0-9, a blank, a line end, a tab or a carriage return"
TAKEN: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": PERSON}, '{"name": "A", "age": 3}'),
    ({"json_schema": PERSON}, '{"name":"Ada",\n  "age":36, "mood": "grün"}'),
    ({"regex": "[a-f]{2,4}(x|yes)?"}, "ab"),
    ({"choice": ["😀", "😁", "é"]}, "😁"),
    # Encoded as the special token that ends an output; as text it is as good as any other.
    ({"json_schema": PERSON}, '{"name": "<|end|>", "age": 3}'),
    ({"regex": ".*"}, ""),
]
REFUSED: list[tuple[dict[str, Any], str, int, str]] = [
    ({"json_schema": PERSON}, "", 0, "'{'"),
    ({"json_schema": PERSON}, "<|end|>", 0, "'{'"),
    ({"json_schema": PERSON}, '{"nam', 5, "'e\"'"),
    ({"json_schema": PERSON}, '{"name": 3}', 9, "'\"', a blank, a line end, a tab or a carriage return"),
    ({"json_schema": PERSON}, '{"name": "A", "age": x', 21, VALUE),
    ({"json_schema": PERSON}, '{"name": "A", "age": 3, "mood": "blue"}', 33, "'gr' or 'red\"'"),
    ({"json_schema": PERSON}, '{"name": "A", "age": 3, "mood": "grä"}', 35, "'\\\\u00fcn\"', 'een\"' or 'ün\"'"),
    ({"json_schema": PERSON}, '{"name": "A", "age": 3}}', 23, "the end of the output"),
    ({"json_schema": PERSON}, '{"name": "a\nb"', 11, "any printable character"),
    ({"regex": "[a-f]{2,4}(x|yes)?"}, "abz", 2, "a-f, 'x', 'y' or the end of the output"),
    ({"regex": "[a-f]{2,4}(x|yes)?"}, "abcdeyes", 4, "'yes', 'x' or the end of the output"),
    ({"choice": ["😀", "😁", "é"]}, "😂", 0, "'é', '😀' or '😁'"),
    ({"choice": ["😀", "😁", "é"]}, "éé", 1, "the end of the output"),
    (
        {"regex": "[^x]*"},
        "aé😀x",
        3,
        "any printable character (but not 'x'), a line end, a tab, a carriage return or the end of the output",
    ),
    ({"regex": "a\n[0-9]"}, "a1", 1, "a line end"),
]


@cache
def checker(encode: Callable[[str], Sequence[int]] | None = None) -> TextChecker:
    torch.set_num_threads(1)
    return TextChecker(small_vocabulary(), encode or encoding)


@cache
def speller() -> Speller:
    return Speller(small_vocabulary())


def encoding(text: str) -> list[int]:
    ids: list[int] = small_tokenizer().encode(text, add_special_tokens=False).ids
    return ids


def byte_by_byte(text: str) -> list[int]:
    return [token_id for byte in text.encode() for token_id in speller().ids_of_bytes(bytes([byte]))]


def nonsense(text: str) -> list[int]:
    return [START, 10**9, -1]


@cache
def backend() -> XGrammarBackend:
    return XGrammarBackend(small_vocabulary())


def compiled(fields: dict[str, Any]) -> CompiledGrammar:
    spec = parse_grammar(fields)
    assert spec is not None
    return compile_spec(backend(), spec)[1]


@pytest.mark.parametrize("encode", [encoding, byte_by_byte, nonsense])
@pytest.mark.parametrize(("fields", "text"), TAKEN)
def test_taken_whole(fields: dict[str, Any], text: str, encode: Callable[[str], Sequence[int]]) -> None:
    assert checker(encode).check(compiled(fields), text) == TextVerdict(ok=True)


@pytest.mark.parametrize("encode", [encoding, byte_by_byte, nonsense])
@pytest.mark.parametrize(("fields", "text", "at", "expected"), REFUSED)
def test_refused_where_and_why(
    fields: dict[str, Any], text: str, at: int, expected: str, encode: Callable[[str], Sequence[int]]
) -> None:
    assert checker(encode).check(compiled(fields), text) == TextVerdict(ok=False, at=at, expected=expected)


def test_a_lone_surrogate_is_where_a_text_fails() -> None:
    verdict = checker().check(compiled({"regex": ".*"}), "ab\ud800")
    assert (verdict.ok, verdict.at, verdict.expected) == (False, 2, None)
    assert "surrogate" in str(verdict.error)


def shared_length(left: str, right: str) -> int:
    pairs = zip(left, right, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(left), len(right)))


TEXTS = st.text(alphabet="abé😀😁", max_size=4)


@settings(max_examples=60, deadline=None)
@given(st.lists(TEXTS.filter(bool), min_size=1, max_size=4, unique=True), TEXTS, st.booleans())
def test_of_a_choice_the_longest_common_beginning_counts(choices: list[str], text: str, as_bytes: bool) -> None:
    verdict = checker(byte_by_byte if as_bytes else encoding).check(compiled({"choice": choices}), text)
    common = max(shared_length(choice, text) for choice in choices)
    if text in choices:
        assert verdict == TextVerdict(ok=True)
        return
    assert (verdict.ok, verdict.at, verdict.error) == (False, common, None)
    possible = [choice[common:] for choice in choices if choice.startswith(text[:common])]
    assert ("the end of the output" in str(verdict.expected)) == ("" in possible)
    for rest in possible:
        assert rest[:1] in str(verdict.expected)


def test_start_tokens() -> None:
    start = checker().start_tokens(compiled({"regex": "a*"}))
    assert start.sample[0] == (END, "the end of the output")
    assert {text for _, text in start.sample[1:]} == {"a"}
    assert start.count == len(start.sample)


class BrokenMatcher:
    """Allows everything and takes three tokens, then the engine fails."""

    def __init__(self, left: int = 3) -> None:
        self._left = left

    def accept(self, token_id: int) -> bool:
        self._left -= 1
        return token_id >= 0

    def is_terminated(self) -> bool:
        return False

    def fill(self, words: torch.Tensor) -> None:
        if self._left <= 0:
            raise MatcherError("out of fuel")
        words.fill_(-1)

    def rollback(self, count: int) -> None:
        raise MatcherError(f"rollback of {count}")

    def copy(self) -> Matcher:
        return BrokenMatcher(self._left)

    def jump_forward(self) -> str:
        return ""


class Broken:
    size_bytes = 0

    def new_matcher(self) -> Matcher:
        return BrokenMatcher()


def test_an_engine_that_fails_is_told_as_such() -> None:
    verdict = checker(byte_by_byte).check(Broken(), "aébcd")
    assert verdict == TextVerdict(ok=False, at=2, error="out of fuel")


@pytest.mark.parametrize(
    ("alternatives", "may_end", "phrase"),
    [
        ([], True, "the end of the output"),
        ([], False, "nothing: the grammar allows no way on"),
        ([b"a", b"b"], False, "'a' or 'b'"),
        ([b"a", b"b", b"c", b"X", b"7", b"8"], False, "'7', '8', 'X' or a-c"),
        ([b"\xc3", b" ", b"\n"], True, "a character beyond ASCII, a blank, a line end or the end of the output"),
        (
            [bytes([byte]) for byte in range(128)],
            False,
            "any printable ASCII character, a line end, a tab or a carriage return",
        ),
        ([bytes([byte]) for byte in range(32, 256)], False, "any printable character"),
        (["é".encode(), b"true", b"t\xc3"], False, "'é', 'true' or 't'"),
    ],
)
def test_phrases(alternatives: Iterable[bytes], may_end: bool, phrase: str) -> None:
    assert describe(list(alternatives), may_end=may_end) == phrase
