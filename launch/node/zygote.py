"""The zygote of a node: a process with everything imported and a single thread, from which the node's ranks are forked.

Importing torch and the runtime takes seconds of CPU. The zygote does it once for all ranks of its node, and once for as
many starts as there may be. It never touches a device: a forked process could not use one that its parent opened.
"""

from __future__ import annotations

import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from launch.environment import ZYGOTE_SOCKET
from launch.exit_codes import ExitCode
from launch.node.fork_request import STANDARD_FILES, ForkRequest, receive_request, send_number
from launch.node.parent_death import die_with_parent
from launch.node.this_process import has_threads, name_process

_BACKLOG = 128


def start_zygote(path: Path, module: str) -> int | None:
    """Forks this process's zygote; returns its process id, or None when this process has threads already.

    A fork would copy their locks as they are, so ranks import for themselves then, as under a torchrun started by hand:
    slower to start, and otherwise the same. The socket can be connected to
    at once; what is asked is done when the zygote has imported what ranks need.

    Args:
        path: Where its socket is made; only its owner can reach it.
        module: What ranks run: its ``main`` takes a command line and returns an exit code.

    Raises:
        OSError: The socket cannot be made, or the system has no room for a process.
    """
    if has_threads():
        return None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(_BACKLOG)
    parent_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        _run_zygote(listener, parent_pid, module)
    listener.close()
    return pid


def _run_zygote(listener: socket.socket, parent_pid: int, module: str) -> NoReturn:
    """Is the zygote, and then, in each process that it forks, a rank."""
    code = int(ExitCode.INTERNAL)
    try:
        die_with_parent(signal.SIGKILL, str(parent_pid))
        # The terminal's Ctrl-C is for those who end the run; this process ends with its agent.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        name_process("lockstep zygote")
        # While the agent goes on: it needs nothing of this.
        gc.disable()
        rank_main = importlib.import_module(module)
        # Ranks never search what is imported for garbage: it would take their time and copy every page.
        gc.freeze()
        gc.enable()
        argv = _Zygote(listener).serve()
        code = rank_main.main(argv)
    except Exception:  # noqa: BLE001 - the process boundary: nothing may run on in the agent's code
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


@dataclass
class _Forked:
    """A rank, as the zygote knows it."""

    pid: int
    ended: int
    connection: socket.socket


class _Zygote:
    """Forks a rank for each supervisor that asks, tells it how the rank ended, and ends the rank when it is gone."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._pid = os.getpid()

    def serve(self) -> list[str]:
        """Serves until this process ends; in a forked one returns the rank's command line."""
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        while True:
            for key, _ in self._selector.select():
                argv = key.data()
                if argv is not None:
                    return list(argv)

    def _accept(self) -> list[str] | None:
        connection, _ = self._listener.accept()
        received = receive_request(connection)
        if received is None:
            connection.close()
            return None
        request, files = received
        pid = os.fork()
        if pid == 0:
            connection.close()
            self._become_rank(request, files)
            return request.argv
        for file in files:
            os.close(file)
        send_number(connection, pid)
        rank = _Forked(pid, os.pidfd_open(pid), connection)
        self._selector.register(rank.ended, selectors.EVENT_READ, partial(self._report_end, rank))
        self._selector.register(connection, selectors.EVENT_READ, partial(self._kill, rank))
        return None

    def _report_end(self, rank: _Forked) -> None:
        _, status = os.waitpid(rank.pid, 0)
        send_number(rank.connection, os.waitstatus_to_exitcode(status))
        for file in (rank.ended, rank.connection):
            if file in self._selector.get_map():
                self._selector.unregister(file)
        os.close(rank.ended)
        rank.connection.close()

    def _kill(self, rank: _Forked) -> None:
        """Ends a rank whose supervisor is gone: it says nothing more, so what can be read is the connection's end."""
        self._selector.unregister(rank.connection)
        signal.pidfd_send_signal(rank.ended, signal.SIGKILL)

    def _become_rank(self, request: ForkRequest, files: list[int]) -> None:
        """Makes this forked process the one that the supervisor would have been."""
        die_with_parent(signal.SIGKILL, str(self._pid))
        for key in list(self._selector.get_map().values()):
            # The zygote's own: a connection held here would outlive it.
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            else:
                os.close(key.fd)
        self._selector.close()
        for file, standard in zip(files, STANDARD_FILES, strict=True):
            os.dup2(file, standard)
            os.close(file)
        os.environ.clear()
        os.environ.update(request.environ)
        os.environ.pop(ZYGOTE_SOCKET, None)
        os.chdir(request.folder)
        sys.argv[1:] = request.argv
