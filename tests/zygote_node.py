"""A node's zygote under an agent of its own, and supervisors as torchrun starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from command_line import wait_until

from launch.environment import AGENT_PID, ZYGOTE_SOCKET

ROOT = Path(__file__).resolve().parents[1]
PATH = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
# An agent that only has a zygote: it ends when its input does.
AGENT = "import sys; from pathlib import Path; from launch.node.zygote import start_zygote; {before}; \
print(start_zygote(Path(sys.argv[1]), 'zygote_rank'), flush=True); sys.stdin.read()"
SOON_S = 20.0


class ZygoteNode:
    """A zygote under an agent of its own."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.folder = socket.parent
        """Where ranks run."""
        self.environ = {**os.environ, "PYTHONPATH": PATH}
        self.agent = subprocess.Popen(
            [sys.executable, "-c", AGENT.format(before="pass"), str(self.socket)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=self.folder,
            env=self.environ,
        )
        assert self.agent.stdout is not None
        self.zygote = psutil.Process(int(self.agent.stdout.readline()))

    def supervisor(self, *argv: str, **environ: str) -> subprocess.Popen[str]:
        """Starts a rank as torchrun does."""
        ours = {"RANK": "3", "LOCAL_RANK": "1", ZYGOTE_SOCKET: str(self.socket), AGENT_PID: str(os.getpid())}
        return subprocess.Popen(
            [sys.executable, "-m", "launch", *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self.folder,
            env={**self.environ, **ours, **environ},
            text=True,
        )

    def sleeper(self) -> tuple[subprocess.Popen[str], psutil.Process]:
        """Returns a supervisor and its rank, which sleeps."""
        supervisor = self.supervisor("sleep")
        assert supervisor.stdout is not None
        return supervisor, psutil.Process(int(supervisor.stdout.readline()))

    @classmethod
    @contextmanager
    def started(cls, socket: Path) -> Iterator[ZygoteNode]:
        """Starts one; whatever happens, none of its processes survives this."""
        node = cls(socket)
        try:
            yield node
        finally:
            node.agent.kill()
            node.agent.wait()
            wait_until(lambda: has_ended(node.zygote), SOON_S, "the zygote to end with its agent")


def has_ended(process: psutil.Process) -> bool:
    """Returns whether a process has ended, whoever has or has not taken note of it."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
