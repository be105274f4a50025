"""Grammars over the ranks of a stage: in whatever order things come, all run the same form, and none waits for ever.

The histories run in one process: what compiles and vets is scripted, what agrees and follows is the real thing.
"""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from grammar_sync.agreed_compiler import AgreedCompiler
from grammar_sync.agreement import LocalReport, Verdict, VettedForm, merge_reports
from grammar_sync.compiler import CompileOutcome, Failed, Pending, Ready
from grammar_sync.engines.backend import Matcher
from grammar_sync.engines.prepared import Engine, PreparedGrammar
from grammar_sync.spec import GrammarSpec
from grammar_sync.vetting.messages import Refused, Vetted
from grammar_sync.vetting.protocol import VettingReport
from grammar_sync.wanted_cache import WantedCache

SPECS = [GrammarSpec("regex", source) for source in "abc"]
ENGINES: tuple[Engine, ...] = ("xgrammar", "llguidance")
HISTORIES = 5000
CACHED_BYTES = 40


class Compiled:
    size_bytes = 10

    def new_matcher(self) -> Matcher:
        raise NotImplementedError


class ScriptedCompiler:
    """Compiles when told to."""

    def __init__(self) -> None:
        self.cache: WantedCache[PreparedGrammar, CompileOutcome] = WantedCache(CACHED_BYTES)
        self.pending: list[PreparedGrammar] = []
        self.moved_s = 0.0

    def submit(self, prepared: PreparedGrammar) -> None:
        if self.cache.want(prepared):
            self.pending.append(prepared)

    def poll(self, prepared: PreparedGrammar) -> CompileOutcome:
        assert self.cache.is_wanted(prepared)
        return self.cache[prepared] or Pending(self.moved_s)

    def discard(self, prepared: PreparedGrammar) -> None:
        assert self.cache.is_wanted(prepared)
        if self.cache.unwant(prepared) and prepared in self.pending:
            self.pending.remove(prepared)
            self.cache.forget(prepared)

    def close(self) -> None:
        self.pending.clear()

    def finish(self, prepared: PreparedGrammar, *, fails: bool) -> None:
        self.pending.remove(prepared)
        self.cache.put(prepared, Failed("this rank cannot") if fails else Ready(Compiled(), 0.1), 10)

    def wanted(self) -> list[PreparedGrammar]:
        forms = [PreparedGrammar(engine, "regex", spec.source, spec.options) for engine in ENGINES for spec in SPECS]
        return [form for form in forms if self.cache.is_wanted(form)]


class ScriptedVetter:
    """Answers when told to; keeps what is final, as the service does."""

    heard_s = 0.0

    def __init__(self) -> None:
        # It remembers next to nothing, so that it often comes to another choice.
        self.cache: WantedCache[GrammarSpec, VettingReport] = WantedCache(0)
        self.pending: list[GrammarSpec] = []

    def submit(self, spec: GrammarSpec) -> None:
        if self.cache.want(spec):
            self.pending.append(spec)

    def poll(self, spec: GrammarSpec) -> VettingReport | None:
        assert self.cache.is_wanted(spec)
        return self.cache[spec]

    def discard(self, spec: GrammarSpec) -> None:
        report = self.poll(spec)
        if not self.cache.unwant(spec):
            return
        if report is None:
            self.pending.remove(spec)
            self.cache.forget(spec)
        elif isinstance(report.outcome, Refused) and not report.outcome.is_final:
            self.cache.forget(spec)

    def close(self) -> None:
        self.pending.clear()

    def answer(self, spec: GrammarSpec, outcome: Vetted | Refused) -> None:
        self.pending.remove(spec)
        if spec in self.cache:
            self.cache.put(spec, VettingReport(outcome), 10)


