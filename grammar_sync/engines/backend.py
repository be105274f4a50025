"""What a grammar engine offers: compiled grammars that are shared, and matchers that belong to one sequence."""

from __future__ import annotations

from typing import Protocol

import torch

from grammar_sync.engines.prepared import CompileError, PreparedGrammar
from grammar_sync.spec import GrammarSpec


class MatcherError(RuntimeError):
    """An engine failed inside one sequence's matcher; what it said, in one line. Ends that sequence alone."""


class Matcher(Protocol):
    """The state of one sequence under its grammar.

    Every method but ``is_terminated`` may raise ``MatcherError``; the matcher must not be used afterwards.
    """

    def accept(self, token_id: int) -> bool:
        """Takes a token; returns False, with the state unchanged, when the grammar does not allow it."""

    def is_terminated(self) -> bool:
        """Returns whether a stop token was accepted; nothing can be accepted or filled afterwards."""

    def fill(self, words: torch.Tensor) -> None:
        """Writes the ids allowed next, bit ``id % 32`` of word ``id // 32``, into contiguous int32 ``words``.

        Raises:
            MatcherError: The engine failed, or the matcher has terminated.
        """

    def rollback(self, count: int) -> None:
        """Takes back the last ``count`` accepted tokens, a stop token among them; 0 does nothing.

        Raises:
            ValueError: ``count`` is negative.
            MatcherError: Fewer tokens were accepted.
        """

    def copy(self) -> Matcher:
        """Returns a matcher in the same state that goes its own way from here."""

    def jump_forward(self) -> str:
        """Returns the text that must come next, empty where nothing is certain or the matcher has terminated."""


class CompiledGrammar(Protocol):
    """A compiled grammar, shared by all sequences that use it."""

    @property
    def size_bytes(self) -> int:
        """How much memory it holds."""

    def new_matcher(self) -> Matcher:
        """Returns a matcher at the grammar's start."""


class GrammarBackend(Protocol):
    """One or more grammar engines for one vocabulary; may be called from several threads at once."""

    def prepare(self, spec: GrammarSpec) -> tuple[PreparedGrammar, ...]:
        """Returns at least one form that can be compiled, in order of preference: pure Python, the same everywhere.

        Raises:
            CompileError: The grammar is wrong, or has something that cannot be enforced.
        """

    def compile(self, prepared: PreparedGrammar) -> CompiledGrammar:
        """Returns the compiled grammar.

        Raises:
            CompileError: The engine refuses the grammar, or it allows no output at all.
        """


def compile_spec(backend: GrammarBackend, spec: GrammarSpec) -> tuple[PreparedGrammar, CompiledGrammar]:
    """Returns the first of a grammar's prepared forms that compiles, and what it was compiled to.

    Raises:
        CompileError: The grammar cannot be prepared, or none of its forms compiles; the first form's message.
    """
    refusal = CompileError(f"the {spec.kind} grammar has no form that can be compiled")
    for index, prepared in enumerate(backend.prepare(spec)):
        try:
            return prepared, backend.compile(prepared)
        except CompileError as error:
            refusal = error if index == 0 else refusal
    raise refusal
