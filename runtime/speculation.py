"""Speculation by prompt lookup: the next tokens are guessed from what followed the same tokens earlier in the sequence.

Part of the replicated scheduler: a pure function of a sequence's tokens and of how its guesses came out, so that every
rank has the same draft without being told. A wrong draft costs time and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass

_NGRAM_SIZES = (4, 2)
_MOST_DOUBLINGS = 6
_SHORTEST_REST = 4


@dataclass(frozen=True)
class SpeculationLimits:
    """How much is guessed.

    Args:
        draft_tokens: Guessed tokens of a sequence in a step; 0 = speculation is off.
        step_tokens: Guessed tokens of all sequences in a step: each needs a row of logits, and where many sequences
            run there is no idle arithmetic left to check guesses with.
    """

    draft_tokens: int = 0
    step_tokens: int = 32


class NgramIndex:
    """Where the n-grams of a growing list of tokens ended last.

    Attributes:
        size: How many tokens were read.
    """

    def __init__(self) -> None:
        self.size = 0
        self._ends: dict[tuple[int, ...], int] = {}

    def read(self, token_ids: Tokens[int], start: int) -> None:
        """Takes ``token_ids``, which continue what was read; the first ``start`` of them were read before."""
        first = self.size - start
        for end in range(start + 1, len(token_ids) + 1):
            for length in _NGRAM_SIZES:
                if length <= end:
                    self._ends[tuple(token_ids[end - length : end])] = first + end
        self.size = first + len(token_ids)

    def find(self, last: Tokens[int]) -> int | None:
        """Returns where the longest known n-gram that ``last`` ends with ended last; None when none is known."""
        for length in _NGRAM_SIZES:
            end = self._ends.get(tuple(last[-length:])) if length <= len(last) else None
            if end is not None:
                return end
        return None


class PromptLookup:
    """One sequence's guesses: what it finds, and how many tokens it ventures.

    The length of a draft follows the last one's fate: twice as long after one that was right throughout, as long as
    what was right of it otherwise. After one that was wrong from the start it rests, longer each time.

    Args:
        longest: The most tokens of a draft.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._length = longest
        self._misses = 0
        self._rests_until = 0
        self._index = NgramIndex()

    def draft(self, token_ids: list[int], most: int) -> tuple[int, ...]:
        """Returns what may follow a sequence's tokens, at most ``most`` of it; empty where nothing is known.

        Args:
            token_ids: All tokens of the sequence, which only ever grow.
            most: The most tokens wanted.
        """
        wanted = min(self._length, most)
        if wanted <= 0 or len(token_ids) < self._rests_until:
            return ()
        index, overlap = self._index, max(_NGRAM_SIZES) - 1
        # All but the last token: the n-gram at the very end is what is looked for.
        before = max(index.size - overlap, 0)
        index.read(token_ids[before:-1], index.size - before)
        found = index.find(token_ids[-max(_NGRAM_SIZES) :])
        if found is None:
            return ()
        # Tokens that repeat themselves go on repeating: what is copied may run into the copy.
        period = len(token_ids) - found
        return tuple(token_ids[found + at % period] for at in range(wanted))

    def settle(self, drafted: int, accepted: int, num_tokens: int) -> None:
        """Takes note of how many tokens of a draft were right; the sequence has ``num_tokens`` now."""
        if accepted:
            self._misses = 0
            self._length = min(2 * drafted, self._longest) if accepted == drafted else accepted
            return
        self._length = 1
        self._rests_until = num_tokens + (_SHORTEST_REST << min(self._misses, _MOST_DOUBLINGS))
        self._misses += 1
