"""Walks a text through a compiled grammar as generating would: is it taken whole, and if not, where and why not."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from grammar_sync.engines.backend import CompiledGrammar, Matcher, MatcherError
from grammar_sync.engines.token_bytes import token_bytes
from grammar_sync.expectation import END_OF_OUTPUT, describe
from grammar_sync.vocabulary import GrammarVocabulary

_MAX_ALTERNATIVES = 6
_MAX_FORCED_BYTES = 32
_DEADLINE_S = 10.0
_SHOWN_START_IDS = 16


class TextVerdict(msgspec.Struct, frozen=True):
    """What a grammar says of a text.

    Attributes:
        ok: Whether it takes the whole text and allows the output to end there.
        at: Where it refuses, in characters from the start; None when it does not.
        expected: What could stand there instead, in words; None when ``ok``.
        error: Why there is no telling, when the text is none or the engine failed on it.
    """

    ok: bool
    at: int | None = None
    expected: str | None = None
    error: str | None = None


class StartTokens(msgspec.Struct, frozen=True):
    """The tokens that may begin an output.

    Attributes:
        count: How many there are, the ids that end an output among them.
        sample: The ids and texts of some, the shortest first.
    """

    count: int
    sample: list[tuple[int, str]]


class TextChecker:
    """Checks texts against grammars of one vocabulary.

    A text is walked by the tokens of its own encoding, each of which must be in the mask and be accepted. Where one is
    not, the walk goes on with any allowed tokens that spell the text, the longest first. So the verdict is on the text:
    it depends on no tokenisation, and the place of a failure is exact wherever the vocabulary can spell every byte.

    Args:
        vocabulary: What the grammars are compiled for.
        encode: The tokenizer: text to ids, without special ones around it.
    """

    def __init__(self, vocabulary: GrammarVocabulary, encode: Callable[[str], Sequence[int]]) -> None:
        self._encode = encode
        self._vocab_size = vocabulary.vocab_size
        self._stop_ids = vocabulary.stop_token_ids
        self._spellings = token_bytes(vocabulary)
        self._ids: dict[bytes, list[int]] = {}
        for token_id, spelling in enumerate(self._spellings):
            if spelling:
                self._ids.setdefault(spelling, []).append(token_id)
        self._longest = max(map(len, self._ids), default=0)
        self._first_bytes = np.full(self._vocab_size, -1, dtype=np.int16)
        for token_id, spelling in enumerate(self._spellings):
            self._first_bytes[token_id] = spelling[0] if spelling else -1

    def check(self, compiled: CompiledGrammar, text: str) -> TextVerdict:
        """Returns what ``compiled`` says of ``text``."""
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            return TextVerdict(ok=False, at=error.start, error="a lone surrogate is no character of a text")
        walk = _Walk(self, compiled.new_matcher(), data, time.process_time() + _DEADLINE_S)
        try:
            walk.follow(self._encode(text))
            walk.spell(len(data))
            if walk.position == len(data) and walk.may_end():
                return TextVerdict(ok=True)
            character = len(data[: walk.position].decode(errors="ignore"))
            start = len(text[:character].encode())
            if start < walk.position:
                # The failure is inside a character: what is told is what could stand in its place.
                walk = _Walk(self, compiled.new_matcher(), data, walk.deadline_s)
                walk.spell(start)
            return TextVerdict(ok=False, at=character, expected=self._expected(walk.matcher))
        except MatcherError as error:
            character = len(data[: walk.position].decode(errors="ignore"))
            return TextVerdict(ok=False, at=character, error=str(error))

    def start_tokens(self, compiled: CompiledGrammar) -> StartTokens:
        """Returns what may begin an output.

        Raises:
            MatcherError: The engine failed.
        """
        allowed = np.nonzero(self.mask(compiled.new_matcher()))[0].tolist()
        shown = sorted(allowed, key=lambda token_id: (len(self._spelling(token_id)), token_id))[:_SHOWN_START_IDS]
        sample = [(token_id, self._shown(token_id)) for token_id in shown]
        return StartTokens(len(allowed), sample)

    def mask(self, matcher: Matcher) -> npt.NDArray[np.uint8]:
        """Returns which ids are allowed next, uint8 [vocab_size].

        Raises:
            MatcherError: The engine failed.
        """
        words = torch.full((-(-self._vocab_size // 32),), -1, dtype=torch.int32)
        matcher.fill(words)
        return np.unpackbits(words.numpy().view(np.uint8), count=self._vocab_size, bitorder="little")

    def spelled_by(self, mask: npt.NDArray[np.uint8], data: bytes, end: int) -> list[int]:
        """Returns the allowed ids that spell a beginning of ``data[:end]``, the longest first."""
        found: list[int] = []
        for length in range(min(self._longest, end), 0, -1):
            found += (token_id for token_id in self._ids.get(data[:length], ()) if mask[token_id])
        return found

    def spells(self, token_id: int, data: bytes) -> bool:
        """Returns whether an id spells a beginning of ``data``."""
        spelling = self._spelling(token_id)
        return bool(spelling) and data.startswith(spelling)

    def length(self, token_id: int) -> int:
        """Returns how many bytes an id spells."""
        return len(self._spelling(token_id))

    def ends(self, mask: npt.NDArray[np.uint8]) -> bool:
        """Returns whether the output may end."""
        return any(mask[token_id] for token_id in self._stop_ids)

    def _spelling(self, token_id: int) -> bytes:
        return self._spellings[token_id] if 0 <= token_id < len(self._spellings) else b""

    def _shown(self, token_id: int) -> str:
        is_end = token_id in self._stop_ids
        return END_OF_OUTPUT if is_end else self._spelling(token_id).decode(errors="replace")

    def _expected(self, matcher: Matcher) -> str:
        mask = self.mask(matcher)
        next_bytes = self._next_bytes(mask)
        if len(next_bytes) > _MAX_ALTERNATIVES:
            alternatives = [bytes([byte]) for byte in next_bytes]
        else:
            alternatives = [text for byte in next_bytes for text in self._texts(matcher, b"", byte)]
        return describe(alternatives, may_end=self.ends(mask))

    def _next_bytes(self, mask: npt.NDArray[np.uint8]) -> list[int]:
        found = np.unique(self._first_bytes[mask.astype(bool)])
        return [int(byte) for byte in found if byte >= 0]

    def _texts(self, matcher: Matcher, before: bytes, byte: int) -> list[bytes]:
        """Returns the texts that go on with ``byte`` after ``before``, as far as nothing else can follow.

        Inside a character, as far as it is whole, when there are few.
        """
        text, next_bytes = before, [byte]
        branch = matcher.copy()
        while len(next_bytes) == 1 and len(text) < _MAX_FORCED_BYTES:
            token_id = next((one for one in self._ids.get(bytes(next_bytes), ()) if branch.accept(one)), None)
            text += bytes(next_bytes)
            if token_id is None:
                return [text]
            mask = self.mask(branch)
            next_bytes = [] if self.ends(mask) else self._next_bytes(mask)
        if next_bytes and len(next_bytes) <= _MAX_ALTERNATIVES and not _is_whole(text):
            return [longer for one in next_bytes for longer in self._texts(branch, text, one)]
        return [text]


def _is_whole(text: bytes) -> bool:
    """Returns whether a beginning of valid UTF-8 ends with a whole character."""
    return len(text.decode(errors="ignore").encode()) == len(text)


class _Walk:
    """One text on its way through one matcher."""

    def __init__(self, checker: TextChecker, matcher: Matcher, data: bytes, deadline_s: float) -> None:
        self.matcher = matcher
        self.position = 0
        self.deadline_s = deadline_s
        self._checker = checker
        self._data = data

    def follow(self, token_ids: Sequence[int]) -> None:
        """Takes tokens as long as they spell the text and are allowed."""
        for token_id in token_ids:
            rest = self._data[self.position :]
            if not self._checker.spells(token_id, rest) or not self._mask()[token_id]:
                return
            if not self._take(token_id):
                return

    def spell(self, end: int) -> None:
        """Takes whatever allowed tokens spell the text up to byte ``end``, as far as there are any."""
        while self.position < end:
            rest = self._data[self.position : end]
            candidates = self._checker.spelled_by(self._mask(), rest, len(rest))
            if not any(self._take(token_id) for token_id in candidates):
                return

    def may_end(self) -> bool:
        """Returns whether the output may end here."""
        return self._checker.ends(self._mask())

    def _mask(self) -> npt.NDArray[np.uint8]:
        if time.process_time() > self.deadline_s:
            raise MatcherError(f"the text took more than {_DEADLINE_S:g} s")
        return self._checker.mask(self.matcher)

    def _take(self, token_id: int) -> bool:
        if not self.matcher.accept(token_id):
            return False
        self.position += self._checker.length(token_id)
        return True
