"""Random histories of the managers of two ranks: whatever compiles, failures and ends do, the ranks never diverge.

Compiles end when the history says so, on each rank by itself; everything else is what the step loop does in lockstep.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from grammars import allowed_ids, small_vocabulary
from hypothesis import given, settings
from hypothesis import strategies as st
from thinking_models import reasoning

from grammar_sync.agreed_compiler import AgreedCompiler
from grammar_sync.agreement import merge_reports
from grammar_sync.compiler import CompileOutcome, Failed, Pending, Ready
from grammar_sync.engines.backend import compile_spec
from grammar_sync.engines.prepared import PreparedGrammar
from grammar_sync.engines.xgrammar_backend import XGrammarBackend
from grammar_sync.fill_pool import FillPool
from grammar_sync.manager import GrammarManager, GrammarRefusal, GrammarStateError
from grammar_sync.masks import RowFault
from grammar_sync.spec import GrammarSpec, parse_grammar
from grammar_sync.thinking import ThinkingRules
from grammar_sync.vetting.messages import Refused, Vetted
from grammar_sync.vetting.protocol import VettingReport

RANKS = 2
VOCABULARY = small_vocabulary()
POOL = FillPool(deadline_s=60)


def _spec(**fields: object) -> GrammarSpec:
    spec = parse_grammar(fields)
    assert spec is not None
    return spec


SPECS = (
    _spec(regex="[ab]{1,6}c"),
    _spec(json_object=True),
    _spec(choice=["yes", "no", "yes and no"]),
    _spec(ebnf='root ::= "(" root ")" | [a-c]+'),
)
_BACKEND = XGrammarBackend(VOCABULARY)
FORMS = dict(zip(SPECS, (compile_spec(_BACKEND, spec) for spec in SPECS), strict=True))
COMPILED = dict(FORMS.values())


@dataclass
class ScriptedCompiler:
    """Outcomes come when the history says so; counts who wants what."""

    outcomes: dict[PreparedGrammar, CompileOutcome] = field(default_factory=dict)
    wanted: Counter[PreparedGrammar] = field(default_factory=Counter)

    def submit(self, prepared: PreparedGrammar) -> None:
        self.wanted[prepared] += 1
        self.outcomes.setdefault(prepared, Pending())

    def poll(self, prepared: PreparedGrammar) -> CompileOutcome:
        assert self.wanted[prepared] > 0
        return self.outcomes[prepared]

    def discard(self, prepared: PreparedGrammar) -> None:
        assert self.wanted[prepared] > 0
        self.wanted[prepared] -= 1

    def close(self) -> None:
        pass

    def finish(self, draw: random.Random) -> None:
        """Ends a pending compile, now and then with a failure of this rank alone."""
        pending = [form for form, outcome in self.outcomes.items() if isinstance(outcome, Pending)]
        if pending:
            form = draw.choice(pending)
            self.outcomes[form] = Failed("only here") if draw.random() < 0.2 else Ready(COMPILED[form], 0.1)

    def evict(self, draw: random.Random) -> None:
        """Forgets an outcome that nobody wants."""
        free = [form for form in self.outcomes if not self.wanted[form]]
        if free:
            del self.outcomes[draw.choice(free)]


@dataclass
class ScriptedVetter:
    """The vetting rank's child process, as the history has it."""

    heard_s: float = 0.0
    reports: dict[GrammarSpec, VettingReport] = field(default_factory=dict)
    wanted: Counter[GrammarSpec] = field(default_factory=Counter)

    def submit(self, spec: GrammarSpec) -> None:
        self.wanted[spec] += 1

    def poll(self, spec: GrammarSpec) -> VettingReport | None:
        assert self.wanted[spec] > 0
        return self.reports.get(spec)

    def discard(self, spec: GrammarSpec) -> None:
        assert self.wanted[spec] > 0
        self.wanted[spec] -= 1
        report = self.reports.get(spec)
        if not self.wanted[spec] and report is not None and isinstance(report.outcome, Refused):
            del self.reports[spec]

    def close(self) -> None:
        pass

    def finish(self, draw: random.Random) -> None:
        asked = [spec for spec, count in self.wanted.items() if count and spec not in self.reports]
        if asked:
            spec = draw.choice(asked)
            timed_out = draw.random() < 0.15
            outcome = Refused("time", "too slow", is_final=False) if timed_out else Vetted(FORMS[spec][0], 1, 0.1, 0.0)
            self.reports[spec] = VettingReport(outcome)


