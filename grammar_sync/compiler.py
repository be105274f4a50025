"""Compiles vetted grammars off the step loop: once for all requests that want one, within a bounded cache."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from grammar_sync.engines.backend import CompiledGrammar, GrammarBackend
from grammar_sync.engines.prepared import CompileError, PreparedGrammar
from grammar_sync.wanted_cache import WantedCache

DEFAULT_CACHE_LIMIT_BYTES = 512 << 20
DEFAULT_COMPILE_THREADS = 2
_ENTRY_OVERHEAD_BYTES = 512


class CompilerError(RuntimeError):
    """The compiler was asked for a grammar that nobody submitted, or after it was closed."""


@dataclass(frozen=True)
class Pending:
    """The grammar is not compiled yet.

    Attributes:
        moved_s: When its compile began or, while it waits, when the last one before it ended; monotonic clock.
    """

    moved_s: float = field(default=0.0, compare=False)


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

    def submit(self, prepared: PreparedGrammar) -> None:
        """Makes sure that ``prepared`` is compiled, or under way."""

    def poll(self, prepared: PreparedGrammar) -> CompileOutcome:
        """Returns what is known of a grammar that was submitted and not yet discarded."""

    def discard(self, prepared: PreparedGrammar) -> None:
        """Says that one request less wants the grammar; a compile that nobody wants and that waits is dropped."""

    def close(self) -> None:
        """Drops all that waits, and takes no more."""


class ThreadedGrammarCompiler:
    """Compiles in daemon threads of this process; the engine releases the GIL.

    It is given grammars that were vetted: a compile that runs cannot be stopped, and a crash would end the process.
    Outcomes are kept, good and bad, until the cache is full; then the least recently wanted go, never one that a
    request still wants.

    Args:
        backend: The engines.
        max_threads: How many compiles may run at once.
        cache_limit_bytes: Bound on the outcomes kept, as the engines count their memory.
        on_finished: Called in the compiling thread after each outcome until ``close``: an idle leader waits for it.
    """

    def __init__(
        self,
        backend: GrammarBackend,
        max_threads: int = DEFAULT_COMPILE_THREADS,
        *,
        cache_limit_bytes: int = DEFAULT_CACHE_LIMIT_BYTES,
        on_finished: Callable[[], None] | None = None,
    ) -> None:
        if max_threads < 1:
            raise CompilerError(f"max_threads is {max_threads}, expected at least 1")
        self._backend = backend
        self._max_threads = max_threads
        self._on_finished = on_finished
        self._lock = threading.Lock()
        self._cache: WantedCache[PreparedGrammar, CompileOutcome] = WantedCache(cache_limit_bytes)
        self._queue: deque[PreparedGrammar] = deque()
        self._running: dict[PreparedGrammar, float] = {}
        self._moved_s = 0.0
        self._closed = False

    @property
    def cached_bytes(self) -> int:
        """How much the outcomes kept hold."""
        with self._lock:
            return self._cache.size_bytes

    def submit(self, prepared: PreparedGrammar) -> None:
        """Makes sure that ``prepared`` is compiled, or under way; one call for each request that wants it.

        Raises:
            CompilerError: The compiler was closed.
        """
        with self._lock:
            if self._closed:
                raise CompilerError(f"submit of a {prepared.language} grammar after close")
            if self._cache.want(prepared):
                self._queue.append(prepared)
            self._start_threads()

    def poll(self, prepared: PreparedGrammar) -> CompileOutcome:
        """Returns what is known of a grammar that was submitted and not yet discarded.

        Raises:
            CompilerError: No request wants this grammar.
        """
        with self._lock:
            self._check_wanted(prepared, "poll")
            return self._cache[prepared] or Pending(self._running.get(prepared, self._moved_s))

    def discard(self, prepared: PreparedGrammar) -> None:
        """Says that one request less wants the grammar.

        Raises:
            CompilerError: No request wants this grammar.
        """
        with self._lock:
            self._check_wanted(prepared, "discard")
            if self._cache.unwant(prepared) and prepared in self._queue:
                self._queue.remove(prepared)
                self._cache.forget(prepared)

    def close(self) -> None:
        """Drops all compiles that have not begun, and takes no more; does not wait for those that run."""
        with self._lock:
            self._closed = True
            for prepared in self._queue:
                self._cache.put(prepared, Failed("the grammar compiler was closed"), _ENTRY_OVERHEAD_BYTES)
            self._queue.clear()

    def _check_wanted(self, prepared: PreparedGrammar, operation: str) -> None:
        if not self._cache.is_wanted(prepared):
            raise CompilerError(f"{operation} of a {prepared.language} grammar that no request wants")

    def _start_threads(self) -> None:
        while self._queue and len(self._running) < self._max_threads:
            prepared = self._queue.popleft()
            self._running[prepared] = time.monotonic()
            threading.Thread(target=self._compile, args=(prepared,), name="grammar-compile", daemon=True).start()

    def _compile(self, prepared: PreparedGrammar) -> None:
        # Stays when an error that nobody expected ends this thread: the request fails, the traceback is printed.
        outcome: Ready | Failed = Failed("internal error of the grammar compiler")
        start = time.perf_counter()
        try:
            outcome = Ready(self._backend.compile(prepared), time.perf_counter() - start)
        except CompileError as error:
            outcome = Failed(str(error))
        finally:
            self._finish(prepared, outcome)

    def _finish(self, prepared: PreparedGrammar, outcome: Ready | Failed) -> None:
        compiled_bytes = outcome.compiled.size_bytes if isinstance(outcome, Ready) else 0
        with self._lock:
            del self._running[prepared]
            self._moved_s = time.monotonic()
            self._cache.put(prepared, outcome, compiled_bytes + len(prepared.source) + _ENTRY_OVERHEAD_BYTES)
            self._start_threads()
            closed = self._closed
        if self._on_finished is not None and not closed:
            self._on_finished()
