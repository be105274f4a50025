"""Compiling off the loop: single flight, a bounded cache, failures in one line, and nothing that waits."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from grammars import END, allowed_ids, encode, small_vocabulary

from grammar_sync.compiler import CompileOutcome, CompilerError, Failed, Pending, Ready, ThreadedGrammarCompiler
from grammar_sync.engines.backend import Matcher, compile_spec
from grammar_sync.engines.prepared import CompileError, PreparedGrammar
from grammar_sync.engines.xgrammar_backend import XGrammarBackend, one_line
from grammar_sync.masks import MaskFiller
from grammar_sync.spec import GrammarOptions, GrammarSpec, parse_grammar

VOCABULARY = small_vocabulary()
PATIENCE_S = 20.0


class FakeCompiled:
    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes

    def new_matcher(self) -> Matcher:
        raise NotImplementedError


class FakeBackend:
    """Compiles when told to; sources that begin with "bad" fail, "broken" raises what nobody expects."""

    def __init__(self, *, held: bool = False) -> None:
        self.gate = threading.Event()
        if not held:
            self.gate.set()
        self.compiled: list[str] = []
        self.running = 0
        self.most_running = 0
        self._lock = threading.Lock()

    def prepare(self, spec: GrammarSpec) -> tuple[PreparedGrammar, ...]:
        return (PreparedGrammar("xgrammar", "regex", spec.source, spec.options),)

    def compile(self, prepared: PreparedGrammar) -> FakeCompiled:
        with self._lock:
            self.compiled.append(prepared.source)
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        try:
            if not self.gate.wait(PATIENCE_S):
                raise TimeoutError("the test never opened the gate")
            if prepared.source.startswith("bad"):
                raise CompileError(f"no such grammar: {prepared.source}")
            if prepared.source.startswith("broken"):
                raise KeyError(prepared.source)
            return FakeCompiled(1000)
        finally:
            with self._lock:
                self.running -= 1


def regex(source: str) -> PreparedGrammar:
    return PreparedGrammar("xgrammar", "regex", source, GrammarOptions())


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.001)


def settled(compiler: ThreadedGrammarCompiler, spec: PreparedGrammar) -> CompileOutcome:
    until(lambda: not isinstance(compiler.poll(spec), Pending))
    return compiler.poll(spec)


@pytest.fixture
def held() -> Iterator[FakeBackend]:
    backend = FakeBackend(held=True)
    yield backend
    backend.gate.set()


def test_submit_and_poll_do_not_wait(held: FakeBackend) -> None:
    compiler = ThreadedGrammarCompiler(held)
    start = time.monotonic()
    compiler.submit(regex("a"))
    assert isinstance(compiler.poll(regex("a")), Pending)
    assert time.monotonic() - start < 1.0
    held.gate.set()
    outcome = settled(compiler, regex("a"))
    assert isinstance(outcome, Ready)
    assert outcome.compile_s > 0


def test_one_compile_for_all_who_want_it(held: FakeBackend) -> None:
    compiler = ThreadedGrammarCompiler(held, max_threads=4)
    for _ in range(5):
        compiler.submit(regex("a"))
    held.gate.set()
    settled(compiler, regex("a"))
    compiler.submit(regex("a"))
    assert isinstance(compiler.poll(regex("a")), Ready)
    assert held.compiled == ["a"]


def test_at_most_max_threads_compile_at_once(held: FakeBackend) -> None:
    compiler = ThreadedGrammarCompiler(held, max_threads=2)
    specs = [regex(f"a{i}") for i in range(6)]
    for spec in specs:
        compiler.submit(spec)
    until(lambda: held.running == 2)
    held.gate.set()
    for spec in specs:
        assert isinstance(settled(compiler, spec), Ready)
    assert held.most_running == 2
    assert sorted(held.compiled) == sorted(spec.source for spec in specs)


def test_one_that_waits_moves_with_those_before_it(held: FakeBackend) -> None:
    compiler = ThreadedGrammarCompiler(held, max_threads=1)
    began_s = time.monotonic()
    compiler.submit(regex("first"))
    compiler.submit(regex("second"))
    first = compiler.poll(regex("first"))
    assert isinstance(first, Pending)
    assert first.moved_s >= began_s
    held.gate.set()
    settled(compiler, regex("first"))
    settled(compiler, regex("second"))
    held.gate.clear()
    freed_s = time.monotonic()
    compiler.submit(regex("third"))
    compiler.submit(regex("fourth"))
    third, fourth = compiler.poll(regex("third")), compiler.poll(regex("fourth"))
    assert isinstance(third, Pending)
    assert isinstance(fourth, Pending)
    assert began_s <= fourth.moved_s <= freed_s <= third.moved_s
    held.gate.set()


def test_failures_are_kept_and_touch_nobody_else() -> None:
    backend = FakeBackend()
    compiler = ThreadedGrammarCompiler(backend)
    for source in ("bad", "good", "bad"):
        compiler.submit(regex(source))
    assert settled(compiler, regex("bad")) == Failed("no such grammar: bad")
    assert isinstance(settled(compiler, regex("good")), Ready)
    compiler.discard(regex("bad"))
    compiler.discard(regex("bad"))
    compiler.submit(regex("bad"))
    assert compiler.poll(regex("bad")) == Failed("no such grammar: bad")
    assert backend.compiled.count("bad") == 1


def test_an_error_nobody_expected_fails_that_grammar_and_the_next_one_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    uncaught: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda hooked: uncaught.append(hooked.exc_type))
    compiler = ThreadedGrammarCompiler(FakeBackend(), max_threads=1)
    compiler.submit(regex("broken"))
    compiler.submit(regex("good"))
    assert settled(compiler, regex("broken")) == Failed("internal error of the grammar compiler")
    assert isinstance(settled(compiler, regex("good")), Ready)
    until(lambda: uncaught == [KeyError])


def test_what_nobody_wants_any_more_is_not_compiled(held: FakeBackend) -> None:
    compiler = ThreadedGrammarCompiler(held, max_threads=1)
    for source in ("first", "left", "shared", "shared"):
        compiler.submit(regex(source))
    compiler.discard(regex("left"))
    compiler.discard(regex("shared"))
    held.gate.set()
    assert isinstance(settled(compiler, regex("shared")), Ready)
    assert held.compiled == ["first", "shared"]


def test_a_compile_that_runs_when_it_is_discarded_is_kept(held: FakeBackend) -> None:
    compiler = ThreadedGrammarCompiler(held)
    compiler.submit(regex("a"))
    until(lambda: held.running == 1)
    compiler.discard(regex("a"))
    held.gate.set()
    until(lambda: compiler.cached_bytes > 0)
    compiler.submit(regex("a"))
    assert isinstance(compiler.poll(regex("a")), Ready)
    assert held.compiled == ["a"]


def test_the_cache_is_bounded_and_drops_the_least_recently_wanted() -> None:
    backend = FakeBackend()
    compiler = ThreadedGrammarCompiler(backend, cache_limit_bytes=5000)
    for number in range(200):
        spec = regex(f"a{number}")
        compiler.submit(spec)
        settled(compiler, spec)
        compiler.discard(spec)
        assert compiler.cached_bytes <= 5000
    compiler.submit(regex("a199"))
    assert isinstance(compiler.poll(regex("a199")), Ready)
    compiler.submit(regex("a0"))
    settled(compiler, regex("a0"))
    assert backend.compiled.count("a199") == 1
    assert backend.compiled.count("a0") == 2


def test_failures_count_in_the_cache_too() -> None:
    compiler = ThreadedGrammarCompiler(FakeBackend(), cache_limit_bytes=3000)
    for number in range(50):
        spec = regex(f"bad{number}")
        compiler.submit(spec)
        settled(compiler, spec)
        compiler.discard(spec)
    assert 0 < compiler.cached_bytes <= 3000


def test_a_grammar_that_is_wanted_is_never_dropped() -> None:
    compiler = ThreadedGrammarCompiler(FakeBackend(), cache_limit_bytes=0)
    for source in ("a", "b"):
        compiler.submit(regex(source))
        assert isinstance(settled(compiler, regex(source)), Ready)
    assert isinstance(compiler.poll(regex("a")), Ready)
    compiler.discard(regex("a"))
    compiler.discard(regex("b"))
    assert compiler.cached_bytes == 0


def test_someone_who_waits_is_woken_until_close(held: FakeBackend) -> None:
    woken = threading.Semaphore(0)
    compiler = ThreadedGrammarCompiler(held, max_threads=1, on_finished=woken.release)
    for source in ("a", "bad", "c"):
        compiler.submit(regex(source))
    held.gate.set()
    for _ in range(3):
        assert woken.acquire(timeout=PATIENCE_S)
    held.gate.clear()
    compiler.submit(regex("last"))
    compiler.close()
    held.gate.set()
    assert isinstance(settled(compiler, regex("last")), Ready)
    assert not woken.acquire(timeout=0.05)


def test_close_drops_what_waits_and_takes_no_more(held: FakeBackend) -> None:
    compiler = ThreadedGrammarCompiler(held, max_threads=1)
    compiler.submit(regex("runs"))
    until(lambda: held.running == 1)
    compiler.submit(regex("waits"))
    start = time.monotonic()
    compiler.close()
    assert time.monotonic() - start < 1.0
    assert compiler.poll(regex("waits")) == Failed("the grammar compiler was closed")
    with pytest.raises(CompilerError, match="after close"):
        compiler.submit(regex("more"))


def test_a_compile_that_runs_does_not_keep_the_process() -> None:
    """A compile cannot be stopped, so the process must be able to end without it."""
    root = Path(__file__).resolve().parents[2]
    code = """
