"""Matchers of both engines: rollback, copies and forced text, and what the engines do not say by themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from grammars import END, encode, small_vocabulary

from grammar_sync.engines.backend import GrammarBackend, Matcher, MatcherError, compile_spec
from grammar_sync.engines.llguidance_backend import LLGuidanceBackend
from grammar_sync.engines.prepared import CompileError
from grammar_sync.engines.xgrammar_backend import XGrammarBackend
from grammar_sync.spec import parse_grammar

VOCABULARY = small_vocabulary()
BACKENDS: dict[str, GrammarBackend] = {
    "xgrammar": XGrammarBackend(VOCABULARY),
    "llguidance": LLGuidanceBackend(VOCABULARY),
}
WORDS = -(-VOCABULARY.vocab_size // 32)


@pytest.fixture(params=sorted(BACKENDS))
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def matcher_of(engine: str, text: str, **fields: object) -> Matcher:
    spec = parse_grammar(fields)
    assert spec is not None
    matcher = compile_spec(BACKENDS[engine], spec)[1].new_matcher()
    assert all(matcher.accept(token_id) for token_id in encode(text))
    return matcher


def mask(matcher: Matcher) -> list[int]:
    words = torch.full((WORDS,), -1, dtype=torch.int32)
    matcher.fill(words)
    return words.tolist()


@pytest.mark.parametrize("more", [1, 31, 32, 3000])
def test_an_lm_head_wider_than_the_tokenizer_has_ids_that_are_never_allowed(engine: str, more: int) -> None:
    wide = replace(VOCABULARY, vocab_size=VOCABULARY.vocab_size + more)
    spec = parse_grammar({"regex": "[ab]+"})
    assert spec is not None
    matcher = compile_spec(type(BACKENDS[engine])(wide), spec)[1].new_matcher()  # type: ignore[call-arg] # both take one
    words = torch.full((-(-wide.vocab_size // 32),), -1, dtype=torch.int32)
    matcher.fill(words)
    assert words[:WORDS].tolist() == mask(matcher_of(engine, "", regex="[ab]+"))
    assert not words[WORDS:].any()


def test_s11_a_rollback_of_nothing_does_nothing(engine: str) -> None:
    matcher = matcher_of(engine, "ab", regex="abc")
    before = mask(matcher)
    matcher.rollback(0)
    assert mask(matcher) == before


def test_a_negative_rollback_is_an_error_and_changes_nothing(engine: str) -> None:
    matcher = matcher_of(engine, "ab", regex="abc")
    before = mask(matcher)
    with pytest.raises(ValueError, match="rollback of -1 tokens"):
        matcher.rollback(-1)
    assert mask(matcher) == before


def test_a_rollback_beyond_the_start_is_one_line(engine: str) -> None:
    matcher = matcher_of(engine, "ab", regex="abc")
    with pytest.raises(MatcherError) as caught:
        matcher.rollback(9)
    assert "\n" not in str(caught.value)


def test_a_rollback_takes_back_the_end(engine: str) -> None:
    matcher = matcher_of(engine, "abc", regex="abc")
    before = mask(matcher)
    assert matcher.accept(END)
    assert matcher.is_terminated()
    matcher.rollback(1)
    assert not matcher.is_terminated()
    assert mask(matcher) == before


def test_a_terminated_matcher_accepts_nothing_and_fills_nothing(engine: str) -> None:
    matcher = matcher_of(engine, "abc", regex="abc")
    assert matcher.accept(END)
    assert not matcher.accept(END)
    assert matcher.jump_forward() == ""
    with pytest.raises(MatcherError, match="terminated"):
        mask(matcher)


def test_copies_go_their_own_way(engine: str) -> None:
    matcher = matcher_of(engine, "a", regex="a(b|c)d")
    copy = matcher.copy()
    before = mask(matcher)
    assert copy.accept(encode("b")[0])
    assert mask(copy) == mask(matcher_of(engine, "ab", regex="a(b|c)d"))
    assert mask(matcher) == before
    copy.rollback(1)
    assert mask(copy) == before


@pytest.mark.parametrize(("written", "forced"), [("", "abc"), ("a", "bc"), ("abc", ""), ("abcx", "")])
def test_forced_text(engine: str, written: str, forced: str) -> None:
    assert matcher_of(engine, written, regex="abc(x|yz)").jump_forward() == forced


@pytest.mark.parametrize("source", ["root ::= foo", "root ::= (", 'root ::= "a', "rout ::= [a-z]"])
def test_a_wrong_ebnf_is_refused_in_one_line(engine: str, source: str) -> None:
    spec = parse_grammar({"ebnf": source})
    assert spec is not None
    with pytest.raises(CompileError) as caught:
        compile_spec(BACKENDS[engine], spec)
    assert "\n" not in str(caught.value)