class Stage:
    """Two ranks in lockstep: one replicated queue, one verdict a step, one set of ids drawn."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.vetter = ScriptedVetter()
        self.compilers = [ScriptedCompiler() for _ in range(RANKS)]
        self.managers = [
            GrammarManager(VOCABULARY, AgreedCompiler(compiler, None if rank else self.vetter), reasoning(), POOL)
            for rank, compiler in enumerate(self.compilers)
        ]
        self.waiting: list[int] = []
        self.running: dict[int, list[int]] = {}
        self.specs: dict[int, GrammarSpec] = {}
        self.next_id = 0
        self.step_number = 0
        self.accepted_tokens = 0

    def submit(self) -> None:
        sequence_id, self.next_id = self.next_id, self.next_id + 1
        spec = self.draw.choice(SPECS)
        thinks = self.draw.random() < 0.3
        for manager in self.managers:
            manager.submit(sequence_id, spec)
            if thinks:
                manager.think_first(sequence_id, ThinkingRules(budget=2, before_grammar=True))
        self.waiting.append(sequence_id)
        self.specs[sequence_id] = spec

    def vet(self) -> None:
        self.vetter.finish(self.draw)

    def compile_somewhere(self) -> None:
        self.draw.choice(self.compilers).finish(self.draw)

    def evict(self) -> None:
        self.draw.choice(self.compilers).evict(self.draw)

    def agree(self) -> None:
        self.step_number += 1
        reports = [manager.local_report(self.waiting) for manager in self.managers]
        verdict = merge_reports(self.step_number, reports, self.waiting)
        for manager in self.managers:
            manager.adopt(verdict.vetted)
            for sequence_id in verdict.ready:
                manager.start(sequence_id)
        for sequence_id in verdict.ready:
            self.running[sequence_id] = []
        for failure in verdict.failed:
            self._release(failure.request_id)
        ended = {*verdict.ready, *(failure.request_id for failure in verdict.failed)}
        self.waiting = [sequence_id for sequence_id in self.waiting if sequence_id not in ended]

    def decode(self) -> None:
        """Fills the masks of some running sequences, and has each accept an id that all ranks allow."""
        rows = [sequence_id for sequence_id in self.running if self.draw.random() < 0.7]
        filled = [manager.finish_masks(manager.begin_masks(rows)) for manager in self.managers]
        for row, sequence_id in enumerate(rows):
            faults = [max(one.faults[row] for one in filled)]
            if faults != [RowFault.NONE]:
                assert faults == [RowFault.REFUSED]
                self._end(sequence_id)
                continue
            allowed = [allowed_ids(one.words[row]) for one in filled]
            assert allowed[0] == allowed[1]
            token_id = self.draw.choice(allowed[0])
            for manager in self.managers:
                manager.accept(sequence_id, token_id)
            self.running[sequence_id].append(token_id)
            self.accepted_tokens += 1
            if self.managers[0].is_terminated(sequence_id):
                self._end(sequence_id)

    def refuse_on_one_rank(self) -> None:
        """One rank's engine refuses what was drawn: the sequence lives until its next mask says so."""
        if self.running:
            sequence_id = self.draw.choice(sorted(self.running))
            with pytest.raises(GrammarRefusal):
                self.draw.choice(self.managers).accept(sequence_id, VOCABULARY.vocab_size + 5)

    def rollback(self) -> None:
        clean = [one for one in sorted(self.running) if not self._is_refused(one)]
        if clean:
            sequence_id = self.draw.choice(clean)
            count = self.draw.randint(0, len(self.running[sequence_id]))
            for manager in self.managers:
                manager.rollback(sequence_id, count)
                with pytest.raises(GrammarStateError):
                    manager.rollback(sequence_id, -1)
            del self.running[sequence_id][len(self.running[sequence_id]) - count :]

    def replay(self) -> None:
        """Preempted and resumed, on all ranks or, after a restart, on one."""
        clean = [one for one in sorted(self.running) if not self._is_refused(one)]
        if clean:
            sequence_id = self.draw.choice(clean)
            for manager in self.draw.sample(self.managers, self.draw.randint(1, RANKS)):
                manager.replay(sequence_id, list(self.running[sequence_id]))

    def copy(self) -> None:
        """A copy moves by itself; the sequence does not notice, which the next masks show."""
        clean = [one for one in sorted(self.running) if not self._is_refused(one)]
        if clean:
            sequence_id = self.draw.choice(clean)
            copies = [manager.copy_matcher(sequence_id) for manager in self.managers]
            tried = self.draw.sample(range(VOCABULARY.vocab_size), 8)
            assert len({tuple(copy.accept(token_id) for token_id in tried) for copy in copies}) == 1

    def bring_up(self) -> None:
        """Gives a new sequence all the time it needs to be ready or to fail."""
        self.submit()
        sequence_id = self.waiting[-1]
        for _ in range(40):
            self.vet()
            for compiler in self.compilers:
                compiler.finish(self.draw)
            self.agree()
            if sequence_id not in self.waiting:
                return
        raise AssertionError(f"sequence {sequence_id} waits for ever")

    def abort(self) -> None:
        """Ends a sequence in whatever state it is."""
        known = [*self.waiting, *self.running]
        if known:
            sequence_id = self.draw.choice(known)
            self.running.pop(sequence_id, None)
            self.waiting = [one for one in self.waiting if one != sequence_id]
            self._release(sequence_id)

    def check(self) -> None:
        for compiler in self.compilers:
            assert sum(compiler.wanted.values()) <= len(self.waiting) + len(self.running)
        for sequence_id, token_ids in self.running.items():
            accepted = [manager._sequence(sequence_id, "test").accepted for manager in self.managers]
            assert accepted == [token_ids, token_ids]

    def left_at_the_end(self) -> list[str]:
        """Ends all sequences; returns what is kept for them all the same."""
        for sequence_id in (*self.waiting, *self.running):
            self._release(sequence_id)
        kept = [f"compiler {rank}" for rank, one in enumerate(self.compilers) if sum(one.wanted.values())]
        kept += [f"manager {rank}" for rank, one in enumerate(self.managers) if one._sequences]
        return kept + ["vetter"] * bool(sum(self.vetter.wanted.values()))

    def _is_refused(self, sequence_id: int) -> bool:
        return any(manager._sequence(sequence_id, "test").refused for manager in self.managers)

    def _end(self, sequence_id: int) -> None:
        del self.running[sequence_id]
        self._release(sequence_id)

    def _release(self, sequence_id: int) -> None:
        for manager in self.managers:
            manager.release(sequence_id)