import threading
from grammar_sync.compiler import ThreadedGrammarCompiler
from grammar_sync.engines.prepared import PreparedGrammar
from grammar_sync.spec import GrammarOptions
class Endless:
    def compile(self, prepared):
        running.set()
        threading.Event().wait(300)
running = threading.Event()
compiler = ThreadedGrammarCompiler(Endless())
compiler.submit(PreparedGrammar("xgrammar", "regex", "a", GrammarOptions()))
assert running.wait(60)
compiler.close()
"""
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'tests'}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_misuse_is_an_error() -> None:
    compiler = ThreadedGrammarCompiler(FakeBackend())
    with pytest.raises(CompilerError, match="poll"):
        compiler.poll(regex("a"))
    with pytest.raises(CompilerError, match="discard"):
        compiler.discard(regex("a"))
    with pytest.raises(CompilerError, match="max_threads is 0"):
        ThreadedGrammarCompiler(FakeBackend(), 0)


BAD_GRAMMARS = [
    ({"regex": "("}, "not closed at position 0"),
    ({"regex": "[z-a]"}, "out of order.* at position 1"),
    ({"regex": "a{2,1}"}, "at position 1"),
    ({"regex": "a**"}, "at position 2"),
    ({"regex": r"(a)\1"}, "back-reference at position 3"),
    ({"regex": "a(?=b)b"}, "look-around at position 1"),
    ({"regex": r"\p{L}+"}, "Unicode property at position 0"),
    ({"regex": r"\bfoo\b"}, "word boundary at position 0"),
    ({"regex": "(?i)a"}, "flags at position 0"),
    ({"regex": "a(?#x)"}, "a comment at position 1"),
    ({"regex": "(?P<name>a)"}, "named group at position 0"),
    ({"regex": "([a-z]{1,1000}){1,1000}"}, "multiply to 1000000"),
    ({"ebnf": "root ::= foo"}, "rule foo is not defined at line 1, column 10"),
    ({"ebnf": "root ::= ("}, "never closed, opened at line 1, column 10"),
    ({"ebnf": 'rout ::= "a"'}, "the start rule root is not defined"),
    ({"ebnf": "   "}, "the start rule root is not defined"),
    ({"ebnf": "root ::= root"}, "allows no output at all"),
    ({"ebnf": "root ::= a\na ::= b\nb ::= a"}, "allows no output at all"),
    ({"json_schema": {"allOf": [{"$ref": "#"}]}}, "refers to itself"),
    ({"json_schema": {"type": "foo"}}, "/type is 'foo', expected"),
    ({"json_schema": {"$ref": "#/$defs/missing"}}, "no schema at #/\\$defs/missing"),
    ({"json_schema": {"enum": []}}, "/enum is .*, expected a non-empty list"),
]


@pytest.fixture(scope="module")
def backend() -> XGrammarBackend:
    return XGrammarBackend(VOCABULARY)


@pytest.mark.parametrize(("fields", "message"), BAD_GRAMMARS)
def test_a_bad_grammar_is_told_in_one_line(backend: XGrammarBackend, fields: dict[str, object], message: str) -> None:
    spec = parse_grammar(fields)
    assert spec is not None
    with pytest.raises(CompileError, match=message) as caught:
        compile_spec(backend, spec)
    text = str(caught.value)
    assert "\n" not in text
    assert ".cc:" not in text
    assert len(text) <= 301


def test_compiles_side_by_side_are_as_good_as_one_by_one(backend: XGrammarBackend) -> None:
    specs = [regex(f"({i}|[a-z]{{1,{i}}})+x") for i in range(1, 40)]
    compiler = ThreadedGrammarCompiler(backend, max_threads=8)
    for spec in specs:
        compiler.submit(spec)
    filler = MaskFiller(VOCABULARY)
    for spec in specs:
        outcome = settled(compiler, spec)
        assert isinstance(outcome, Ready)
        beside = filler.fill([outcome.compiled.new_matcher()]).words
        alone = filler.fill([backend.compile(spec).new_matcher()]).words
        assert beside.tolist() == alone.tolist()


def test_messages_are_trimmed() -> None:
    assert one_line("[06:12:49] /a/b.cc:179: Check failed: (x == y) is false: wrong\nshape\n") == "wrong shape"
    assert one_line("plain") == "plain"
    assert len(one_line("x" * 10_000)) == 301


@pytest.mark.parametrize("text", ['a"b\\c\n', "在线", "Sjöfart", "😀", "\x01\x7f\x85\u200b", "]|[# ::= ", "'", "a\tb"])
def test_a_choice_is_exactly_its_texts(backend: XGrammarBackend, text: str) -> None:
    spec = parse_grammar({"choice": ["other", text]})
    assert spec is not None
    matcher = compile_spec(backend, spec)[1].new_matcher()
    for token_id in encode(text):
        assert matcher.accept(token_id)
    masks = MaskFiller(VOCABULARY).fill([matcher]).words
    assert allowed_ids(masks[0]) == [END]
