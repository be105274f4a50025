"""The ranks of this node as processes: an agent that runs them, watched and ended by the front side."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NoReturn

import msgspec

from launch.environment import FRONT_PID, RUN_FOLDER, with_import_path
from launch.exit_codes import ExitCode
from launch.node.recovery_settings import RecoverySettings
from launch.node.run_folder import RunFolder
from launch.node.this_process import become
from launch.options import NodeOptions, RankOptions

_TERMINATE_S = 1.0


class RanksFailedError(RuntimeError):
    """The ranks ended by themselves.

    Args:
        message: One line: which rank, and why.
        exit_code: What the front side should exit with.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Interrupted(KeyboardInterrupt):
    """SIGINT came: Ctrl-C.

    Python ends itself by SIGINT at its exit once a KeyboardInterrupt of just that class passed through an ``exec`` of
    text, as dataclasses and named tuples use it while modules are imported, whatever was done with the exception.
    """


class Terminated(BaseException):
    """SIGTERM came."""


SIGNALS: Final = (KeyboardInterrupt, Terminated)
"""What ends a process from outside."""


class RankProcesses:
    """All ranks of a run on this node, started by this process.

    Args:
        options: How many ranks, with how many threads.
        argv: The command line that each rank runs again.
        folder: The run's folder.
        recovery: How the ranks are watched and recovered; None = the first that fails ends the run.
    """

    def __init__(
        self, options: RankOptions, argv: list[str], folder: RunFolder, recovery: RecoverySettings | None = None
    ) -> None:
        self._folder = folder
        self._tp_size = options.tp
        environ = with_import_path(os.environ) | {RUN_FOLDER: str(folder.path), FRONT_PID: str(os.getpid())}
        if recovery is not None:
            environ |= recovery.variable()
        self._agent = subprocess.Popen(
            agent_command(["--standalone", "--nproc-per-node", str(options.world_size)], argv),
            env=environ | thread_variables(options, options.world_size),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def alive(self) -> bool:
        """Whether they still run."""
        return self._agent.poll() is None

    def check(self) -> None:
        """Returns if the ranks live; raises RanksFailedError otherwise."""
        code = self._agent.poll()
        if code is not None:
            raise self._failure(code)

    def wait_for_success(self) -> ExitCode:
        """Returns how it went when all ranks have run to the end; raises RanksFailedError if they have not."""
        code = self._agent.wait()
        if code not in (ExitCode.OK, ExitCode.REQUESTS_FAILED):
            raise self._failure(code)
        return ExitCode(code)

    def wait(self, limit_s: float) -> None:
        """Waits until all ranks have left, at most ``limit_s``."""
        try:
            self._agent.wait(limit_s)
        except subprocess.TimeoutExpired:
            return

    def end(self) -> None:
        """Ends the ranks that still run."""
        if self.alive:
            self._agent.terminate()
            self.wait(_TERMINATE_S)
        if self.alive:
            self._agent.kill()
            self._agent.wait()

    def _failure(self, code: int) -> RanksFailedError:
        cause = self._folder.cause()
        if cause is not None and cause.stage < 0:
            stage, tp_rank = divmod(cause.rank, self._tp_size)
            cause = msgspec.structs.replace(cause, stage=stage, tp_rank=tp_rank)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        message = cause.sentence() if cause is not None else f"torchrun's agent, and the ranks with it, {how}"
        if cause is not None and cause.exit_code > 0:
            code = cause.exit_code
        return RanksFailedError(message, code if code > 0 else ExitCode.RANK_FAILED)


def run_to_the_end(options: RankOptions, argv: list[str]) -> ExitCode:
    """Runs ranks that need no front side; returns the exit code when they are done.

    Raises:
        RanksFailedError: A rank failed.
    """
    folder = RunFolder.create()
    try:
        ranks = RankProcesses(options, argv, folder)
        try:
            return ranks.wait_for_success()
        finally:
            ranks.end()
    finally:
        folder.remove()


def replace_by_agent(options: RankOptions, nodes: NodeOptions, argv: list[str]) -> NoReturn:
    """Becomes the agent of one of several nodes; the leader, on whichever node it is, starts its own front side."""
    here = options.world_size // nodes.nnodes
    arguments = ["--nnodes", str(nodes.nnodes), "--nproc-per-node", str(here)]
    given = {
        "--rdzv-backend": nodes.rdzv_backend,
        "--rdzv-endpoint": nodes.rdzv_endpoint,
        "--rdzv-id": nodes.rdzv_id,
        "--node-rank": None if nodes.node_rank is None else str(nodes.node_rank),
    }
    for name, value in given.items():
        if value is not None:
            arguments += [name, value]
    command = agent_command(arguments, argv)
    become(command, with_import_path(os.environ) | thread_variables(options, here))


def agent_command(arguments: list[str], argv: list[str]) -> list[str]:
    """Returns the command line of an agent that runs ``lockstep`` with ``argv`` as its ranks."""
    signals = ["--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT"]
    return [sys.executable, "-m", "launch.node.agent", *arguments, *signals, "-m", "launch", *argv]


def thread_variables(options: RankOptions, ranks_here: int) -> dict[str, str]:
    """Returns the thread count of a rank as OpenMP's variable; torchrun would set 1 without asking.

    numpy, which computes nothing here that takes time, gets one thread: it would start the others when it is imported,
    and a process with threads cannot be a zygote.
    """
    return {
        "OMP_NUM_THREADS": str(threads_per_rank(options.threads_per_rank, ranks_here)),
        "OPENBLAS_NUM_THREADS": "1",
    }


def threads_per_rank(asked: int | None, ranks_here: int) -> int:
    """Returns how many threads each of ``ranks_here`` ranks of this node should run: an even share of its cores."""
    if asked is not None:
        return asked
    return max(1, len(os.sched_getaffinity(0)) // ranks_here)


def raise_on_signals() -> None:
    """Turns SIGINT into ``Interrupted`` and SIGTERM into ``Terminated``: the ranks are ended on the way out."""
    signal.signal(signal.SIGINT, _raise_interrupted)
    signal.signal(signal.SIGTERM, _raise_terminated)


@contextmanager
def signals_held() -> Iterator[None]:
    """Keeps SIGINT and SIGTERM from this thread meanwhile; what came is raised at the end.

    A second signal while a first one is on its way out would leave behind what the way out removes.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _raise_interrupted(_signum: int, _frame: object) -> None:
    raise Interrupted


def _raise_terminated(_signum: int, _frame: object) -> None:
    raise Terminated
