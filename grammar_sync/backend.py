"""What a grammar engine offers: compiled grammars that are shared, and matchers that belong to one sequence."""

from __future__ import annotations

from typing import Protocol

import torch

from grammar_sync.spec import GrammarSpec


class CompileError(ValueError):
    """A grammar cannot be compiled: the client's fault, told in one line."""


class Matcher(Protocol):
    """The state of one sequence under its grammar."""

    def accept(self, token_id: int) -> bool:
        """Takes a token; returns False, with the state unchanged, when the grammar does not allow it."""

    def is_terminated(self) -> bool:
        """Returns whether a stop token was accepted; nothing can be accepted or filled afterwards."""

    def fill(self, words: torch.Tensor) -> None:
        """Writes the ids allowed next, bit ``id % 32`` of word ``id // 32``, into contiguous int32 ``words``."""


class CompiledGrammar(Protocol):
    """A compiled grammar, shared by all sequences that use it."""

    @property
    def size_bytes(self) -> int:
        """How much memory it holds."""

    def new_matcher(self) -> Matcher:
        """Returns a matcher at the grammar's start."""


class GrammarBackend(Protocol):
    """A grammar engine for one vocabulary; may be called from several threads at once."""

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Returns the compiled grammar.

        Raises:
            CompileError: The grammar is wrong, or allows no output at all.
        """