class Stage:
    """The ranks of a stage and the queue that all of them know."""

    def __init__(self, size: int) -> None:
        self.compilers = [ScriptedCompiler() for _ in range(size)]
        self.vetter = ScriptedVetter()
        vetters = [self.vetter, *[None] * (size - 1)]
        self.ranks = [
            AgreedCompiler(compiler, vetter) for compiler, vetter in zip(self.compilers, vetters, strict=True)
        ]
        self.waiting: dict[int, GrammarSpec] = {}
        self.running: dict[int, GrammarSpec] = {}
        self.ended: dict[int, str] = {}
        self.step = 0
        self._next_id = 0

    def submit(self, spec: GrammarSpec) -> None:
        for rank in self.ranks:
            rank.submit(self._next_id, spec)
        self.waiting[self._next_id] = spec
        self._next_id += 1

    def vet(self, spec: GrammarSpec, engine: Engine) -> None:
        prepared = PreparedGrammar(engine, "regex", spec.source, spec.options)
        self.vetter.answer(spec, Vetted(prepared, 10, 0.1, 0.0))

    def refuse(self, spec: GrammarSpec, *, is_final: bool) -> None:
        self.vetter.answer(spec, Refused("time", "refused", is_final))

    def release(self, sequence_id: int) -> None:
        """Ends a sequence in whatever state it is."""
        for rank in self.ranks:
            rank.release(sequence_id)
        self.waiting.pop(sequence_id, None)
        self.running.pop(sequence_id, None)

    def agree(self) -> Verdict:
        """Runs one step's agreement, and checks all that must hold afterwards."""
        self.step += 1
        waiting = list(self.waiting)
        reports = [rank.report(waiting) for rank in self.ranks]
        verdict = merge_reports(self.step, reports, waiting)
        for rank in self.ranks:
            rank.adopt(verdict.vetted)
        for sequence_id in verdict.ready:
            assert all(rank.compiled(sequence_id) is not None for rank in self.ranks)
            self.running[sequence_id] = self.waiting.pop(sequence_id)
        for failure in verdict.failed:
            self.ended[failure.request_id] = failure.message
            self.release(failure.request_id)
        self.check()
        return verdict

    def check(self) -> None:
        """Fails when ranks that run a sequence run it in different forms, or keep what they need not."""
        for sequence_id, spec in self.running.items():
            forms = {rank.form(sequence_id) for rank in self.ranks}
            assert len(forms) == 1, f"sequence {sequence_id} runs in {forms}"
            (form,) = forms
            assert form is not None
            assert form.source == spec.source
        for compiler in self.compilers:
            assert len(compiler.wanted()) <= len(self.waiting) + len(self.running)

    def settle(self) -> None:
        """Answers all that is open; fails when a sequence still waits after a few steps."""
        for _ in range(8):
            for spec in list(self.vetter.pending):
                self.vet(spec, "xgrammar")
            for compiler in self.compilers:
                for prepared in list(compiler.pending):
                    compiler.finish(prepared, fails=False)
            self.agree()
        assert not self.waiting, "these wait for ever"
        for sequence_id in list(self.running):
            self.release(sequence_id)
        assert all(compiler.wanted() == [] for compiler in self.compilers)
        assert all(compiler.cache.size_bytes <= CACHED_BYTES for compiler in self.compilers)


def run_history(seed: int) -> Stage:
    draw = random.Random(seed)
    stage = Stage(draw.choice([1, 2, 2, 2, 3]))
    for _ in range(draw.randrange(4, 30)):
        open_ids = [*stage.waiting, *stage.running]
        compiler = draw.choice(stage.compilers)
        match draw.randrange(8):
            case 0 | 1:
                stage.submit(draw.choice(SPECS))
            case 2 if stage.vetter.pending:
                stage.vet(draw.choice(stage.vetter.pending), draw.choice(ENGINES))
            case 3 if stage.vetter.pending and draw.random() < 0.4:
                stage.refuse(draw.choice(stage.vetter.pending), is_final=draw.random() < 0.5)
            case 4 | 5 if compiler.pending:
                compiler.finish(draw.choice(compiler.pending), fails=draw.random() < 0.1)
            case 6 if open_ids and draw.random() < 0.5:
                stage.release(draw.choice(open_ids))
            case _:
                stage.agree()
    return stage


def test_no_history_makes_ranks_diverge_or_a_sequence_wait_for_ever() -> None:
    ran = failed = 0
    for seed in range(HISTORIES):
        stage = run_history(seed)
        ran += len(stage.running)
        failed += len(stage.ended)
        stage.settle()
    assert ran > HISTORIES / 10, "most of the histories show nothing"
    assert failed > HISTORIES / 20


