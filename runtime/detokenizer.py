"""Token ids to text while they arrive: whole characters only, and never the text of a stop string.

A token is turned into bytes, not text, and the bytes go through an incremental UTF-8 decoder: a character that is split
over tokens waits there, and a token costs the same however long the output is. The text then passes the stop search,
which holds back what may still become a stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Final, Protocol

_LONGEST_INCOMPLETE_BYTES: Final = 3


class TokenPieces(Protocol):
    """What the detokenizer asks of a tokenizer."""

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that are left out of the text unless asked for."""

    def piece(self, token_id: int, previous_id: int | None) -> bytes:
        """Returns the bytes that a token adds to a text after ``previous_id`` (None: at its beginning)."""


class IncrementalDetokenizer:
    """The text of one output, in deltas whose concatenation is the whole text.

    The whole text is what the output adds to the decoded prompt. A character that the prompt began and the output
    completes belongs to the output; one that the output does not go on with is left out. Bytes that are no UTF-8 become
    U+FFFD, as soon as it is sure that they are none.

    The output ends at the stop string that begins first; of several that begin at the same place, the shortest. While a
    stop string that begins earlier may still be completed, a later one that is complete waits: what is found depends
    on the text alone, not on how it was cut into tokens. ``finish`` settles such a case, so ``stopped`` may be set by
    it too.

    Args:
        tokenizer: Gives the bytes of each token.
        prompt_token_ids: The prompt; only its end is looked at.
        stop: Texts that end the output; none may be empty.
        include_stop: Whether the stop string found is part of the text.
        skip_special_tokens: Whether special tokens give no text.

    Raises:
        ValueError: A stop string is empty.
    """

    def __init__(
        self,
        tokenizer: TokenPieces,
        prompt_token_ids: Sequence[int],
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self.stopped: str | None = None
        """The stop string that ended the output, None while there is none."""
        self._tokenizer = tokenizer
        self._skipped_ids = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._stops = _StopSearch(stop, include_stop)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._previous_id, self._prompt_bytes = self._end_of_prompt(prompt_token_ids)
        self._utf8.decode(self._prompt_bytes)
        self._finished = False

    def push(self, token_id: int) -> str:
        """Returns the text that may be shown now that ``token_id`` came; nothing after a stop string was found.

        Raises:
            RuntimeError: The output was finished.
        """
        if self._finished:
            raise RuntimeError(f"detokenizer: token {token_id} pushed after finish")
        if self.stopped is not None or token_id in self._skipped_ids:
            return ""
        added = self._tokenizer.piece(token_id, self._previous_id)
        self._previous_id = token_id
        if added and self._prompt_bytes:
            if not _is_incomplete(self._prompt_bytes + added[:1], may_be_complete=True):
                self._utf8.reset()
            self._prompt_bytes = b""
        return self._search(self._utf8.decode(added), at_end=False)

    def finish(self) -> str:
        """Returns the text that was held back; an incomplete character at the very end becomes U+FFFD."""
        if self._finished or self.stopped is not None:
            self._finished = True
            return ""
        self._finished = True
        if self._prompt_bytes:
            self._utf8.reset()
        return self._search(self._utf8.decode(b"", final=True), at_end=True)

    def _search(self, text: str, *, at_end: bool) -> str:
        shown, self.stopped = self._stops.push(text, at_end=at_end)
        return shown

    def _end_of_prompt(self, prompt_token_ids: Sequence[int]) -> tuple[int | None, bytes]:
        """Returns the last token of the prompt that gives text, and the bytes of a character it leaves incomplete."""
        tail = b""
        last_id: int | None = None
        for index in range(len(prompt_token_ids) - 1, -1, -1):
            token_id = prompt_token_ids[index]
            if token_id in self._skipped_ids:
                continue
            last_id = token_id if last_id is None else last_id
            # Whether a blank at the very beginning of the prompt is dropped cannot matter to an incomplete character.
            tail = self._tokenizer.piece(token_id, token_id) + tail
            if len(tail) >= _LONGEST_INCOMPLETE_BYTES:
                break
        tail = tail[-_LONGEST_INCOMPLETE_BYTES:]
        starts = (at for at in range(len(tail)) if _is_incomplete(tail[at:], may_be_complete=False))
        return last_id, tail[next(starts, len(tail)) :]


class _StopSearch:
    """Finds the first stop string in a text that comes in pieces, and holds back what may be the beginning of one."""

    def __init__(self, stop: Sequence[str], include_stop: bool) -> None:
        for index, text in enumerate(stop):
            if not text:
                raise ValueError(f"stop[{index}] must not be empty")
        self._stop = tuple(sorted(set(stop), key=lambda text: (len(text), text)))
        self._longest = len(self._stop[-1]) if self._stop else 0
        self._include_stop = include_stop
        self._held = ""

    def push(self, added: str, *, at_end: bool) -> tuple[str, str | None]:
        """Returns the text to show and the stop string found; what was held is searched again with what came."""
        text = self._held + added
        self._held = ""
        found_at, found = self._first_match(text)
        undecided_at = len(text) if at_end else self._first_beginning(text)
        if found is not None and found_at <= undecided_at:
            return text[: found_at + len(found) * self._include_stop], found
        self._held = text[undecided_at:]
        return text[:undecided_at], None

    def _first_match(self, text: str) -> tuple[int, str | None]:
        """Returns where the first stop string begins and which it is; they are tried from short to long."""
        first_at, first = len(text), None
        for stop in self._stop:
            at = text.find(stop, 0, first_at + len(stop))
            if 0 <= at < first_at:
                first_at, first = at, stop
        return first_at, first

    def _first_beginning(self, text: str) -> int:
        """Returns where the longest end of ``text`` that begins a stop string starts."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            end = text[at:]
            if any(stop.startswith(end) for stop in self._stop):
                return at
        return len(text)


def _is_incomplete(data: bytes, *, may_be_complete: bool) -> bool:
    """Returns whether ``data`` is the beginning of one character, or all of it if ``may_be_complete``."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        text = decoder.decode(data)
    except UnicodeDecodeError:
        return False
    return text == "" or may_be_complete
