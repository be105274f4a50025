"""A first-stage rank's grammar compiler, and on the first rank the compile process that vets for all."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from grammar_sync.agreed_compiler import AgreedCompiler
from grammar_sync.compiler import ThreadedGrammarCompiler
from grammar_sync.engines.backend import GrammarBackend
from grammar_sync.engines.factory import MAKE_BACKEND
from grammar_sync.vetting.messages import Setup, VettingLimits
from grammar_sync.vetting.outcome_store import FolderStore
from grammar_sync.vetting.service import CompileProcess, VettingService
from grammar_sync.vetting.warm_backend import WarmBackend
from grammar_sync.vocabulary import GrammarVocabulary
from launch.environment import with_import_path, without_rank_variables
from launch.node.run_folder import RunFolder
from launch.node.this_process import has_threads
from launch.options import EngineOptions
from launch.rank.grammar_process import run_compile_process


@dataclass(frozen=True)
class RunningProcess:
    """A compile process that this process started.

    Args:
        pid: Its id.
        connection: To it.
    """

    pid: int
    connection: socket.socket

    def end(self) -> None:
        """Ends it, whatever it does, and closes the connection."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.connection.close()


class GrammarProcessStarter:
    """Starts compile processes for this process, one after the other if need be.

    A process with a single thread forks: the engines are loaded already, and the child has them at once. A process that
    has threads, whose locks a fork might find taken, executes Python anew, which takes seconds of CPU.

    Args:
        environ: The environment of a process that is executed.
        born_with: Engines that a forked process need not make; None = it makes its own.
    """

    def __init__(self, environ: Mapping[str, str], born_with: WarmBackend | None = None) -> None:
        self._born_with = born_with
        self._environ = {**with_import_path(without_rank_variables(environ)), "OMP_NUM_THREADS": "1"}

    def __call__(self) -> RunningProcess:
        """Starts a compile process.

        Raises:
            OSError: The system has no room for it.
        """
        ours, theirs = socket.socketpair()
        parent_pid = os.getpid()
        if not has_threads():
            pid = os.fork()
            if pid == 0:
                ours.close()
                run_compile_process(theirs, parent_pid, self._born_with)
        else:
            command = [sys.executable, "-m", "launch.rank.grammar_process", str(theirs.fileno()), str(parent_pid)]
            os.set_inheritable(theirs.fileno(), True)
            pid = os.posix_spawn(sys.executable, command, self._environ)
        theirs.close()
        return RunningProcess(pid, ours)


@dataclass(frozen=True)
class RankGrammars:
    """What compiles a first-stage rank's grammars.

    Args:
        agreed: Has them vetted and compiled.
        compiler: What compiles.
        vetting: What has them vetted; None but on the first rank.
    """

    agreed: AgreedCompiler
    compiler: ThreadedGrammarCompiler
    vetting: VettingService | None


def grammars_of_rank(
    vocabulary: GrammarVocabulary,
    backend: GrammarBackend,
    options: EngineOptions,
    *,
    process: CompileProcess | None,
    start: Callable[[], CompileProcess],
    on_finished: Callable[[], None] | None,
    run_folder: Path | None = None,
) -> RankGrammars:
    """Returns what has a first-stage rank's grammars compiled; with a compile process it vets for its stage too.

    What became of grammars is kept in the folder that the options name, or else in the run's, for the ranks that may
    take the place of these.
    """
    compiler = ThreadedGrammarCompiler(backend, cache_limit_bytes=options.grammar_cache_bytes, on_finished=on_finished)
    vetting = None
    if process is not None:
        limits = VettingLimits(deadline_s=options.grammar_timeout_s, memory_bytes=options.grammar_memory_bytes)
        setup = Setup(vocabulary, MAKE_BACKEND, options.grammar_backend, limits)
        folder = options.grammar_cache_dir
        if folder is None and run_folder is not None and options.max_recoveries:
            folder = RunFolder(run_folder).grammar_folder
        store = None if folder is None else FolderStore(folder, setup)
        vetting = VettingService(setup, process, start, on_finished=on_finished, store=store)
    return RankGrammars(AgreedCompiler(compiler, vetting), compiler, vetting)