def test_when_a_grammar_got_on(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 10.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    stage = Stage(2)
    leader, other = stage.ranks
    stage.submit(SPECS[0])
    stage.vetter.heard_s = 5.0
    assert (leader.moved_s(0), other.moved_s(0)) == (10.0, 10.0), "what was heard before it came is nothing"
    stage.vetter.heard_s = 60.0
    assert (leader.moved_s(0), other.moved_s(0)) == (60.0, 10.0), "it is vetted, or others before it are"
    now_s = 70.0
    stage.vet(SPECS[0], "xgrammar")
    stage.agree()
    stage.vetter.heard_s = 80.0
    assert leader.moved_s(0) == 70.0, "vetting does not concern it any more"
    (prepared,) = stage.compilers[0].pending
    stage.compilers[0].moved_s = 85.0
    assert leader.moved_s(0) == 85.0, "those before it are compiled"
    now_s = 90.0
    stage.compilers[0].finish(prepared, fails=False)
    stage.agree()
    now_s = 100.0
    stage.agree()
    assert leader.moved_s(0) == 90.0, "it is ready here, but not on the other rank"
    assert 0 in stage.waiting


class Histories(RuleBasedStateMachine):
    """The same, but hypothesis looks for the shortest history that goes wrong."""

    @initialize(size=st.integers(1, 3))
    def begin(self, size: int) -> None:
        self.stage = Stage(size)

    @rule(spec=st.sampled_from(SPECS))
    def submit(self, spec: GrammarSpec) -> None:
        self.stage.submit(spec)

    @precondition(lambda self: self.stage.vetter.pending)
    @rule(data=st.data(), engine=st.sampled_from(ENGINES))
    def vet(self, data: st.DataObject, engine: Engine) -> None:
        self.stage.vet(data.draw(st.sampled_from(self.stage.vetter.pending)), engine)

    @precondition(lambda self: self.stage.vetter.pending)
    @rule(data=st.data(), is_final=st.booleans())
    def refuse(self, data: st.DataObject, is_final: bool) -> None:
        self.stage.refuse(data.draw(st.sampled_from(self.stage.vetter.pending)), is_final=is_final)

    @precondition(lambda self: any(compiler.pending for compiler in self.stage.compilers))
    @rule(data=st.data(), fails=st.booleans())
    def finish(self, data: st.DataObject, fails: bool) -> None:
        compiler = data.draw(st.sampled_from([one for one in self.stage.compilers if one.pending]))
        compiler.finish(data.draw(st.sampled_from(compiler.pending)), fails=fails)

    @precondition(lambda self: self.stage.waiting or self.stage.running)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.stage.release(data.draw(st.sampled_from([*self.stage.waiting, *self.stage.running])))

    @rule()
    def agree(self) -> None:
        self.stage.agree()

    def teardown(self) -> None:
        if hasattr(self, "stage"):
            self.stage.settle()


TestHistories = Histories.TestCase
TestHistories.settings = settings(deadline=None, max_examples=40, stateful_step_count=25)


def prepared(spec: GrammarSpec, engine: Engine = "xgrammar") -> PreparedGrammar:
    return PreparedGrammar(engine, "regex", spec.source, spec.options)


def test_a_form_is_told_once_and_what_all_know_is_not_told_again() -> None:
    stage = Stage(2)
    stage.submit(SPECS[0])
    assert stage.agree() == Verdict(1)
    stage.vet(SPECS[0], "llguidance")
    told = stage.agree()
    assert told.vetted == (VettedForm(0, prepared(SPECS[0], "llguidance")),)
    assert stage.agree() == Verdict(3)
    for compiler in stage.compilers:
        compiler.finish(prepared(SPECS[0], "llguidance"), fails=False)
    assert stage.agree() == Verdict(4, ready=(0,))
    stage.submit(SPECS[0])
    assert stage.agree() == Verdict(5, ready=(1,)), "cached on all ranks: ready in the step it comes in"


def test_a_rank_that_knows_another_form_takes_the_one_that_is_told() -> None:
    """Both have a grammar cached, but the vetting rank forgot its choice and now comes to another."""
    stage = Stage(2)
    stage.submit(SPECS[0])
    stage.vet(SPECS[0], "xgrammar")
    stage.agree()
    for compiler in stage.compilers:
        compiler.finish(prepared(SPECS[0]), fails=False)
    stage.agree()
    stage.release(0)
    stage.submit(SPECS[0])
    stage.vet(SPECS[0], "llguidance")
    assert stage.agree().vetted == (VettedForm(1, prepared(SPECS[0], "llguidance")),)
    stage.compilers[0].finish(prepared(SPECS[0], "llguidance"), fails=False)
    assert stage.agree().ready == (), "one rank is ready with this form, the other was with that one"
    stage.compilers[1].finish(prepared(SPECS[0], "llguidance"), fails=False)
    assert stage.agree().ready == (1,)


def test_a_rank_that_dropped_a_grammar_is_told_again() -> None:
    stage = Stage(2)
    stage.submit(SPECS[0])
    stage.vet(SPECS[0], "xgrammar")
    stage.agree()
    for compiler in stage.compilers:
        compiler.finish(prepared(SPECS[0]), fails=False)
    stage.agree()
    stage.release(0)
    stage.compilers[1] = ScriptedCompiler()
    fresh = stage.ranks[1] = AgreedCompiler(stage.compilers[1])
    stage.submit(SPECS[0])
    stage.vet(SPECS[0], "xgrammar")
    assert fresh.form(1) is None
    assert stage.agree() == Verdict(3), "the vetting rank thinks that all are ready"
    assert stage.agree().vetted == (VettedForm(1, prepared(SPECS[0])),)
    stage.compilers[1].finish(prepared(SPECS[0]), fails=False)
    assert stage.agree().ready == (1,)


def test_ranks_that_are_ready_with_different_forms_are_not_ready() -> None:
    stage = Stage(2)
    for engine in ENGINES:
        stage.submit(SPECS[0])
        stage.vet(SPECS[0], engine)
        stage.agree()
        for compiler in stage.compilers:
            compiler.finish(prepared(SPECS[0], engine), fails=False)
        stage.agree()
        for sequence_id in list(stage.running):
            stage.release(sequence_id)
    stage.submit(SPECS[0])
    stage.vet(SPECS[0], "xgrammar")
    reports = [rank.report([2]) for rank in stage.ranks]
    assert [report.ready for report in reports] == [(2,), (2,)]
    assert reports[0].forms != reports[1].forms, "one remembers the form of the last time"
    assert stage.agree().ready == ()
    assert stage.agree().ready == (2,)


@pytest.mark.parametrize("rank", [0, 1])
def test_t4_a_failure_on_one_rank_fails_it_for_all(rank: int) -> None:
    """SCENARIOS T4: what one rank's clock alone calls too late is too late for all, in the same step; S7: likewise."""
    stage = Stage(2)
    stage.submit(SPECS[0])
    stage.vet(SPECS[0], "xgrammar")
    stage.agree()
    for index, compiler in enumerate(stage.compilers):
        compiler.finish(prepared(SPECS[0]), fails=index == rank)
    verdict = stage.agree()
    assert (verdict.ready, [failure.request_id for failure in verdict.failed]) == ((), [0])
    assert stage.ended == {0: "this rank cannot"}


def test_a_time_out_is_forgotten_and_a_refusal_is_not() -> None:
    stage = Stage(2)
    for is_final in (False, True):
        stage.submit(SPECS[0])
        stage.submit(SPECS[0])
        stage.refuse(SPECS[0], is_final=is_final)
        assert [failure.message for failure in stage.agree().failed] == ["refused"] * 2
    stage.submit(SPECS[0])
    assert stage.vetter.pending == [SPECS[0]], "the scripted vetter has room for nothing"


def test_reports_say_what_was_compiled() -> None:
    stage = Stage(2)
    stage.submit(SPECS[0])
    assert stage.ranks[0].report([0]) == LocalReport()
    stage.vet(SPECS[0], "xgrammar")
    stage.agree()
    for compiler in stage.compilers:
        compiler.finish(prepared(SPECS[0]), fails=False)
    one, other = (rank.report([0]) for rank in stage.ranks)
    assert one.ready == other.ready == (0,)
    assert one.forms == other.forms != (0,)
    assert one.vetted == other.vetted == ()
