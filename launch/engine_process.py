"""The engine as the front side sees it: a socket, and ranks that live or have died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Protocol

from launch.environment import FRONT_PID, RUN_FOLDER, with_import_path
from launch.exit_codes import ExitCode
from launch.options import EngineOptions, NodeOptions
from launch.run_folder import RunFolder
from runtime.client_socket import FrontSocket
from runtime.messages import EngineReady, Shutdown

_POLL_S = 0.2
_GRACE_S = 3.0
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


class Engine(Protocol):
    """What a front side needs of an engine.

    Attributes:
        socket: Where to send requests and receive tokens.
        is_ready: Whether the leader said that all ranks are up.
    """

    socket: FrontSocket
    is_ready: bool

    def check(self) -> None:
        """Returns if the ranks live; raises RanksFailedError otherwise."""

    def stop(self) -> None:
        """Ends the ranks within five seconds."""


class StartedEngine:
    """An engine whose ranks this process started on this node.

    Args:
        options: The engine's options.
        argv: The command line that each rank runs again.
    """

    def __init__(self, options: EngineOptions, argv: list[str]) -> None:
        self._folder = RunFolder.create()
        try:
            self.socket = FrontSocket(self._folder.endpoint)
            self._agent = self._start_agent(options, argv)
        except BaseException:
            self._folder.remove()
            raise
        self.is_ready = False

    def check(self) -> None:
        """Returns if the ranks live; raises RanksFailedError otherwise."""
        code = self._agent.poll()
        if code is None:
            return
        cause = self._folder.cause()
        message = cause.sentence() if cause is not None else f"the ranks ended with exit code {code}"
        if cause is not None and cause.exit_code > 0:
            code = cause.exit_code
        raise RanksFailedError(message, code if code > 0 else ExitCode.RANK_FAILED)

    def stop(self) -> None:
        """Asks the ranks to leave, then ends them: done within five seconds.

        Ranks that are still starting do not listen yet and are ended at once.
        """
        if self._agent.poll() is None and self.is_ready:
            self.socket.send([Shutdown()])
            self._wait(_GRACE_S)
        if self._agent.poll() is None:
            self._agent.terminate()
            self._wait(_TERMINATE_S)
        if self._agent.poll() is None:
            self._agent.kill()
            self._agent.wait()
        self.socket.close(undelivered_s=0)
        self._folder.remove()

    def _wait(self, limit_s: float) -> None:
        try:
            self._agent.wait(limit_s)
        except subprocess.TimeoutExpired:
            return

    def _start_agent(self, options: EngineOptions, argv: list[str]) -> subprocess.Popen[bytes]:
        arguments = ["--standalone", "--nproc-per-node", str(options.world_size)]
        environ = with_import_path(os.environ) | {
            RUN_FOLDER: str(self._folder.path),
            FRONT_PID: str(os.getpid()),
        }
        return subprocess.Popen(
            agent_command(arguments, argv),
            env=environ | thread_variables(options, options.world_size),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


class AttachedEngine:
    """An engine whose leader started this process: the ranks run under a torchrun that someone else started."""

    def __init__(self, endpoint: str) -> None:
        self._folder = RunFolder(Path(endpoint.removeprefix("ipc://")).parent)
        self.socket = FrontSocket(endpoint)
        self.is_ready = False
        self._leader_pid = os.getppid()

    def check(self) -> None:
        """Returns if the leader lives; raises RanksFailedError otherwise."""
        if os.getppid() != self._leader_pid:
            raise RanksFailedError("the leader rank is gone", ExitCode.RANK_FAILED)

    def stop(self) -> None:
        """Asks the ranks to leave; the leader waits for this process."""
        self.socket.send([Shutdown()])
        self.socket.close()
        self._folder.remove()


def wait_until_ready(engine: Engine, timeout_s: float) -> EngineReady:
    """Returns the leader's first message.

    Raises:
        RanksFailedError: A rank died, or the ranks were not ready in ``timeout_s``.
    """
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        for message in engine.socket.receive(_POLL_S):
            if isinstance(message, EngineReady):
                engine.is_ready = True
                return message
        engine.check()
    raise RanksFailedError(f"the ranks were not ready in {timeout_s:g} s", ExitCode.START_FAILED)


def replace_by_agent(options: EngineOptions, nodes: NodeOptions, argv: list[str]) -> None:
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
    os.execve(command[0], command, with_import_path(os.environ) | thread_variables(options, here))  # noqa: S606


def agent_command(arguments: list[str], argv: list[str]) -> list[str]:
    """Returns the command line of an agent that runs ``lockstep`` with ``argv`` as its ranks."""
    signals = ["--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT"]
    return [sys.executable, "-m", "launch.agent", *arguments, *signals, "-m", "launch", *argv]


def thread_variables(options: EngineOptions, ranks_here: int) -> dict[str, str]:
    """Returns the thread count of a rank as OpenMP's variable; torchrun would set 1 without asking."""
    return {"OMP_NUM_THREADS": str(threads_per_rank(options.threads_per_rank, ranks_here))}


def threads_per_rank(asked: int | None, ranks_here: int) -> int:
    """Returns how many threads each of ``ranks_here`` ranks of this node should run: an even share of its cores."""
    if asked is not None:
        return asked
    return max(1, len(os.sched_getaffinity(0)) // ranks_here)


def raise_on_sigterm() -> None:
    """Turns SIGTERM into ``Terminated``, so that the ranks are ended on the way out."""
    signal.signal(signal.SIGTERM, _raise_terminated)


class Terminated(BaseException):
    """SIGTERM came."""


def _raise_terminated(signum: int, frame: object) -> None:  # noqa: ARG001
    raise Terminated
