"""Thinking before the answer: an output may start inside a think block, and its grammar begins after the end marker.

A request is in one of four phases: the start marker is being written, it thinks, the end marker is forced because the
budget is used up, or it answers. The phase depends on the token ids alone.

An end marker that is one added token is known by its id; any other is found in the bytes that tokens add, wherever
tokens cut it. A token that would end the marker and go on belongs to both sides, so it is never drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import NamedTuple

import torch

from grammar_sync.engines.backend import Matcher
from grammar_sync.thinking import ReasoningMarkers, ThinkingRules
from grammar_sync.vocabulary import GrammarVocabulary, VocabularyError

_WORD_BITS = 32


class Phase(IntEnum):
    """Where an output stands."""

    START = 0
    THINK = 1
    END = 2
    ANSWER = 3


class _Point(NamedTuple):
    """Where an output stands: forced ids written, bytes of the end marker matched, tokens thought."""

    phase: Phase
    written: int = 0
    matched: int = 0
    thought: int = 0


class ReasoningVocabulary:
    """What thinking needs to know of a model's vocabulary; made once, shared by all requests.

    Args:
        vocabulary: The vocabulary.
        markers: The markers.
        added_token_ids: The tokenizer's added tokens, special or not.
        piece: Returns the bytes that a token adds to a text; called for every id if the end marker is no single token.

    Raises:
        VocabularyError: The end marker's own tokens do not spell it.
    """

    def __init__(
        self,
        vocabulary: GrammarVocabulary,
        markers: ReasoningMarkers,
        added_token_ids: Iterable[int],
        piece: Callable[[int], bytes],
    ) -> None:
        self.markers = markers
        self._piece = piece
        self._marker = markers.end.encode()
        self._fallback = _fallbacks(self._marker)
        self._usable = min(len(vocabulary.tokens), vocabulary.vocab_size)
        self._words = -(-vocabulary.vocab_size // _WORD_BITS)
        self._stop_ids = frozenset(vocabulary.stop_token_ids)
        self._excluded = frozenset(added_token_ids) - frozenset(markers.end_ids)
        self._crossing: list[frozenset[int]] = []
        if not markers.end_is_token:
            self._crossing = self._find_crossing()
            matched = 0
            for token_id in markers.end_ids:
                matched, crossed = self.advance(matched, token_id)
                if crossed:
                    break
            if matched != len(self._marker):
                raise VocabularyError(f"the tokenizer cannot write the reasoning marker {markers.end!r} by itself")
        self._rows: dict[tuple[bool, bool, int], torch.Tensor] = {}

    def advance(self, matched: int, token_id: int) -> tuple[int, bool]:
        """Returns how much of the end marker is matched after a token, and whether the token goes on beyond its end.

        Args:
            matched: Bytes of the end marker that the text before the token ends with.
            token_id: The token.
        """
        if self.markers.end_is_token:
            return (len(self._marker) if token_id == self.markers.end_ids[0] else 0), False
        data = self._piece(token_id)
        for position, byte in enumerate(data):
            while matched and self._marker[matched] != byte:
                matched = self._fallback[matched]
            matched += self._marker[matched] == byte
            if matched == len(self._marker):
                return matched, position < len(data) - 1
        return matched, False

    def is_end(self, matched: int) -> bool:
        """Returns whether the whole end marker is matched."""
        return matched == len(self._marker)

    def is_banned(self, rules: ThinkingRules, matched: int, token_id: int) -> bool:
        """Returns whether a request may not draw ``token_id`` while it thinks."""
        return (
            not 0 <= token_id < self._usable
            or (rules.before_grammar and token_id in self._stop_ids)
            or (rules.strict and token_id in self._excluded)
            or (bool(self._crossing) and token_id in self._crossing[matched])
        )

    def fill_thinking(self, words: torch.Tensor, rules: ThinkingRules, matched: int) -> None:
        """Writes the ids that a request may draw while it thinks into int32 ``words``."""
        key = (rules.before_grammar, rules.strict, matched)
        row = self._rows.get(key)
        if row is None:
            may_be_banned = self._stop_ids.union(self._excluded, *self._crossing)
            banned = [token_id for token_id in may_be_banned if self.is_banned(rules, matched, token_id)]
            row = self._rows[key] = _open_row(self._usable, banned, self._words)
        words.copy_(row)

    def _find_crossing(self) -> list[frozenset[int]]:
        """Returns, for each number of matched bytes, the ids that would end the marker and go on."""
        ends = tuple(self._marker[at:] for at in range(1, len(self._marker)))
        candidates = []
        for token_id in range(self._usable):
            data = self._piece(token_id)
            if data.startswith(ends) or self._marker in data:
                candidates.append(token_id)
        return [
            frozenset(token_id for token_id in candidates if self.advance(matched, token_id)[1])
            for matched in range(len(self._marker))
        ]


class ThinkingState:
    """Where one output stands; moves with its tokens.

    Args:
        vocabulary: The model's.
        rules: The request's.
    """

    def __init__(self, vocabulary: ReasoningVocabulary, rules: ThinkingRules) -> None:
        self._vocabulary = vocabulary
        self._rules = rules
        first = Phase.START if rules.writes_start else Phase.END if rules.budget == 0 else Phase.THINK
        self._points = [_Point(first)]

    @property
    def markers(self) -> ReasoningMarkers:
        """The model's markers."""
        return self._vocabulary.markers

    @property
    def phase(self) -> Phase:
        """Where the output stands."""
        return self._points[-1].phase

    @property
    def answers(self) -> bool:
        """Whether the thinking is over."""
        return self.phase is Phase.ANSWER

    @property
    def reasoning_tokens(self) -> int:
        """How many tokens came before the answer, markers among them."""
        return sum(point.phase is not Phase.ANSWER for point in self._points[:-1])

    def accept(self, token_id: int) -> bool:
        """Takes a token; returns False, with the state unchanged, when it is not allowed; any may come in an answer."""
        point = self._after(self._points[-1], token_id)
        if point is None:
            return False
        self._points.append(point)
        return True

    def fill(self, words: torch.Tensor) -> None:
        """Writes the ids allowed next into int32 ``words``; leaves them alone in an answer."""
        phase, written, matched, _ = self._points[-1]
        match phase:
            case Phase.START | Phase.END:
                forced = self._forced(phase)[written]
                words.zero_()
                words[forced // _WORD_BITS] = _signed(1 << forced % _WORD_BITS)
            case Phase.THINK:
                self._vocabulary.fill_thinking(words, self._rules, matched)
            case Phase.ANSWER:
                pass

    def rollback(self, count: int) -> int:
        """Takes back the last ``count`` tokens; returns how many of them were of the answer.

        Raises:
            ValueError: ``count`` is negative, or more than came.
        """
        if not 0 <= count < len(self._points):
            raise ValueError(f"rollback of {count} tokens, expected 0 to {len(self._points) - 1}")
        before = self._points[-1 - count : -1] if count else []
        del self._points[len(self._points) - count :]
        return sum(point.phase is Phase.ANSWER for point in before)

    def copy(self) -> ThinkingState:
        """Returns a state at the same point that goes its own way from here."""
        other = ThinkingState(self._vocabulary, self._rules)
        other._points = list(self._points)
        return other

    def _after(self, point: _Point, token_id: int) -> _Point | None:
        """Returns where the output stands after a token; None when it is not allowed."""
        match point.phase:
            case Phase.ANSWER:
                return point
            case Phase.START | Phase.END:
                forced = self._forced(point.phase)
                if token_id != forced[point.written]:
                    return None
                if point.written + 1 < len(forced):
                    return point._replace(written=point.written + 1)
                return self._thinking(0, 0) if point.phase is Phase.START else _Point(Phase.ANSWER)
            case Phase.THINK:
                return self._after_thought(point, token_id)

    def _after_thought(self, point: _Point, token_id: int) -> _Point | None:
        if self._vocabulary.is_banned(self._rules, point.matched, token_id):
            return None
        matched, _ = self._vocabulary.advance(point.matched, token_id)
        if self._vocabulary.is_end(matched):
            return _Point(Phase.ANSWER)
        return self._thinking(matched, point.thought + 1)

    def _forced(self, phase: Phase) -> tuple[int, ...]:
        markers = self._vocabulary.markers
        return markers.start_ids if phase is Phase.START else markers.end_ids

    def _thinking(self, matched: int, thought: int) -> _Point:
        budget = self._rules.budget
        if budget is not None and thought >= budget:
            return _Point(Phase.END)
        return _Point(Phase.THINK, 0, matched, thought)


class ReasoningMatcher:
    """A matcher that lets an output think first; then its grammar's own, or none.

    Args:
        state: Where the output stands.
        inner: The grammar's matcher at its start; None for an answer that is free.
    """

    def __init__(self, state: ThinkingState, inner: Matcher | None) -> None:
        self._state = state
        self._inner = inner

    def accept(self, token_id: int) -> bool:
        """Takes a token; returns False, with the state unchanged, when it is not allowed."""
        if self._state.answers and self._inner is not None and not self._inner.accept(token_id):
            return False
        return self._state.accept(token_id)

    def is_terminated(self) -> bool:
        """Returns whether the grammar ended; a free answer has no end of its own."""
        return self._inner is not None and self._inner.is_terminated()

    def fill(self, words: torch.Tensor) -> None:
        """Writes the ids allowed next into contiguous int32 ``words``; leaves them alone in a free answer."""
        if self._state.answers and self._inner is not None:
            self._inner.fill(words)
        else:
            self._state.fill(words)

    def rollback(self, count: int) -> None:
        """Takes back the last ``count`` tokens.

        Raises:
            ValueError: ``count`` is negative, or more than were accepted.
        """
        answered = self._state.rollback(count)
        if self._inner is not None:
            self._inner.rollback(answered)

    def copy(self) -> ReasoningMatcher:
        """Returns a matcher in the same state that goes its own way from here."""
        return ReasoningMatcher(self._state.copy(), None if self._inner is None else self._inner.copy())

    def jump_forward(self) -> str:
        """Returns the text that must come next, once it answers; empty where nothing is certain."""
        return self._inner.jump_forward() if self._state.answers and self._inner is not None else ""


def _fallbacks(marker: bytes) -> list[int]:
    """Returns, for each number of matched bytes, how many are still matched when the next byte differs."""
    fallback = [0] * (len(marker) + 1)
    length = 0
    for index in range(1, len(marker)):
        while length and marker[index] != marker[length]:
            length = fallback[length]
        length += marker[index] == marker[length]
        fallback[index + 1] = length
    return fallback


def _open_row(usable: int, banned: Iterable[int], words: int) -> torch.Tensor:
    """Returns int32 [words] with the bits of the ids below ``usable`` set, but for those of ``banned``."""
    row = [(1 << _WORD_BITS) - 1] * (usable // _WORD_BITS)
    row += [(1 << usable % _WORD_BITS) - 1, *[0] * words][: words - len(row)]
    for token_id in banned:
        row[token_id // _WORD_BITS] &= ~(1 << token_id % _WORD_BITS)
    return torch.tensor([_signed(word) for word in row], dtype=torch.int32)


def _signed(word: int) -> int:
    """Returns the int32 with the bits of an unsigned 32-bit word."""
    return word - (1 << _WORD_BITS) if word >> (_WORD_BITS - 1) else word
