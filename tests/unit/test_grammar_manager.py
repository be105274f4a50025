"""The manager: sequences in and out, one compile for many, failures and refusals that touch one sequence alone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest
import torch
from grammars import END, allowed_ids, encode, local_compiler, small_vocabulary

from grammar_sync.agreement import GrammarFailure, LocalReport
from grammar_sync.compiler import CompileOutcome, GrammarCompiler, Pending, ThreadedGrammarCompiler
from grammar_sync.engines.backend import GrammarBackend
from grammar_sync.engines.prepared import CompileError, PreparedGrammar
from grammar_sync.engines.xgrammar_backend import XGrammarBackend, XGrammarCompiled
from grammar_sync.manager import GrammarManager, GrammarRefusal, GrammarStateError
from grammar_sync.spec import GrammarSpec, parse_grammar

VOCABULARY = small_vocabulary()


FAILS = "fails"
"""A regex that can be read, and that the engine is made to refuse."""


class CountingBackend:
    def __init__(self, backend: GrammarBackend) -> None:
        self.sources: list[str] = []
        self._backend = backend

    def prepare(self, spec: GrammarSpec) -> tuple[PreparedGrammar, ...]:
        return self._backend.prepare(spec)

    def compile(self, prepared: PreparedGrammar) -> XGrammarCompiled:
        self.sources.append(prepared.source)
        if prepared.source == FAILS:
            raise CompileError("the engine refuses it")
        compiled = self._backend.compile(prepared)
        assert isinstance(compiled, XGrammarCompiled)
        return compiled


class DelayedCompiler:
    """Keeps the outcome of each grammar back until it was polled so many times."""

    def __init__(self, compiler: GrammarCompiler, polls: dict[str, int]) -> None:
        self._compiler = compiler
        self._polls = dict(polls)

    def submit(self, prepared: PreparedGrammar) -> None:
        self._compiler.submit(prepared)

    def poll(self, prepared: PreparedGrammar) -> CompileOutcome:
        left = self._polls.get(prepared.source, 0)
        if left:
            self._polls[prepared.source] = left - 1
            return Pending()
        return self._compiler.poll(prepared)

    def discard(self, prepared: PreparedGrammar) -> None:
        self._compiler.discard(prepared)

    def close(self) -> None:
        self._compiler.close()


def spec_of(**fields: object) -> GrammarSpec:
    spec = parse_grammar(fields)
    assert spec is not None
    return spec


def reported(manager: GrammarManager, waiting: Sequence[int]) -> LocalReport:
    """Returns the first report that has an outcome for all who wait."""
    end = time.monotonic() + 20
    while True:
        report = manager.local_report(waiting)
        if len(report.ready) + len(report.failed) == len(waiting):
            return report
        assert time.monotonic() < end, "compiles did not end"
        time.sleep(0.001)


@pytest.fixture(scope="module")
def xgrammar_backend() -> XGrammarBackend:
    return XGrammarBackend(VOCABULARY)


@pytest.fixture
def backend(xgrammar_backend: XGrammarBackend) -> CountingBackend:
    return CountingBackend(xgrammar_backend)


@pytest.fixture
def manager(backend: CountingBackend) -> Iterator[GrammarManager]:
    made = GrammarManager(VOCABULARY, local_compiler(backend))
    yield made
    made.close()


def started(manager: GrammarManager, sequence_id: int, spec: GrammarSpec) -> None:
    manager.submit(sequence_id, spec)
    assert reported(manager, [sequence_id]).ready == (sequence_id,)
    manager.start(sequence_id)


def masks_of(manager: GrammarManager, sequence_ids: Sequence[int]) -> torch.Tensor:
    return manager.finish_masks(manager.begin_masks(sequence_ids)).words


def test_many_sequences_of_one_grammar_share_a_compile(manager: GrammarManager, backend: CountingBackend) -> None:
    spec = spec_of(json_schema={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    for sequence_id in (3, 4, 5):
        manager.submit(sequence_id, spec)
    assert reported(manager, [3, 4, 5]).ready == (3, 4, 5)
    for sequence_id in (3, 4, 5):
        manager.start(sequence_id)
    for token_id in encode('{"a": '):
        manager.accept(4, token_id)
    masks = masks_of(manager, [3, 4])
    assert set(encode("1")) <= set(allowed_ids(masks[1]))
    assert not set(encode("1")) & set(allowed_ids(masks[0])), "each has its own matcher"
    assert len(backend.sources) == 1


def test_statistics_of_a_hit_and_a_miss(backend: CountingBackend) -> None:
    # However quick the compile is, it is not done as the first one comes.
    compiler = DelayedCompiler(ThreadedGrammarCompiler(backend), {"a+": 1})
    manager = GrammarManager(VOCABULARY, local_compiler(backend, compiler))
    spec = spec_of(regex="a+")
    started(manager, 1, spec)
    started(manager, 2, spec)
    masks_of(manager, [1, 2])
    masks_of(manager, [2])
    first, second = manager.statistics(1), manager.statistics(2)
    assert (first.cache_hit, second.cache_hit) == (False, True)
    assert first.compile_s == second.compile_s > 0
    assert (first.mask_rows, second.mask_rows) == (1, 2)
    assert 0 < first.mask_s < 10
    manager.close()


def test_a_failure_is_one_sequence_s_own(manager: GrammarManager) -> None:
    for sequence_id, source in enumerate(["a+", "(", "b+"]):
        manager.submit(sequence_id, spec_of(regex=source))
    report = reported(manager, [2, 1, 0])
    assert report.ready == (2, 0)
    assert [failure.request_id for failure in report.failed] == [1]
    assert "not closed" in report.failed[0].message
    manager.release(1)
    manager.start(2)
    manager.accept(2, encode("b")[0])
    with pytest.raises(GrammarStateError, match="local_report: sequence 1 is not known"):
        manager.local_report([1])


def test_a_slow_compile_delays_nobody_else(backend: CountingBackend) -> None:
    compiler = DelayedCompiler(ThreadedGrammarCompiler(backend), {"slow": 60, FAILS: 30})
    manager = GrammarManager(VOCABULARY, local_compiler(backend, compiler))
    manager.submit(1, spec_of(regex="slow"))
    manager.submit(2, spec_of(regex="quick"))
    manager.submit(3, spec_of(regex=FAILS))
    assert reported(manager, [2]).ready == (2,)
    start = time.monotonic()
    report = manager.local_report([1, 3])
    assert (report.ready, report.failed) == ((), ())
    assert time.monotonic() - start < 1.0
    final = reported(manager, [1, 2, 3])
    assert final.ready == (1, 2)
    assert [failure.request_id for failure in final.failed] == [3]
    manager.close()


def test_replay_is_the_same_as_accept(manager: GrammarManager) -> None:
    spec = spec_of(json_object=True)
    text = '{"name": "Ada", "tags": [1, {"x": null}]}'
    ids = encode(text)
    started(manager, 1, spec)
    started(manager, 2, spec)
    for cut, token_id in enumerate(ids):
        assert token_id in allowed_ids(masks_of(manager, [1])[0])
        manager.accept(1, token_id)
        manager.replay(2, ids[: cut + 1])
        one, other = masks_of(manager, [1, 2])
        assert one.tolist() == other.tolist()
    manager.accept(1, END)
    manager.accept(2, END)
    assert manager.is_terminated(1)
    assert manager.is_terminated(2)


def test_start_begins_anew(manager: GrammarManager) -> None:
    started(manager, 1, spec_of(regex="ab"))
    fresh = masks_of(manager, [1])
    manager.accept(1, encode("a")[0])
    manager.start(1)
    assert masks_of(manager, [1]).tolist() == fresh.tolist()


def test_a_refusal_says_state_and_tokens_and_leaves_others_alone(manager: GrammarManager) -> None:
    started(manager, 1, spec_of(regex="abc"))
    started(manager, 2, spec_of(regex="abc"))
    a, b, c = (encode(letter)[0] for letter in "abc")
    manager.accept(1, a)
    manager.accept(2, a)
    with pytest.raises(GrammarRefusal, match=rf"sequence 1 refuses token {c} as output token 1 .*\[{a}\]") as caught:
        manager.accept(1, c)
    assert (caught.value.sequence_id, caught.value.token_id, caught.value.accepted) == (1, c, (a,))
    assert not caught.value.terminated
    manager.accept(2, b)
    with pytest.raises(GrammarRefusal, match="refuses token 99999"):
        manager.accept(2, 99_999)


def test_nothing_follows_the_end(manager: GrammarManager) -> None:
    started(manager, 1, spec_of(regex="a"))
    manager.accept(1, encode("a")[0])
    assert not manager.is_terminated(1)
    manager.accept(1, END)
    assert manager.is_terminated(1)
    with pytest.raises(GrammarRefusal, match="state: terminated") as caught:
        manager.accept(1, encode("a")[0])
    assert caught.value.terminated
    with pytest.raises(GrammarStateError, match="sequence 1 has terminated"):
        masks_of(manager, [1])


def test_release_in_any_state_frees_the_id(manager: GrammarManager, backend: CountingBackend) -> None:
    spec = spec_of(regex="a")
    manager.submit(1, spec)
    manager.release(1)
    started(manager, 1, spec)
    manager.release(1)
    started(manager, 1, spec)
    assert backend.sources.count("a") <= 2
    with pytest.raises(GrammarStateError, match="release: sequence 9"):
        manager.release(9)


def test_calls_out_of_order_are_errors(manager: GrammarManager) -> None:
    manager.submit(1, spec_of(regex="a"))
    with pytest.raises(GrammarStateError, match="there already"):
        manager.submit(1, spec_of(regex="b"))
    with pytest.raises(GrammarStateError, match="not reported ready"):
        manager.start(1)
    with pytest.raises(GrammarStateError, match="begin_masks: sequence 1 was not started"):
        masks_of(manager, [1])
    with pytest.raises(GrammarStateError, match="accept: sequence 2 is not known"):
        manager.accept(2, 5)
    assert reported(manager, [1]).ready == (1,)
    assert manager.local_report([]) == LocalReport()
    assert GrammarFailure(1, "x").request_id == 1
