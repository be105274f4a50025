"""What becomes of a grammar in the engine, found out without one: the same forms, the same limits, the same words."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

from grammar_sync.engines.backend import CompiledGrammar
from grammar_sync.engines.factory import MAKE_BACKEND, make_backend
from grammar_sync.engines.prepared import CompileError, PreparedGrammar
from grammar_sync.spec import GrammarSpec
from grammar_sync.vetting.messages import Refused, Setup, VettingLimits
from grammar_sync.vetting.service import VettingService
from grammar_sync.vocabulary import GrammarVocabulary
from launch.commands import CheckGrammarCommand
from launch.rank.grammar_compiler import GrammarProcessStarter, RunningProcess


@dataclass(frozen=True)
class Judgement:
    """A grammar that is accepted.

    Args:
        prepared: The form that is used.
        compiled: What it was compiled to.
        compile_s: Seconds of CPU that took.
        slowest_fill_s: Seconds of CPU of the slowest mask on some random outputs.
    """

    prepared: PreparedGrammar
    compiled: CompiledGrammar
    compile_s: float
    slowest_fill_s: float


class CompileProcess:
    """The process that vets grammars as in a run: make it before this process has threads, when it costs nothing."""

    def __init__(self) -> None:
        self.start = GrammarProcessStarter(os.environ)
        self.running: RunningProcess = self.start()


class GrammarJudge:
    """Judges grammars for one vocabulary, several at once; ``submit`` and ``judgement`` come in pairs.

    Args:
        vocabulary: What they are compiled for.
        command: Engines and limits.
        process: Vets them.
    """

    def __init__(self, vocabulary: GrammarVocabulary, command: CheckGrammarCommand, process: CompileProcess) -> None:
        self._backend = make_backend(vocabulary, command.grammar_backend)
        self._news = threading.Event()
        limits = VettingLimits(deadline_s=command.grammar_timeout_s)
        setup = Setup(vocabulary, MAKE_BACKEND, command.grammar_backend, limits)
        self._service = VettingService(setup, process.running, process.start, on_finished=self._news.set)

    def submit(self, spec: GrammarSpec) -> None:
        """Has a grammar vetted."""
        self._service.submit(spec)

    def judgement(self, spec: GrammarSpec) -> Judgement:
        """Waits for what comes of a grammar that was submitted, and returns it.

        Raises:
            CompileError: It is refused.
        """
        while (report := self._service.poll(spec)) is None:
            self._news.wait()
            self._news.clear()
        self._service.discard(spec)
        vetted = report.outcome
        if isinstance(vetted, Refused):
            raise CompileError(vetted.message)
        compiled = self._backend.compile(vetted.prepared)
        return Judgement(vetted.prepared, compiled, vetted.compile_s, vetted.slowest_fill_s)

    def close(self) -> None:
        """Ends the compile process."""
        self._service.close()
