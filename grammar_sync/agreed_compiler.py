"""The grammar of each sequence on this rank: vetted by one rank, in a form that all agree on, compiled by each."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from grammar_sync.agreement import GrammarFailure, LocalReport, VettedForm
from grammar_sync.compiler import Failed, GrammarCompiler, Pending, Ready
from grammar_sync.engines.prepared import PreparedGrammar
from grammar_sync.spec import GrammarSpec
from grammar_sync.vetting.messages import Refused, Vetted
from grammar_sync.vetting.protocol import GrammarVetter
from grammar_sync.wanted_cache import WantedCache

_KNOWN_FORMS_BYTES = 64 << 20
_ENTRY_OVERHEAD_BYTES = 1024


@dataclass
class _Wanted:
    spec: GrammarSpec
    moved_s: float
    prepared: PreparedGrammar | None = None
    digest: int = 0
    was_reported_ready: bool = False
    was_told: bool = False


class AgreedCompiler:
    """Follows each sequence's grammar until it is compiled; no method waits.

    The rank that vets chooses the form and tells the others, when they cannot know it from before. Each rank reports
    which form it has compiled, so that ranks whose forms differ are never both ready.

    Args:
        compiler: Compiles; counted in it is who wants what, so nobody else may use it.
        vetter: Vets, on the one rank of the stage that does; nobody else may use it either.
    """

    def __init__(self, compiler: GrammarCompiler, vetter: GrammarVetter | None = None) -> None:
        self._compiler = compiler
        self._vetter = vetter
        self._known_forms: WantedCache[GrammarSpec, PreparedGrammar] = WantedCache(_KNOWN_FORMS_BYTES)
        self._sequences: dict[int, _Wanted] = {}

    def submit(self, sequence_id: int, spec: GrammarSpec) -> bool:
        """Takes in a sequence whose id is new; returns whether its grammar is compiled here already."""
        sequence = self._sequences[sequence_id] = _Wanted(spec, time.monotonic())
        if self._vetter is not None:
            self._vetter.submit(spec)
        else:
            self._known_forms.want(spec)
        self._look_for_form(sequence)
        return sequence.prepared is not None and isinstance(self._compiler.poll(sequence.prepared), Ready)

    def report(self, waiting: Sequence[int]) -> LocalReport:
        """Returns what this rank knows of the ``waiting``, which were submitted, in their order, at this moment."""
        ready: list[int] = []
        forms: list[int] = []
        failed: list[GrammarFailure] = []
        vetted: list[VettedForm] = []
        for sequence_id in waiting:
            sequence = self._sequences[sequence_id]
            message = self._look_for_form(sequence)
            if message is not None:
                failed.append(GrammarFailure(sequence_id, message))
            if sequence.prepared is None:
                continue
            is_ready = False
            match self._compiler.poll(sequence.prepared):
                case Ready():
                    is_ready = True
                    if not sequence.was_reported_ready:
                        sequence.moved_s = time.monotonic()
                    ready.append(sequence_id)
                    forms.append(sequence.digest)
                case Failed(message):
                    failed.append(GrammarFailure(sequence_id, message))
                case Pending():
                    pass
            # What was compiled before, the others are likely to have too: they are told if this was not so.
            if self._vetter is not None and not sequence.was_told and (sequence.was_reported_ready or not is_ready):
                sequence.was_told = True
                vetted.append(VettedForm(sequence_id, sequence.prepared))
            sequence.was_reported_ready = is_ready
        return LocalReport(tuple(ready), tuple(forms), tuple(failed), tuple(vetted))

    def adopt(self, vetted: Sequence[VettedForm]) -> None:
        """Compiles what the verdict says, in place of what this rank thought; every rank of the stage calls it."""
        for form in vetted:
            sequence = self._sequences[form.request_id]
            if sequence.prepared == form.prepared:
                continue
            if sequence.prepared is not None:
                self._compiler.discard(sequence.prepared)
            size_bytes = 2 * len(sequence.spec.source) + _ENTRY_OVERHEAD_BYTES
            self._known_forms.put(sequence.spec, form.prepared, size_bytes)
            self._take(sequence, form.prepared)

    def compiled(self, sequence_id: int) -> Ready | None:
        """Returns a sequence's compiled grammar, or None when it is not ready on this rank."""
        prepared = self._sequences[sequence_id].prepared
        outcome = None if prepared is None else self._compiler.poll(prepared)
        return outcome if isinstance(outcome, Ready) else None

    def moved_s(self, sequence_id: int) -> float:
        """Returns when a sequence's grammar, or one that it waits for, was last seen to get on; monotonic clock."""
        sequence = self._sequences[sequence_id]
        if sequence.prepared is None:
            return sequence.moved_s if self._vetter is None else max(sequence.moved_s, self._vetter.heard_s)
        outcome = self._compiler.poll(sequence.prepared)
        return max(sequence.moved_s, outcome.moved_s) if isinstance(outcome, Pending) else sequence.moved_s

    def form(self, sequence_id: int) -> PreparedGrammar | None:
        """Returns the form in which a sequence's grammar is compiled, or None when it is not known yet."""
        return self._sequences[sequence_id].prepared

    def release(self, sequence_id: int) -> None:
        """Drops a sequence."""
        sequence = self._sequences.pop(sequence_id)
        if sequence.prepared is not None:
            self._compiler.discard(sequence.prepared)
        if self._vetter is not None:
            self._vetter.discard(sequence.spec)
        else:
            is_known = self._known_forms[sequence.spec] is not None
            if self._known_forms.unwant(sequence.spec) and not is_known:
                self._known_forms.forget(sequence.spec)

    def close(self) -> None:
        """Drops all sequences, and closes compiler and vetter."""
        self._sequences.clear()
        self._compiler.close()
        if self._vetter is not None:
            self._vetter.close()

    def _look_for_form(self, sequence: _Wanted) -> str | None:
        """Begins to compile a sequence's grammar when its form is known; returns why there will be none, or None."""
        if sequence.prepared is not None:
            return None
        if self._vetter is None:
            known = self._known_forms[sequence.spec]
            if known is not None:
                self._take(sequence, known)
            return None
        report = self._vetter.poll(sequence.spec)
        match None if report is None else report.outcome:
            case Vetted(prepared=prepared):
                self._take(sequence, prepared)
            case Refused(message=message):
                return message
            case None:
                pass
        return None

    def _take(self, sequence: _Wanted, prepared: PreparedGrammar) -> None:
        digest = hashlib.blake2b(msgspec.msgpack.encode(prepared), digest_size=8).digest()
        sequence.prepared, sequence.digest = prepared, int.from_bytes(digest, "big")
        sequence.moved_s = time.monotonic()
        self._compiler.submit(prepared)
