"""llguidance as a grammar engine: slower masks than xgrammar on simple grammars, but bounded ones on hard grammars."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final, TypeAlias

import llguidance
import torch

from grammar_sync.engines.backend import MatcherError
from grammar_sync.engines.preparation import prepare
from grammar_sync.engines.prepared import CompileError, PreparedGrammar
from grammar_sync.engines.token_bytes import token_bytes
from grammar_sync.spec import GrammarSpec
from grammar_sync.vocabulary import GrammarVocabulary

_MAX_MESSAGE_LENGTH: Final = 300
_MATCHER_BYTES: Final = 64
"""A guess of the memory for each character of a grammar: the engine does not tell."""


_Texts: TypeAlias = list[tuple[bytes, int]]
"""Tokens that are text, sorted, with their ids."""


class _TokenTable:
    """The vocabulary as llguidance asks for it."""

    bos_token_id = None

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        tokens = token_bytes(vocabulary)
        # An LM head may be wider than the tokenizer; the engine's masks are as wide as this table, whatever it is told.
        tokens += [b""] * (vocabulary.vocab_size - len(tokens))
        self.eos_token_id = vocabulary.stop_token_ids[0]
        # A token without text must be special, so that no text of the grammar can be spelled with it.
        self.special_token_ids = [token_id for token_id, token in enumerate(tokens) if not token]
        for token_id in self.special_token_ids:
            tokens[token_id] = f"<|{token_id}|>".encode()
        self.tokens = tokens
        silent = set(self.special_token_ids)
        self.texts = sorted((token, token_id) for token_id, token in enumerate(tokens) if token_id not in silent)
        self._ids = {
            token: token_id for token_id, token in enumerate(tokens) if len(token) == 1 and token_id not in silent
        }

    def __call__(self, text: str | bytes) -> list[int]:
        """Returns ids of a text, a token for each byte that has one: the engine asks only to check itself."""
        data = text.encode() if isinstance(text, str) else text
        return [self._ids[bytes([byte])] for byte in data if bytes([byte]) in self._ids]


class LLGuidanceMatcher:
    """One sequence's state in llguidance."""

    def __init__(self, matcher: llguidance.LLMatcher, stop_token_ids: frozenset[int], texts: _Texts) -> None:
        self._matcher = matcher
        self._stop_token_ids = stop_token_ids
        self._texts = texts
        self._is_terminated = False

    def accept(self, token_id: int) -> bool:
        """Takes a token; returns False, with the state unchanged, when the grammar does not allow it.

        Raises:
            MatcherError: The engine failed.
        """
        if self._is_terminated:
            return False
        if token_id in self._stop_token_ids:
            self._is_terminated = bool(self._matcher.is_accepting())
            self._check()
            return self._is_terminated
        taken = self._matcher.try_consume_tokens([token_id])
        self._check()
        return bool(taken == 1)

    def is_terminated(self) -> bool:
        """Returns whether a stop token was accepted."""
        return self._is_terminated

    def fill(self, words: torch.Tensor) -> None:
        """Writes the allowed ids into ``words``, contiguous int32 [ceil(vocab_size / 32)].

        Raises:
            MatcherError: The engine failed, or the matcher has terminated.
        """
        if self._is_terminated:
            raise MatcherError("fill of a matcher that has terminated")
        self._matcher.unsafe_compute_mask_ptr(words.data_ptr(), words.numel() * words.element_size())
        self._check()
        if torch.count_nonzero(words) == 1:
            self._widen_(words)

    def _widen_(self, words: torch.Tensor) -> None:
        """Adds the ids that the engine leaves out where the next text is certain: it then allows one spelling only."""
        forced = bytes(self._matcher.compute_ff_bytes())
        if not forced:
            return
        lengths = range(1, len(forced) + 1)
        spans = [(forced[:length], forced[:length] + b"\0") for length in lengths[:-1]] + [(forced, None)]
        for low, high in spans:
            first = bisect_left(self._texts, (low, -1))
            for text, token_id in self._texts[first:]:
                if not text.startswith(low) or (high is not None and text != low):
                    break
                if self._matcher.validate_tokens([token_id]) == 1:
                    bit = token_id % 32
                    words[token_id // 32] |= (1 << bit) if bit < 31 else -(1 << 31)

    def rollback(self, count: int) -> None:
        """Takes back the last ``count`` accepted tokens, a stop token among them.

        Raises:
            ValueError: ``count`` is negative.
            MatcherError: Fewer tokens were accepted.
        """
        if count < 0:
            raise ValueError(f"rollback of {count} tokens, expected 0 or more")
        if count and self._is_terminated:
            # The stop token was never given to the engine.
            self._is_terminated = False
            count -= 1
        if count and not self._matcher.rollback(count):
            raise MatcherError(first_line(self._matcher.get_error()) or f"rollback of {count} tokens: too many")
        self._check()

    def copy(self) -> LLGuidanceMatcher:
        """Returns a matcher in the same state that goes its own way from here."""
        twin = LLGuidanceMatcher(self._matcher.deep_copy(), self._stop_token_ids, self._texts)
        twin._is_terminated = self._is_terminated
        return twin

    def jump_forward(self) -> str:
        """Returns the text that must come next; empty where nothing is certain."""
        if self._is_terminated:
            return ""
        forced = bytes(self._matcher.compute_ff_bytes())
        self._check()
        # A character may be cut in two: only whole ones are certain as text.
        return forced.decode(errors="ignore")

    def _check(self) -> None:
        if self._matcher.is_error():
            raise MatcherError(first_line(self._matcher.get_error()))


class LLGuidanceCompiled:
    """A grammar for llguidance, which keeps no compiled form: each matcher starts as a copy of the first one."""

    def __init__(self, first: LLGuidanceMatcher, size_bytes: int) -> None:
        self._first = first
        self._size_bytes = size_bytes

    @property
    def size_bytes(self) -> int:
        """How much memory the grammar holds, estimated from the length of its source."""
        return self._size_bytes

    def new_matcher(self) -> LLGuidanceMatcher:
        """Returns a matcher at the grammar's start."""
        return self._first.copy()


class LLGuidanceBackend:
    """Compiles grammars for one vocabulary."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self._stop_token_ids = frozenset(vocabulary.stop_token_ids)
        self._mask_words = -(-vocabulary.vocab_size // 32)
        table = _TokenTable(vocabulary)
        self._texts = table.texts
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(table),
            n_vocab=vocabulary.vocab_size,
            eos_token=list(vocabulary.stop_token_ids),
            slices=llguidance.LLTokenizer.json_slices(),
        )

    def prepare(self, spec: GrammarSpec) -> tuple[PreparedGrammar, ...]:
        """Returns the form that llguidance compiles.

        Raises:
            CompileError: The grammar is wrong, or has something that cannot be enforced.
        """
        return prepare(spec, ("llguidance",))

    def compile(self, prepared: PreparedGrammar) -> LLGuidanceCompiled:
        """Returns the grammar, ready for matchers; releases the GIL meanwhile.

        Raises:
            CompileError: llguidance refuses the grammar, or its first mask allows nothing.
        """
        matcher = llguidance.LLMatcher(self._tokenizer, self._grammar(prepared), log_level=0)
        if matcher.is_error():
            raise CompileError(first_line(matcher.get_error()))
        first = LLGuidanceMatcher(matcher, self._stop_token_ids, self._texts)
        compiled = LLGuidanceCompiled(first, _MATCHER_BYTES * len(prepared.source))
        first_mask = torch.zeros(self._mask_words, dtype=torch.int32)
        try:
            compiled.new_matcher().fill(first_mask)
        except MatcherError as error:
            raise CompileError(str(error)) from error
        if not first_mask.any():
            raise CompileError("the grammar allows no output at all: no token can start it")
        return compiled

    def _grammar(self, prepared: PreparedGrammar) -> str:
        match prepared.language:
            case "lark":
                return str(llguidance.LLMatcher.grammar_from_lark(prepared.source))
            case "regex":
                return str(llguidance.LLMatcher.grammar_from_regex(prepared.source))
            case language:
                raise CompileError(f"llguidance does not read {language}")


def first_line(message: str) -> str:
    """Returns the first line of an engine's message, of bounded length: backtraces follow it."""
    line = next((part.strip() for part in message.splitlines() if part.strip()), "")
    return line if len(line) <= _MAX_MESSAGE_LENGTH else f"{line[:_MAX_MESSAGE_LENGTH]}…"
