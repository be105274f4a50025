"""Walks random outputs of a compiled grammar: are its masks quick, never empty, and does it take what they allow."""

from __future__ import annotations

import random
import time

import numpy as np
import numpy.typing as npt
import torch

from grammar_sync.engines.backend import CompiledGrammar, Matcher, MatcherError
from grammar_sync.vocabulary import GrammarVocabulary

_WALK_TOKENS = (24, 24, 24)
_LONG_WALK_TOKENS = 256
_SUSPICIOUS_S = 0.002
_TOTAL_LIMIT_S = 0.5
_CHECK_EVERY = 4
_WORD_BITS = 32
_LOW_WORDS = 3


class ProbeError(ValueError):
    """A compiled grammar cannot be used for masks: the client's fault, told in one line."""


def probe(compiled: CompiledGrammar, vocabulary: GrammarVocabulary, seed: int, fill_limit_s: float) -> float:
    """Returns the seconds of CPU of the slowest mask on some random outputs; the same outputs for the same seed.

    Ordinary masks take microseconds. When one takes milliseconds, a longer output follows: the states of a nested
    repetition grow with every token. A probe is no proof: a state that it did not come to may be slow.

    Raises:
        ProbeError: A mask, or all together, took too long; a mask allows nothing; the grammar does not take a token
            that its mask allows; or the engine gave up.
    """
    draw = random.Random(seed)  # noqa: S311 - it must be the same each time
    prober = _Prober(vocabulary, fill_limit_s)
    try:
        for tokens in _WALK_TOKENS:
            prober.walk(compiled.new_matcher(), tokens, draw)
        if prober.slowest_s > _SUSPICIOUS_S:
            prober.walk(compiled.new_matcher(), _LONG_WALK_TOKENS, draw)
    except MatcherError as error:
        raise ProbeError(f"the grammar engine gave up on it: {error}") from error
    return prober.slowest_s


class _Prober:
    def __init__(self, vocabulary: GrammarVocabulary, fill_limit_s: float) -> None:
        size = vocabulary.vocab_size
        self._row = torch.empty(-(-size // _WORD_BITS), dtype=torch.int32)
        self._words: npt.NDArray[np.uint32] = self._row.numpy().view(np.uint32)
        tail_bits = size % _WORD_BITS
        self._last_word = np.uint32((1 << tail_bits) - 1 if tail_bits else 0xFFFF_FFFF)
        self._stop_ids = vocabulary.stop_token_ids
        self._fill_limit_s = fill_limit_s
        self._fills = 0
        self._total_s = 0.0
        self.slowest_s = 0.0

    def walk(self, matcher: Matcher, tokens: int, draw: random.Random) -> None:
        """Takes up to so many random tokens, then the end where it is allowed."""
        for step in range(tokens + 1):
            stop_ids = self._fill(matcher)
            open_words = np.flatnonzero(self._words)
            if step == tokens or not len(open_words):
                if stop_ids:
                    self._accept(matcher, stop_ids[0])
                return
            if step % _CHECK_EVERY == 0:
                self._accept(matcher.copy(), self._pick(open_words, draw))
            self._accept(matcher, self._pick(open_words, draw))

    def _fill(self, matcher: Matcher) -> list[int]:
        """Fills the mask; takes the stop ids out of it, since outputs would be short otherwise, and returns them."""
        self._row.fill_(-1)
        start_s = time.thread_time()
        matcher.fill(self._row)
        seconds = time.thread_time() - start_s
        self._fills += 1
        self._total_s += seconds
        self.slowest_s = max(self.slowest_s, seconds)
        if seconds > self._fill_limit_s:
            raise ProbeError(f"one of its masks takes {seconds:.3g} s to fill, at most {self._fill_limit_s:g} s may be")
        if self._total_s > _TOTAL_LIMIT_S:
            raise ProbeError(f"its masks take too long to fill: {self._fills} of them {self._total_s:.2g} s")
        self._words[-1] &= self._last_word
        if not self._words.any():
            raise ProbeError("it leads to a state in which no token is allowed")
        stop_ids = [stop_id for stop_id in self._stop_ids if int(self._words[stop_id // 32]) >> (stop_id % 32) & 1]
        for stop_id in stop_ids:
            self._words[stop_id // 32] &= ~np.uint32(1 << stop_id % 32)
        return stop_ids

    def _pick(self, open_words: npt.NDArray[np.int64], draw: random.Random) -> int:
        """Returns one of the allowed ids.

        Single characters have low ids in most vocabularies. Every second id is one of the lowest: all others together
        would rarely hit the quote that ends a string.
        """
        choices = len(open_words) if draw.random() < 0.5 else min(_LOW_WORDS, len(open_words))
        word = int(open_words[draw.randrange(choices)])
        bits = int(self._words[word])
        return word * _WORD_BITS + draw.choice([bit for bit in range(_WORD_BITS) if bits >> bit & 1])

    def _accept(self, matcher: Matcher, token_id: int) -> None:
        if not matcher.accept(token_id):
            raise ProbeError(f"the grammar engine contradicts itself: a mask allows token {token_id}, which it refuses")
