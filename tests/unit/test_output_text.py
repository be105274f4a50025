"""What was thought and what was answered, apart, however tokens cut them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from grammars import END, START, THINK, encode
from thinking_models import reasoning, tokenizer

from grammar_sync.reasoning import ThinkingState
from grammar_sync.thinking import ThinkingRules
from runtime.output_text import OutputText, TextDelta

PROMPT = encode("prompt")


def output(rules: ThinkingRules | None, end: str = "</think>", stop: Sequence[str] = ()) -> OutputText:
    state = None if rules is None else ThinkingState(reasoning(end), rules)
    return OutputText(tokenizer(), PROMPT, stop, state)


def texts(made: OutputText, ids: Sequence[int]) -> tuple[str, str]:
    """Returns what was thought and what was answered."""
    deltas = [*map(made.push, ids), made.finish()]
    return "".join(delta.reasoning for delta in deltas), "".join(delta.text for delta in deltas)


def letters(text: str) -> list[int]:
    return [token_id for letter in text for token_id in encode(letter)]


@pytest.mark.parametrize("spell", [encode, letters])
def test_a_marker_in_the_text_is_part_of_neither(spell: object) -> None:
    assert callable(spell)
    ids = [*spell("hm, < </thin </think>"), *spell("yes </think> no")]
    made = output(ThinkingRules())
    assert texts(made, ids) == ("hm, < </thin ", "yes </think> no")
    assert made.reasoning_tokens == len(spell("hm, < </thin </think>"))


def test_a_marker_that_is_a_token_is_part_of_neither() -> None:
    made = output(ThinkingRules(writes_start=True), "<|start|>")
    assert texts(made, [THINK, *encode("hm"), START, *encode("yes")]) == ("hm", "yes")
    assert made.reasoning_tokens == 2 + len(encode("hm"))


def test_no_part_of_a_marker_is_shown_before_it_is_sure() -> None:
    made = output(ThinkingRules())
    shown = [made.push(token_id) for token_id in letters("a</thi")]
    assert shown == [TextDelta("a")] + [TextDelta()] * 5
    assert made.finish() == TextDelta("</thi")


def test_thinking_that_was_cut_is_all_there_is() -> None:
    made = output(ThinkingRules())
    assert texts(made, encode("hello world")) == ("hello world", "")
    assert made.reasoning_tokens == len(encode("hello world"))


def test_stop_strings_are_looked_for_in_the_answer_alone() -> None:
    made = output(ThinkingRules(), stop=["STOP"])
    ids = [*letters("a STOP b</think>"), *letters("c STOP d")]
    assert texts(made, ids) == ("a STOP b", "c ")
    assert made.stopped == "STOP"


def test_an_output_that_does_not_think_is_all_answer() -> None:
    made = output(None)
    assert texts(made, [*encode("a</think>b"), END]) == ("", "a</think>b")
    assert made.reasoning_tokens is None
