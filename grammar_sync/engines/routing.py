"""One grammar engine out of two: which of them a grammar goes to."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from grammar_sync.engines.backend import CompiledGrammar
from grammar_sync.engines.llguidance_backend import LLGuidanceBackend
from grammar_sync.engines.preparation import ENGINES, prepare
from grammar_sync.engines.prepared import Engine, PreparedGrammar
from grammar_sync.engines.xgrammar_backend import XGrammarBackend
from grammar_sync.spec import GrammarSpec
from grammar_sync.vocabulary import GrammarVocabulary

Policy: TypeAlias = Literal["auto", "xgrammar", "llguidance"]

POLICIES: Final[tuple[Policy, ...]] = ("auto", *ENGINES)


class RoutingBackend:
    """Both engines behind one face.

    Args:
        vocabulary: What grammars are compiled for.
        policy: ``auto``: xgrammar, and llguidance where xgrammar fails or is too slow; else one engine alone.
    """

    def __init__(self, vocabulary: GrammarVocabulary, policy: Policy = "auto") -> None:
        self._engines: tuple[Engine, ...] = ENGINES if policy == "auto" else (policy,)
        self._xgrammar = XGrammarBackend(vocabulary) if "xgrammar" in self._engines else None
        self._llguidance = LLGuidanceBackend(vocabulary) if "llguidance" in self._engines else None

    def prepare(self, spec: GrammarSpec) -> tuple[PreparedGrammar, ...]:
        """Returns a form for each engine that can take the grammar, in order of preference.

        Raises:
            CompileError: The grammar is wrong, has something that cannot be enforced, or no engine takes it.
        """
        return prepare(spec, self._engines)

    def compile(self, prepared: PreparedGrammar) -> CompiledGrammar:
        """Returns the compiled grammar.

        Raises:
            CompileError: The engine refuses the grammar, or it allows no output at all.
            ValueError: The policy leaves the grammar's engine out.
        """
        backend = self._xgrammar if prepared.engine == "xgrammar" else self._llguidance
        if backend is None:
            raise ValueError(f"a grammar for {prepared.engine}, but the engines here are {', '.join(self._engines)}")
        return backend.compile(prepared)