_OPERATIONS = (
    ("submit", 3),
    ("bring_up", 2),
    ("vet", 3),
    ("compile_somewhere", 5),
    ("agree", 5),
    ("decode", 6),
    ("rollback", 1),
    ("replay", 1),
    ("copy", 1),
    ("refuse_on_one_rank", 1),
    ("abort", 1),
    ("evict", 1),
)
_NAMES = [name for name, weight in _OPERATIONS for _ in range(weight)]


def run_history(names: list[str], seed: int) -> Stage:
    """Returns two ranks that ran a history, and agreed after each operation of it."""
    stage = Stage(seed)
    for name in names:
        getattr(stage, name)()
        stage.check()
    return stage


@settings(deadline=None, max_examples=150)
@given(names=st.lists(st.sampled_from(_NAMES), max_size=40), seed=st.integers(0, 2**32))
def test_two_ranks_never_diverge(names: list[str], seed: int) -> None:
    assert run_history(names, seed).left_at_the_end() == []


@pytest.mark.sweep
@pytest.mark.timeout(1200)
def test_two_ranks_never_diverge_in_5000_histories() -> None:
    tokens = 0
    for seed in range(5000):
        draw = random.Random(seed)
        stage = run_history(draw.choices(_NAMES, k=draw.randint(5, 60)), seed)
        assert stage.left_at_the_end() == [], f"seed {seed}"
        tokens += stage.accepted_tokens
    assert tokens > 5000, "the histories reach what they are to try"
