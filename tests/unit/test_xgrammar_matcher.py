"""xgrammar's matchers: rollback, copies and forced text, and what the engine does not say by itself."""

from __future__ import annotations

import pytest
import torch
from grammars import END, encode, small_vocabulary

from grammar_sync.backend import CompiledGrammar, MatcherError, compile_spec
from grammar_sync.spec import parse_grammar
from grammar_sync.xgrammar_backend import XGrammarBackend, XGrammarMatcher

VOCABULARY = small_vocabulary()
BACKEND = XGrammarBackend(VOCABULARY)
WORDS = -(-VOCABULARY.vocab_size // 32)


def compiled(**fields: object) -> CompiledGrammar:
    spec = parse_grammar(fields)
    assert spec is not None
    return compile_spec(BACKEND, spec)[1]


def matcher_of(text: str, **fields: object) -> XGrammarMatcher:
    matcher = compiled(**fields).new_matcher()
    assert isinstance(matcher, XGrammarMatcher)
    assert all(matcher.accept(token_id) for token_id in encode(text))
    return matcher


def mask(matcher: XGrammarMatcher) -> list[int]:
    words = torch.full((WORDS,), -1, dtype=torch.int32)
    matcher.fill(words)
    return words.tolist()


def test_a_rollback_of_nothing_does_nothing() -> None:
    matcher = matcher_of("ab", regex="abc")
    before = mask(matcher)
    matcher.rollback(0)
    assert mask(matcher) == before


def test_a_negative_rollback_is_an_error_and_changes_nothing() -> None:
    matcher = matcher_of("ab", regex="abc")
    before = mask(matcher)
    with pytest.raises(ValueError, match="rollback of -1 tokens"):
        matcher.rollback(-1)
    assert mask(matcher) == before


def test_a_rollback_beyond_the_start_is_one_line() -> None:
    matcher = matcher_of("ab", regex="abc")
    with pytest.raises(MatcherError) as caught:
        matcher.rollback(9)
    assert "\n" not in str(caught.value)


def test_a_rollback_takes_back_the_end() -> None:
    matcher = matcher_of("abc", regex="abc")
    before = mask(matcher)
    assert matcher.accept(END)
    assert matcher.is_terminated()
    matcher.rollback(1)
    assert not matcher.is_terminated()
    assert mask(matcher) == before


def test_a_terminated_matcher_accepts_nothing_and_fills_nothing() -> None:
    matcher = matcher_of("abc", regex="abc")
    assert matcher.accept(END)
    assert not matcher.accept(END)
    assert matcher.jump_forward() == ""
    with pytest.raises(MatcherError, match="terminated"):
        mask(matcher)


def test_copies_go_their_own_way() -> None:
    matcher = matcher_of("a", regex="a(b|c)d")
    copy = matcher.copy()
    before = mask(matcher)
    assert copy.accept(encode("b")[0])
    assert mask(copy) == mask(matcher_of("ab", regex="a(b|c)d"))
    assert mask(matcher) == before
    copy.rollback(1)
    assert mask(copy) == before


@pytest.mark.parametrize(("written", "forced"), [("", "abc"), ("a", "bc"), ("abc", ""), ("abcx", "")])
def test_forced_text(written: str, forced: str) -> None:
    assert matcher_of(written, regex="abc(x|yz)").jump_forward() == forced
