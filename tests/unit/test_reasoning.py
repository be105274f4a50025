"""Thinking first: when it ends, what is forced and banned, and that masks and matchers agree at every state."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from grammars import END, START, THINK, allowed_ids, encode, small_vocabulary
from hypothesis import given, settings
from hypothesis import strategies as st
from thinking_models import ADDED, TEXT_END, TRICKY_END, piece, reasoning

from grammar_sync.engines.backend import Matcher, compile_spec
from grammar_sync.engines.xgrammar_backend import XGrammarBackend
from grammar_sync.reasoning import Phase, ReasoningMatcher, ReasoningVocabulary, ThinkingState
from grammar_sync.spec import parse_grammar
from grammar_sync.thinking import ReasoningMarkers, ThinkingRules
from grammar_sync.vocabulary import VocabularyError

VOCABULARY = small_vocabulary()
BACKEND = XGrammarBackend(VOCABULARY)
WORDS = -(-VOCABULARY.vocab_size // 32)


def matcher_of(rules: ThinkingRules, end: str = TEXT_END, **fields: object) -> ReasoningMatcher:
    inner: Matcher | None = None
    if fields:
        spec = parse_grammar(fields)
        assert spec is not None
        inner = compile_spec(BACKEND, spec)[1].new_matcher()
    return ReasoningMatcher(ThinkingState(reasoning(end), rules), inner)


def mask(matcher: Matcher) -> set[int]:
    """Returns the ids allowed next; none once the matcher has terminated."""
    if matcher.is_terminated():
        return set()
    words = torch.full((WORDS,), -1, dtype=torch.int32)
    matcher.fill(words)
    return {token_id for token_id in allowed_ids(words) if token_id < VOCABULARY.vocab_size}


def accept_all(matcher: Matcher, ids: Sequence[int]) -> None:
    for token_id in ids:
        assert token_id in mask(matcher)
        assert matcher.accept(token_id)


def test_the_grammar_begins_after_the_end_marker() -> None:
    matcher = matcher_of(ThinkingRules(before_grammar=True), regex="yes|no")
    accept_all(matcher, encode("let me see, { yes"))
    assert set(encode("q")) <= mask(matcher)
    accept_all(matcher, encode(TEXT_END))
    assert {piece(token_id)[:1] for token_id in mask(matcher)} == {b"y", b"n"}
    accept_all(matcher, encode("yes"))
    assert mask(matcher) == {END}
    accept_all(matcher, [END])
    assert matcher.is_terminated()


def test_an_output_cannot_end_while_it_thinks_before_a_grammar() -> None:
    assert END not in mask(matcher_of(ThinkingRules(before_grammar=True), regex="a"))
    assert END in mask(matcher_of(ThinkingRules()))
    free = matcher_of(ThinkingRules())
    accept_all(free, [*encode(TEXT_END), END, END])
    assert not free.is_terminated(), "a free answer ends by the sequence's own rules"


def test_the_start_marker_is_written_where_the_prompt_has_none() -> None:
    matcher = matcher_of(ThinkingRules(writes_start=True, before_grammar=True), regex="a")
    assert mask(matcher) == {THINK}
    assert not matcher.accept(encode("x")[0])
    accept_all(matcher, [THINK, *encode("x</think>a"), END])


@pytest.mark.parametrize("end", [TEXT_END, TRICKY_END, "<|start|>"])
@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_used_up_budget_forces_the_end_marker_token_by_token(budget: int, end: str) -> None:
    matcher = matcher_of(ThinkingRules(budget=budget, before_grammar=True), end, regex="a")
    accept_all(matcher, [encode("x")[0]] * budget)
    for token_id in reasoning(end).markers.end_ids:
        assert mask(matcher) == {token_id}
        assert not matcher.accept(encode("y")[0])
        assert matcher.accept(token_id)
    assert mask(matcher) == set(encode("a"))


def test_strict_thinking_bans_added_tokens_but_the_end_marker() -> None:
    assert mask(matcher_of(ThinkingRules())) >= {END, START, THINK}
    assert not mask(matcher_of(ThinkingRules(strict=True))) & {END, START, THINK}
    strict = mask(matcher_of(ThinkingRules(strict=True), "<|start|>"))
    assert strict & set(ADDED) == {START}


@pytest.mark.parametrize("end", [TEXT_END, TRICKY_END])
def test_the_end_marker_is_found_however_tokens_cut_it(end: str) -> None:
    single = [[encode(letter)[0] for letter in end], list(encode(end))]
    for before in ("", "a", "aba", "abab", "<", "</", "</thin", "<<//"):
        for ids in single:
            state = ThinkingState(reasoning(end), ThinkingRules())
            assert all(state.accept(token_id) for letter in before for token_id in encode(letter))
            for token_id in ids:
                assert state.phase is Phase.THINK
                assert state.accept(token_id)
            assert state.phase is Phase.ANSWER
            assert state.reasoning_tokens == len(before) + len(ids)


def test_one_added_token_is_no_text() -> None:
    state = ThinkingState(reasoning("<|start|>"), ThinkingRules())
    assert all(state.accept(encode(letter)[0]) for letter in "<|start|>")
    assert state.phase is Phase.THINK
    assert state.accept(START)
    assert state.answers


def test_a_token_that_goes_on_beyond_the_end_marker_is_never_drawn() -> None:
    end = "he"
    long = [token_id for token_id in range(VOCABULARY.vocab_size) if piece(token_id).startswith(b"hel")]
    assert long, "the small vocabulary has a token that begins with hel"
    matcher = matcher_of(ThinkingRules(), end)
    assert not set(long) & mask(matcher)
    assert not matcher.accept(long[0])
    assert matcher.accept(encode("h")[0])
    crossing = [token_id for token_id in range(VOCABULARY.vocab_size) if piece(token_id)[:1] == b"e" != piece(token_id)]
    assert crossing
    assert not set(crossing) & mask(matcher)


def test_a_marker_that_its_own_tokens_do_not_spell_is_refused() -> None:
    markers = ReasoningMarkers("<think>", TEXT_END, (THINK,), tuple(encode("</thinx>")), end_is_token=False)
    with pytest.raises(VocabularyError, match="cannot write the reasoning marker '</think>'"):
        ReasoningVocabulary(VOCABULARY, markers, ADDED, piece)


_rules = st.builds(
    ThinkingRules,
    writes_start=st.booleans(),
    budget=st.one_of(st.none(), st.integers(0, 6)),
    strict=st.booleans(),
    before_grammar=st.just(True),
)
_ends = st.sampled_from([TEXT_END, TRICKY_END, "he", "<|start|>"])


def walk(matcher: ReasoningMatcher, draw: random.Random, end: str, steps: int) -> list[int]:
    """Moves ``matcher`` along random allowed tokens, those of the end marker more often; returns them."""
    wanted = {*reasoning(end).markers.end_ids, *(encode(letter)[0] for letter in end)}
    ids: list[int] = []
    while len(ids) < steps and not matcher.is_terminated():
        allowed = mask(matcher)
        likely = sorted(allowed & wanted)
        token_id = draw.choice(likely if likely and draw.random() < 0.7 else sorted(allowed))
        assert matcher.accept(token_id)
        ids.append(token_id)
    return ids


@settings(deadline=None, max_examples=40)
@given(rules=_rules, end=_ends, seed=st.integers(0, 2**32), steps=st.integers(0, 14))
def test_mask_and_accept_agree_while_it_thinks_and_after(rules: ThinkingRules, end: str, seed: int, steps: int) -> None:
    matcher = matcher_of(rules, end, regex="[ab]{1,4}c")
    walk(matcher, random.Random(seed), end, steps)
    if matcher.is_terminated():
        return
    allowed = mask(matcher)
    assert allowed
    assert allowed == {token_id for token_id in range(VOCABULARY.vocab_size) if matcher.copy().accept(token_id)}


@settings(deadline=None, max_examples=60)
@given(rules=_rules, end=_ends, seed=st.integers(0, 2**32), steps=st.integers(0, 14), back=st.integers(0, 14))
def test_rollback_and_copy_equal_a_fresh_replay(
    rules: ThinkingRules, end: str, seed: int, steps: int, back: int
) -> None:
    matcher = matcher_of(rules, end, regex="[ab]{1,4}c")
    ids = walk(matcher, random.Random(seed), end, steps)
    copy, kept = matcher.copy(), ids[: max(0, len(ids) - back)]
    matcher.rollback(len(ids) - len(kept))
    fresh = matcher_of(rules, end, regex="[ab]{1,4}c")
    assert all(fresh.accept(token_id) for token_id in kept)
    assert mask(matcher) == mask(fresh)
    assert matcher.jump_forward() == fresh.jump_forward()
    copy.rollback(len(ids) - len(kept))
    assert mask(copy) == mask(fresh), "the copy had a history of its own"


@settings(deadline=None, max_examples=60)
@given(rules=_rules, end=_ends, seed=st.integers(0, 2**32))
def test_thinking_keeps_its_budget_and_ends_exactly_with_the_marker(rules: ThinkingRules, end: str, seed: int) -> None:
    state = ThinkingState(reasoning(end), rules)
    inner = compile_spec(BACKEND, parse_grammar({"regex": "a"}) or pytest.fail("no grammar"))[1].new_matcher()
    ids = walk(ReasoningMatcher(state, inner), random.Random(seed), end, 60)
    text = b"".join(map(piece, ids[: state.reasoning_tokens]))
    if not state.answers:
        assert rules.budget is None
        return
    assert text.endswith(end.encode())
    assert end == "<|start|>" or text.find(end.encode()) == len(text) - len(end) or rules.budget is not None
    if rules.budget is not None:
        longest = max(len(end), len(reasoning(end).markers.end_ids))
        assert state.reasoning_tokens <= rules.writes_start + rules.budget + longest


@pytest.mark.parametrize("count", [-1, 3])
def test_a_rollback_out_of_range_is_an_error(count: int) -> None:
    state = ThinkingState(reasoning(), ThinkingRules())
    assert all(state.accept(token_id) for token_id in encode("x"))
    with pytest.raises(ValueError, match=f"rollback of {count} tokens"):
        state.rollback(count)
