"""Compiles grammars off the step loop: once for all requests that want one, within a bounded cache."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from grammar_sync.backend import CompiledGrammar, GrammarBackend, compile_spec
from grammar_sync.prepared import CompileError
from grammar_sync.spec import GrammarSpec
from grammar_sync.vocabulary import GrammarVocabulary
from grammar_sync.xgrammar_backend import XGrammarBackend

DEFAULT_CACHE_LIMIT_BYTES = 512 << 20
DEFAULT_DEADLINE_S = 10.0
_MAX_ABANDONED = 4
_ENTRY_OVERHEAD_BYTES = 512


class CompilerError(RuntimeError):
    """The compiler was asked for a grammar that nobody submitted, or after it was closed."""


@dataclass(frozen=True)
class Pending:
    """The grammar is not compiled yet."""


@dataclass(frozen=True)
class Ready:
    """The grammar is compiled.

    Attributes:
        compiled: Shared by all requests.
        compile_s: Seconds it took to compile, once.
    """

    compiled: CompiledGrammar
    compile_s: float


@dataclass(frozen=True)
class Failed:
    """The grammar cannot be compiled; ``message`` says why in one line."""

    message: str


CompileOutcome = Pending | Ready | Failed


class GrammarCompiler(Protocol):
    """Compiles grammars beside the step loop; no method waits for a compile.

    ``submit`` and ``discard`` come in pairs, one for each request that wants the grammar.
    """

    def submit(self, spec: GrammarSpec) -> None:
        """Makes sure that ``spec`` is compiled, or under way."""

    def poll(self, spec: GrammarSpec) -> CompileOutcome:
        """Returns what is known of a grammar that was submitted and not yet discarded."""

    def discard(self, spec: GrammarSpec) -> None:
        """Says that one request less wants the grammar; a compile that nobody wants and that waits is dropped."""

    def close(self) -> None:
        """Drops all that waits, and takes no more."""


@dataclass
class _Entry:
    outcome: CompileOutcome
    wanted_by: int = 0
    started_s: float | None = None
    is_late: bool = False
    size_bytes: int = 0


class ThreadedGrammarCompiler:
    """Compiles in daemon threads of this process; the engine releases the GIL.

    A compile that runs cannot be stopped: its thread ends when it is done, or with the process. One that is late fails,
    and its place goes to the next. Outcomes are kept, both
    kinds, until the cache is full; then the least recently wanted go, never one that a request still wants.

    Args:
        vocabulary: What grammars are compiled for.
        max_threads: How many compiles may run at once, those that are late not counted.
        deadline_s: How long one may run, the time it waits for a thread not counted.
        cache_limit_bytes: Bound on the outcomes kept, as the engine counts their memory.
        on_finished: Called in the compiling thread after each outcome until ``close``: an idle leader waits for it.
        backend: The engine; xgrammar when left out.
    """

    def __init__(
        self,
        vocabulary: GrammarVocabulary,
        max_threads: int = 2,
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
        cache_limit_bytes: int = DEFAULT_CACHE_LIMIT_BYTES,
        on_finished: Callable[[], None] | None = None,
        backend: GrammarBackend | None = None,
    ) -> None:
        if max_threads < 1:
            raise CompilerError(f"max_threads is {max_threads}, expected at least 1")
        self._backend = backend or XGrammarBackend(vocabulary)
        self._max_threads = max_threads
        self._cache_limit_bytes = cache_limit_bytes
        self._on_finished = on_finished
        self._lock = threading.Lock()
        self._entries: OrderedDict[GrammarSpec, _Entry] = OrderedDict()
        self._queue: deque[GrammarSpec] = deque()
        self._deadline_s = deadline_s
        self._running = 0
        self._abandoned = 0
        self._cached_bytes = 0
        self._closed = False

    @property
    def cached_bytes(self) -> int:
        """How much the outcomes kept hold."""
        with self._lock:
            return self._cached_bytes

    def submit(self, spec: GrammarSpec) -> None:
        """Makes sure that ``spec`` is compiled, or under way; one call for each request that wants it.

        Raises:
            CompilerError: The compiler was closed.
        """
        with self._lock:
            if self._closed:
                raise CompilerError(f"submit of a {spec.kind} grammar after close")
            entry = self._entries.get(spec)
            if entry is None:
                entry = self._entries[spec] = _Entry(Pending())
                self._queue.append(spec)
            entry.wanted_by += 1
            self._entries.move_to_end(spec)
            self._start_threads()

    def poll(self, spec: GrammarSpec) -> CompileOutcome:
        """Returns what is known of a grammar that was submitted and not yet discarded.

        Raises:
            CompilerError: No request wants this grammar.
        """
        with self._lock:
            entry = self._wanted(spec, "poll")
            self._give_up_late(entry)
            return entry.outcome

    def discard(self, spec: GrammarSpec) -> None:
        """Says that one request less wants the grammar.

        Raises:
            CompilerError: No request wants this grammar.
        """
        with self._lock:
            entry = self._wanted(spec, "discard")
            entry.wanted_by -= 1
            if entry.wanted_by == 0 and spec in self._queue:
                self._queue.remove(spec)
                del self._entries[spec]
            self._evict()

    def close(self) -> None:
        """Drops all compiles that have not begun, and takes no more; does not wait for those that run."""
        with self._lock:
            self._closed = True
            for spec in self._queue:
                self._entries[spec].outcome = Failed("the grammar compiler was closed")
            self._queue.clear()

    def _wanted(self, spec: GrammarSpec, operation: str) -> _Entry:
        entry = self._entries.get(spec)
        if entry is None or entry.wanted_by == 0:
            raise CompilerError(f"{operation} of a {spec.kind} grammar that no request wants")
        return entry

    def _start_threads(self) -> None:
        while self._queue and self._running < self._max_threads:
            self._running += 1
            spec = self._queue.popleft()
            self._entries[spec].started_s = time.monotonic()
            threading.Thread(target=self._compile, args=(spec,), name="grammar-compile", daemon=True).start()

    def _compile(self, spec: GrammarSpec) -> None:
        # Stays when an error that nobody expected ends this thread: the request fails, the traceback is printed.
        outcome: CompileOutcome = Failed("internal error of the grammar compiler")
        start = time.perf_counter()
        try:
            _, compiled = compile_spec(self._backend, spec)
            outcome = Ready(compiled, time.perf_counter() - start)
        except CompileError as error:
            outcome = Failed(str(error))
        finally:
            self._finish(spec, outcome)

    def _finish(self, spec: GrammarSpec, outcome: CompileOutcome) -> None:
        with self._lock:
            entry = self._entries[spec]
            if entry.is_late:
                self._abandoned -= 1
            else:
                self._running -= 1
            entry.is_late = False
            entry.outcome = outcome
            entry.size_bytes = _size_bytes(spec, outcome)
            self._cached_bytes += entry.size_bytes
            self._evict()
            self._start_threads()
            closed = self._closed
        if self._on_finished is not None and not closed:
            self._on_finished()

    def _give_up_late(self, entry: _Entry) -> None:
        """Fails a compile that runs for too long; its thread goes on, but others no longer wait for its place.

        A time-out is not kept: should the compile end after all, its outcome counts for later requests.
        """
        started_s = entry.started_s
        if not isinstance(entry.outcome, Pending) or started_s is None:
            return
        if time.monotonic() - started_s <= self._deadline_s or self._abandoned >= _MAX_ABANDONED:
            return
        entry.outcome = Failed(f"it was not compiled in {self._deadline_s:g} s")
        entry.is_late = True
        self._abandoned += 1
        self._running -= 1
        self._start_threads()

    def _evict(self) -> None:
        if self._cached_bytes <= self._cache_limit_bytes:
            return
        for spec in list(self._entries):
            entry = self._entries[spec]
            if entry.wanted_by == 0 and not entry.is_late and not isinstance(entry.outcome, Pending):
                self._cached_bytes -= entry.size_bytes
                del self._entries[spec]
            if self._cached_bytes <= self._cache_limit_bytes:
                return


def _size_bytes(spec: GrammarSpec, outcome: CompileOutcome) -> int:
    compiled_bytes = outcome.compiled.size_bytes if isinstance(outcome, Ready) else 0
    return compiled_bytes + len(spec.source) + _ENTRY_OVERHEAD_BYTES
