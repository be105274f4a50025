"""SCENARIOS T8, T10, T11, T13, T22 and the unnumbered ones on matchers: masks, ends, widths, recursion, whitespace."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from grammars import END, START, Speller, allowed_ids, encode, small_vocabulary
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoints import TOKENIZER_SIZE, write_tiny_checkpoint

from grammar_sync.engines.backend import CompiledGrammar, GrammarBackend, Matcher, compile_spec
from grammar_sync.engines.llguidance_backend import LLGuidanceBackend
from grammar_sync.engines.prepared import PreparedGrammar
from grammar_sync.engines.xgrammar_backend import XGrammarBackend
from grammar_sync.masks import MaskFiller, RowFault
from grammar_sync.spec import GrammarOptions, parse_grammar
from grammar_sync.vocabulary import GrammarVocabulary
from runtime.assembly import VocabularyMismatchError, grammar_vocabulary
from runtime.checkpoint import open_checkpoint
from runtime.tokenizer import Tokenizer

STOPS = (END, START)
VOCABULARY = small_vocabulary(stop_token_ids=STOPS)
BACKEND = XGrammarBackend(VOCABULARY)
FILLER = MaskFiller(VOCABULARY)
NODE: dict[str, object] = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["v", "next"],
        }
    },
    "$ref": "#/$defs/node",
}
GRAMMARS: dict[str, dict[str, object]] = {
    "object": {"json_object": True},
    "schema": {
        "json_schema": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "ok": {"type": "boolean"}},
            "required": ["name"],
        }
    },
    "recursive": {"json_schema": NODE},
    "enum": {"json_schema": {"enum": ["在线", "Sjöfart", "😀", 'a"b\\c\n', 3, None]}},
    "boolean": {"json_schema": {"type": "boolean"}},
    "regex": {"regex": r"([0-9]{4})-[0-9]{2}|[a-z]+( [a-z]+)*"},
    "unicode regex": {"regex": "[a-zа-яё]{2,5}"},
    "free text": {"regex": r"(.|\n)*"},
    "choice": {"choice": ["yes", "no", "yes and no", "né"]},
    "ebnf": {"ebnf": 'root ::= "(" root ")" | item\nitem ::= [a-c]+ ("," item)?'},
}


def compiled(fields: dict[str, object], backend: GrammarBackend = BACKEND) -> CompiledGrammar:
    spec = parse_grammar(fields)
    assert spec is not None
    return compile_spec(backend, spec)[1]


COMPILED = {name: compiled(fields) for name, fields in GRAMMARS.items()}
OF_ENGINE = {
    "xgrammar": COMPILED,
    "llguidance": {name: compiled(fields, LLGuidanceBackend(VOCABULARY)) for name, fields in GRAMMARS.items()},
}
_engines = st.sampled_from(sorted(OF_ENGINE))


def mask(matcher: Matcher, filler: MaskFiller = FILLER) -> set[int]:
    return set(allowed_ids(filler.fill([matcher]).words[0]))


def walk(matcher: Matcher, seed: int, steps: int) -> list[int]:
    """Moves along random allowed tokens; returns them."""
    draw = random.Random(seed)
    ids: list[int] = []
    while len(ids) < steps and not matcher.is_terminated():
        ids.append(draw.choice(sorted(mask(matcher))))
        assert matcher.accept(ids[-1])
    return ids


@settings(deadline=None, max_examples=80)
@given(engine=_engines, name=st.sampled_from(sorted(GRAMMARS)), seed=st.integers(0, 2**32), steps=st.integers(0, 24))
def test_t10_mask_and_accept_agree_at_every_state(engine: str, name: str, seed: int, steps: int) -> None:
    matcher = OF_ENGINE[engine][name].new_matcher()
    walk(matcher, seed, steps)
    if matcher.is_terminated():
        assert not any(matcher.copy().accept(token_id) for token_id in range(VOCABULARY.vocab_size))
        return
    allowed = mask(matcher)
    assert allowed
    assert allowed == {token_id for token_id in range(VOCABULARY.vocab_size) if matcher.copy().accept(token_id)}


@settings(deadline=None, max_examples=60)
@given(
    engine=_engines,
    name=st.sampled_from(sorted(GRAMMARS)),
    seed=st.integers(0, 2**32),
    steps=st.integers(0, 24),
    back=st.integers(0, 24),
)
def test_t22_rollback_copy_and_replay_lead_to_the_same_state(
    engine: str, name: str, seed: int, steps: int, back: int
) -> None:
    matcher = OF_ENGINE[engine][name].new_matcher()
    ids = walk(matcher, seed, steps)
    kept = ids[: max(0, len(ids) - back)]
    copy = matcher.copy()
    copy.rollback(len(ids) - len(kept))
    replayed = OF_ENGINE[engine][name].new_matcher()
    assert all(replayed.accept(token_id) for token_id in kept)
    assert copy.is_terminated() == replayed.is_terminated()
    assert copy.jump_forward() == replayed.jump_forward()
    if not replayed.is_terminated():
        assert mask(copy) == mask(replayed)
    assert all(copy.accept(token_id) for token_id in ids[len(kept) :])
    assert copy.is_terminated() == matcher.is_terminated()


@pytest.mark.parametrize("stop_id", STOPS)
def test_t10_every_eos_ends_and_none_is_text(stop_id: int) -> None:
    matcher = COMPILED["object"].new_matcher()
    for token_id in encode('{"a": "x'):
        assert matcher.accept(token_id)
    assert not mask(matcher) & set(STOPS), "inside a string"
    for token_id in encode('"}'):
        assert matcher.accept(token_id)
    assert mask(matcher) >= set(STOPS)
    assert matcher.accept(stop_id)
    assert matcher.is_terminated()


def test_t10_eos_is_the_union_of_tokenizer_generation_and_model_configuration(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path, "llama", eos_token_id=[0, 7])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9]}))
    tokenizer, config = Tokenizer.load(folder), open_checkpoint(folder).config
    union = tuple(sorted({*tokenizer.eos_token_ids, *config.eos_token_ids}))
    assert union == (0, 7, 9)
    vocabulary = grammar_vocabulary(tokenizer, config, union)
    matcher = compiled({"regex": "a"}, XGrammarBackend(vocabulary)).new_matcher()
    assert matcher.accept(tokenizer.encode("a")[0])
    assert mask(matcher, MaskFiller(vocabulary)) == {0, 7, 9}


def test_t11_a_grammar_that_leads_nowhere_is_a_fault_of_its_row_alone() -> None:
    # As no grammar that is read comes to the engine: it would be refused.
    unread = PreparedGrammar("xgrammar", "ebnf", 'root ::= "x" a\na ::= b\nb ::= a', GrammarOptions())
    dead = BACKEND.compile(unread).new_matcher()
    assert dead.accept(encode("x")[0])
    filled = FILLER.fill([COMPILED["choice"].new_matcher(), dead])
    assert filled.faults == [RowFault.NONE, RowFault.EMPTY]
    assert filled.messages == ["", "it allows no token at all"]


@pytest.mark.parametrize("vocab_size", [257, 320, 352])
def test_t13_widths(vocab_size: int) -> None:
    tokenizer_size = 257
    narrow = replace(small_vocabulary(), tokens=small_vocabulary().tokens[:tokenizer_size], vocab_size=vocab_size)
    filler = MaskFiller(narrow)
    matcher = compiled({"regex": r"(.|\n)*"}, XGrammarBackend(narrow)).new_matcher()
    words = filler.fill([matcher]).words[0]
    assert len(words) == narrow.blocks.mask_words == narrow.blocks.padded_size // 32
    allowed = set(allowed_ids(words))
    assert allowed <= set(range(tokenizer_size)), "neither the head's padding nor the blocks' is ever allowed"
    assert len(allowed) > 150


def test_t13_a_tokenizer_larger_than_the_lm_head_is_refused_at_start(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tiny_checkpoint(tmp_path / "large", "llama"))
    config = open_checkpoint(write_tiny_checkpoint(tmp_path / "small", "llama", vocab_size=257)).config
    with pytest.raises(VocabularyMismatchError, match=f"the tokenizer has {tokenizer.size} ids, .* only 257"):
        grammar_vocabulary(tokenizer, config, (0,))
    assert 257 < tokenizer.size <= TOKENIZER_SIZE


def test_t8_blanks_between_json_tokens_are_bounded() -> None:
    matcher = COMPILED["schema"].new_matcher()
    blank = encode(" ")[0]
    assert matcher.accept(encode("{")[0])
    count = 0
    while blank in mask(matcher):
        assert matcher.accept(blank)
        count += 1
        assert count < 64
    assert count == 21
    assert all(VOCABULARY.tokens[token_id].startswith('"') for token_id in mask(matcher))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    alone = compiled({"json_schema": schema, "any_whitespace": False}).new_matcher()
    assert alone.accept(encode("{")[0])
    assert blank not in mask(alone)


def test_recursion_works_to_depth_300() -> None:
    value: object = None
    for depth in range(300):
        value = {"v": depth, "next": value}
    matcher, speller = COMPILED["recursive"].new_matcher(), Speller(VOCABULARY)
    for position, token_id in enumerate(speller.ids(json.dumps(value))):
        if position % 97 == 0:
            assert token_id in mask(matcher)
        assert matcher.accept(token_id)
    assert mask(matcher) >= {END}


@pytest.mark.parametrize("value", ["在线", "Sjöfart", "😀", 'a"b\\c\n', 3, None])
def test_unicode_values_match_exactly(value: object) -> None:
    matcher = COMPILED["enum"].new_matcher()
    assert all(matcher.accept(token_id) for token_id in Speller(VOCABULARY).ids(json.dumps(value, ensure_ascii=False)))
    assert mask(matcher) >= {END}


def test_a_vocabulary_of_whole_words_will_do() -> None:
    vocabulary = GrammarVocabulary(["</s>", "yes", "no", "maybe"], "raw", 4, (0,))
    matcher = compiled({"choice": ["yes", "no"]}, XGrammarBackend(vocabulary)).new_matcher()
    assert mask(matcher, MaskFiller(vocabulary)) == {1, 2}


def test_a_reused_row_is_reset_before_it_is_filled() -> None:
    matcher = COMPILED["choice"].new_matcher()
    first = FILLER.fill([matcher]).words
    first.zero_()
    again = FILLER.fill([matcher]).words
    assert again.data_ptr() != first.data_ptr() or bool(again.any())
    assert torch.equal(again, FILLER.fill([matcher]).words)
