from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runtime.detokenizer import IncrementalDetokenizer


class ByteTokenizer:
    """Token i is the i-th of the given byte strings; negative ids are special and spell their number."""

    special_token_ids = frozenset(range(-9, 0))

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces
        self.previous_ids: list[int | None] = []

    def piece(self, token_id: int, previous_id: int | None) -> bytes:
        self.previous_ids.append(previous_id)
        return f"<{token_id}>".encode() if token_id < 0 else self.pieces[token_id]


def deltas_of(
    output: Sequence[bytes], *, prompt: bytes = b"", stop: Sequence[str] = (), include_stop: bool = False
) -> tuple[list[str], str | None]:
    tokenizer = ByteTokenizer([*output, *(bytes([byte]) for byte in prompt)])
    prompt_ids = range(len(output), len(output) + len(prompt))
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids, stop, include_stop)
    deltas = [detokenizer.push(token_id) for token_id in range(len(output))]
    return [*deltas, detokenizer.finish()], detokenizer.stopped


def is_cut_short(data: bytes) -> bool:
    """Whether ``data`` is the beginning of one character."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data" and error.start == 0
    return False


def begun_character(prompt: bytes) -> bytes:
    return next((prompt[-length:] for length in (3, 2, 1) if is_cut_short(prompt[-length:])), b"")


def whole_text(prompt: bytes, output: bytes) -> str:
    """The text by definition: no streaming."""
    begun = begun_character(prompt)
    if not output or begun == b"":
        return output.decode(errors="replace")
    first = begun + output[:1]
    goes_on = is_cut_short(first) or "\ufffd" not in first.decode(errors="replace")
    return ((begun if goes_on else b"") + output).decode(errors="replace")


def cut_at_stop(text: str, stop: Sequence[str], include_stop: bool) -> tuple[str, str | None]:
    found = min(((text.find(s), len(s), s) for s in stop if s in text), default=None)
    if found is None:
        return text, None
    at, length, stop_string = found
    return text[: at + length * include_stop], stop_string


def test_a_stop_string_over_four_tokens_is_never_shown() -> None:
    deltas, stopped = deltas_of([b"ABC", b"DE", b"FG", b"HI", b"JKL", b"M"], stop=["DEFGHIJ"])
    assert deltas == ["ABC", "", "", "", "", "", ""]
    assert stopped == "DEFGHIJ"


def test_a_beginning_of_a_stop_string_is_released_once_it_cannot_go_on() -> None:
    deltas, stopped = deltas_of([b"ABC", b"DE", b"FG", b"X"], stop=["DEFGHIJ"])
    assert deltas == ["ABC", "", "", "DEFGX", ""]
    assert stopped is None


def test_a_beginning_of_a_stop_string_is_released_at_the_end() -> None:
    assert deltas_of([b"ABC", b"DEF"], stop=["DEFGHIJ"]) == (["ABC", "", "DEF"], None)


@pytest.mark.parametrize("output", [[b"a,b,c,d"], [b"a,b", b",c,d"], [b"a", b",", b"b", b",", b"c", b",", b"d"]])
def test_a_stop_string_inside_a_token_or_across_tokens(output: list[bytes]) -> None:
    deltas, stopped = deltas_of(output, stop=["b,c"])
    assert "".join(deltas) == "a,"
    assert stopped == "b,c"


def test_include_stop_shows_the_stop_string_and_nothing_after_it() -> None:
    deltas, stopped = deltas_of([b"a,b", b",c,d", b"e"], stop=["b,c"], include_stop=True)
    assert deltas == ["a,", "b,c", "", ""]
    assert stopped == "b,c"


def test_a_character_split_over_tokens_comes_whole() -> None:
    smile = "😀".encode()
    assert deltas_of([b"a", smile[:1], smile[1:3], smile[3:] + b"b"])[0] == ["a", "", "", "😀b", ""]


def test_a_character_that_is_never_completed_becomes_one_replacement_at_the_end() -> None:
    assert deltas_of([b"a", "😀".encode()[:3]])[0] == ["a", "", "\ufffd"]


def test_invalid_bytes_are_shown_as_soon_as_it_is_sure_that_they_are_invalid() -> None:
    assert deltas_of([b"\xff", b"\xf0\x9f", b"a", b"\xff" * 3])[0] == ["\ufffd", "", "\ufffda", "\ufffd" * 3, ""]


def test_a_replacement_character_that_the_model_wrote_is_not_held() -> None:
    assert deltas_of(["\ufffd".encode(), b"a"])[0] == ["\ufffd", "a", ""]


def test_a_character_begun_by_the_prompt_is_completed() -> None:
    smile = "😀".encode()
    assert deltas_of([smile[2:3], smile[3:], b"!"], prompt=b"hi " + smile[:2])[0] == ["", "😀", "!", ""]


def test_a_character_begun_by_three_tokens_of_the_prompt_is_completed() -> None:
    smile = "😀".encode()
    tokenizer = ByteTokenizer([bytes([byte]) for byte in smile])
    assert IncrementalDetokenizer(tokenizer, [0, 1, 2]).push(3) == "😀"


def test_a_character_begun_by_the_prompt_and_left_there_gives_nothing() -> None:
    assert deltas_of([b"a"], prompt="😀".encode()[:2])[0] == ["a", ""]
    assert deltas_of([], prompt="😀".encode()[:2])[0] == [""]


def test_a_stop_string_that_begins_earlier_wins_although_a_later_one_is_complete_first() -> None:
    assert deltas_of([b"xab", b"c", b"d!"], stop=["abcd", "bc"]) == (["x", "", "", ""], "abcd")
    assert deltas_of([b"xab", b"c", b"e!"], stop=["abcd", "bc"]) == (["x", "", "a", ""], "bc")


def test_finish_settles_a_stop_string_that_waited() -> None:
    assert deltas_of([b"xab", b"c"], stop=["abcd", "bc"]) == (["x", "", "a"], "bc")


def test_of_two_stop_strings_at_one_place_the_shorter_ends_at_once() -> None:
    assert deltas_of([b"xab", b"c"], stop=["abc", "ab"], include_stop=True) == (["xab", "", ""], "ab")


def test_special_tokens_give_no_text_unless_asked_for() -> None:
    tokenizer = ByteTokenizer([b"\xc3", b"\xa9"])
    hidden = IncrementalDetokenizer(tokenizer, [-1])
    assert [hidden.push(token_id) for token_id in (0, -2, 1)] == ["", "", "é"]
    shown = IncrementalDetokenizer(tokenizer, [-1], skip_special_tokens=False)
    assert [shown.push(token_id) for token_id in (-2, 0, 1)] == ["<-2>", "", "é"]


def test_the_end_of_the_prompt_is_found_behind_special_tokens() -> None:
    detokenizer = IncrementalDetokenizer(ByteTokenizer([b"\xc3", b"\xa9"]), [0, -1, -2])
    assert detokenizer.push(1) == "é"


def test_a_token_is_read_after_the_last_one_that_gave_text() -> None:
    tokenizer = ByteTokenizer([b"abc", b"d", b"e"])
    detokenizer = IncrementalDetokenizer(tokenizer, [0, -1])
    for token_id in (1, -2, 2):
        detokenizer.push(token_id)
    assert tokenizer.previous_ids[1:] == [0, 1]

    at_beginning = ByteTokenizer([b"a"])
    IncrementalDetokenizer(at_beginning, [-1]).push(0)
    assert at_beginning.previous_ids == [None]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stop\[1\] must not be empty"):
        IncrementalDetokenizer(ByteTokenizer([]), [], stop=["a", ""])


def test_a_push_after_finish_is_an_error() -> None:
    detokenizer = IncrementalDetokenizer(ByteTokenizer([b"a"]), [])
    detokenizer.finish()
    assert detokenizer.finish() == ""
    with pytest.raises(RuntimeError, match="after finish"):
        detokenizer.push(0)


def test_a_token_is_looked_at_once_however_long_the_output_is() -> None:
    tokenizer = ByteTokenizer([b"word "] * 2000)
    detokenizer = IncrementalDetokenizer(tokenizer, range(2000), stop=["nothing like it"])
    assert len(tokenizer.previous_ids) == 1
    for token_id in range(2000):
        detokenizer.push(token_id)
    assert len(tokenizer.previous_ids) == 1 + 2000


LETTERS = st.sampled_from([*"aabbcc,", "é", "😀", "\ufffd"])
OUTPUT = st.lists(st.one_of(LETTERS.map(str.encode), st.binary(max_size=3)), max_size=24).map(b"".join)
STOP = st.lists(st.lists(LETTERS, min_size=1, max_size=4).map("".join), max_size=4)


@settings(max_examples=600, deadline=None)
@given(prompt=OUTPUT, output=OUTPUT, cuts=st.sets(st.integers(0, 90)), stop=STOP, include_stop=st.booleans())
@example(prompt=b"\xf0\x9f", output=b"\x98a", cuts={1}, stop=[], include_stop=False)
@example(prompt=b"\xed", output=b"\xa0\x80", cuts={1}, stop=["\ufffd\ufffd"], include_stop=False)
def test_deltas_add_up_to_the_text_by_definition(
    prompt: bytes, output: bytes, cuts: set[int], stop: list[str], include_stop: bool
) -> None:
    borders = sorted({0, len(output), *(cut for cut in cuts if cut < len(output))})
    pieces = [output[begin:end] for begin, end in itertools.pairwise(borders)]
    expected = cut_at_stop(whole_text(prompt, output), stop, include_stop)
    deltas, stopped = deltas_of(pieces, prompt=prompt, stop=stop, include_stop=include_stop)
    assert ("".join(deltas), stopped) == expected
    if not include_stop:
        assert not any(text in "".join(deltas) for text in stop)


@settings(max_examples=300, deadline=None)
@given(output=st.lists(st.one_of(LETTERS.map(str.encode), st.binary(max_size=3)), max_size=24), stop=STOP)
def test_no_more_is_held_than_must_be(output: list[bytes], stop: list[str]) -> None:
    detokenizer = IncrementalDetokenizer(ByteTokenizer(output), [], stop)
    longest = max(map(len, stop), default=1)
    shown = ""
    for token_id in range(len(output)):
        shown += detokenizer.push(token_id)
        if detokenizer.stopped is not None:
            return
        seen = b"".join(output[: token_id + 1])
        whole = seen[: len(seen) - len(begun_character(seen))].decode(errors="replace")
        assert whole.startswith(shown)
        assert len(whole) - len(shown) < longest
