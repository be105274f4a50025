"""xgrammar as a grammar engine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from grammar_sync.engines.backend import MatcherError
from grammar_sync.engines.preparation import prepare
from grammar_sync.engines.prepared import CompileError, PreparedGrammar
from grammar_sync.engines.transformers_stand_in import without_transformers
from grammar_sync.spec import GrammarSpec
from grammar_sync.vocabulary import GrammarVocabulary

with without_transformers():
    import xgrammar as xgr

_VOCAB_TYPES = {
    "byte_level": xgr.VocabType.BYTE_LEVEL,
    "byte_fallback": xgr.VocabType.BYTE_FALLBACK,
    "raw": xgr.VocabType.RAW,
}
_SOURCE_LOCATION = re.compile(r"^\[\d\d:\d\d:\d\d\] \S+:\d+: ")
_FAILED_CHECK = re.compile(r"^Check failed: \(.*?\) is false: ")
_MAX_MESSAGE_LENGTH = 300


class XGrammarMatcher:
    """One sequence's state in xgrammar."""

    def __init__(self, matcher: xgr.GrammarMatcher) -> None:
        self._matcher = matcher

    def accept(self, token_id: int) -> bool:
        """Takes a token; returns False, with the state unchanged, when the grammar does not allow it."""
        with _engine_errors():
            return bool(self._matcher.accept_token(token_id))

    def is_terminated(self) -> bool:
        """Returns whether a stop token was accepted."""
        return bool(self._matcher.is_terminated())

    def fill(self, words: torch.Tensor) -> None:
        """Writes the allowed ids into ``words``, contiguous int32 [ceil(vocab_size / 32)]."""
        with _engine_errors():
            # The engine takes rows to be contiguous whatever their stride: only a view of a single row is safe.
            self._matcher.fill_next_token_bitmask(words.unsqueeze(0), 0)

    def rollback(self, count: int) -> None:
        """Takes back the last ``count`` accepted tokens.

        Raises:
            ValueError: ``count`` is negative, which the engine would pass over.
            MatcherError: Fewer tokens were accepted.
        """
        if count < 0:
            raise ValueError(f"rollback of {count} tokens, expected 0 or more")
        with _engine_errors():
            self._matcher.rollback(count)

    def copy(self) -> XGrammarMatcher:
        """Returns a matcher in the same state that goes its own way from here."""
        with _engine_errors():
            return XGrammarMatcher(self._matcher.fork())

    def jump_forward(self) -> str:
        """Returns the text that must come next; empty where nothing is certain."""
        if self.is_terminated():
            return ""
        with _engine_errors():
            return str(self._matcher.find_jump_forward_string())


@contextmanager
def _engine_errors() -> Iterator[None]:
    """Turns what the engine raises into a ``MatcherError``."""
    try:
        yield
    except (RuntimeError, ValueError, MemoryError) as error:
        raise MatcherError(one_line(str(error))) from error


class XGrammarCompiled:
    """A grammar compiled by xgrammar."""

    def __init__(self, compiled: xgr.CompiledGrammar) -> None:
        self._compiled = compiled

    @property
    def size_bytes(self) -> int:
        """How much memory the grammar holds, as xgrammar counts it."""
        return int(self._compiled.memory_size_bytes)

    def new_matcher(self) -> XGrammarMatcher:
        """Returns a matcher at the grammar's start."""
        return XGrammarMatcher(xgr.GrammarMatcher(self._compiled))


class XGrammarBackend:
    """Compiles grammars for one vocabulary; reading a vocabulary of 150,000 tokens takes about 0.3 s."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        info = xgr.TokenizerInfo(
            vocabulary.text_tokens(),
            _VOCAB_TYPES[vocabulary.vocab_type],
            vocab_size=vocabulary.vocab_size,
            stop_token_ids=list(vocabulary.stop_token_ids),
            add_prefix_space=vocabulary.add_prefix_space,
        )
        self._mask_words = -(-vocabulary.vocab_size // 32)
        # One thread a grammar, so that one request's compile leaves the other cores alone; its cache has no say here.
        self._compiler = xgr.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def prepare(self, spec: GrammarSpec) -> tuple[PreparedGrammar, ...]:
        """Returns the one form that xgrammar compiles.

        Raises:
            CompileError: The grammar is wrong, or has something that cannot be enforced.
        """
        return prepare(spec, ("xgrammar",))

    def compile(self, prepared: PreparedGrammar) -> XGrammarCompiled:
        """Returns the compiled grammar; releases the GIL meanwhile.

        Raises:
            CompileError: xgrammar refuses the grammar, or its first mask allows nothing.
        """
        try:
            compiled = XGrammarCompiled(self._compile(prepared))
            first_mask = torch.full((self._mask_words,), -1, dtype=torch.int32)
            compiled.new_matcher().fill(first_mask)
        except (RuntimeError, ValueError) as error:
            raise CompileError(one_line(str(error))) from error
        if not first_mask.any():
            raise CompileError("the grammar allows no output at all: no token can start it")
        return compiled

    def _compile(self, prepared: PreparedGrammar) -> xgr.CompiledGrammar:
        match prepared.language:
            case "regex":
                return self._compiler.compile_regex(prepared.source)
            case "ebnf":
                return self._compiler.compile_grammar(prepared.source, root_rule_name=prepared.options.root_rule)
            case "structural_tag":
                return self._compiler.compile_structural_tag(prepared.source)
            case language:
                raise CompileError(f"xgrammar does not read {language}")


def one_line(message: str) -> str:
    """Returns an engine's message as one line of bounded length, without the place in the engine's source and the time.

    Engines quote the whole grammar in some messages.
    """
    text = _FAILED_CHECK.sub("", _SOURCE_LOCATION.sub("", message.strip()))
    line = " ".join(text.split())
    return line if len(line) <= _MAX_MESSAGE_LENGTH else f"{line[:_MAX_MESSAGE_LENGTH]}…"
