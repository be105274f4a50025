"""What becomes of a grammar in the engine, found out without one: the same forms, the same limits, the same words."""

from __future__ import annotations

import time
from dataclasses import dataclass

from grammar_sync.backend import CompiledGrammar, compile_spec
from grammar_sync.prepared import PreparedGrammar
from grammar_sync.routing import RoutingBackend
from grammar_sync.spec import GrammarSpec
from grammar_sync.vocabulary import GrammarVocabulary


@dataclass(frozen=True)
class Judgement:
    """A grammar that is accepted.

    Args:
        prepared: The form that is used.
        compiled: What it was compiled to.
        compile_s: Seconds of CPU that took.
        slowest_fill_s: Seconds of CPU of the slowest mask on some random outputs; None when none was filled.
    """

    prepared: PreparedGrammar
    compiled: CompiledGrammar
    compile_s: float
    slowest_fill_s: float | None


class GrammarJudge:
    """Judges grammars for one vocabulary."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self._backend = RoutingBackend(vocabulary)

    def judge(self, spec: GrammarSpec) -> Judgement:
        """Returns what a grammar was compiled to.

        Raises:
            CompileError: It is refused.
        """
        start_s = time.process_time()
        prepared, compiled = compile_spec(self._backend, spec)
        return Judgement(prepared, compiled, time.process_time() - start_s, None)
