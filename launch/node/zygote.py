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
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

from launch.environment import CORE_FILES, EPOCH, RUN_FOLDER, ZYGOTE_SOCKET
from launch.exit_codes import ExitCode
from launch.node.fork_request import STANDARD_FILES, ForkRequest, receive_request, send_number
from launch.node.keeper import KeptRank, RankKeeper
from launch.node.parent_death import die_with_parent
from launch.node.progress_record import ProgressRecord
from launch.node.recovery_settings import RecoverySettings
from launch.node.run_folder import RunFolder
from launch.node.stack_dump import StackDump
from launch.node.this_process import has_threads, leave_no_core_file, name_process

_BACKLOG = 128


class Forked(NamedTuple):
    """What a forked process is to run."""

    argv: list[str]
    record: ProgressRecord
    prepared: object
    weights_file: int | None


def start_zygote(path: Path, module: str) -> int | None:
    """Forks this process's zygote; returns its process id, or None when this process has threads already.

    A fork would copy their locks as they are, so ranks import for themselves then, as under a torchrun started by hand:
    slower to start, and otherwise the same. The socket can be connected to
    at once; what is asked is done when the zygote has imported what ranks need.

    Args:
        path: Where its socket is made; only its owner can reach it.
        module: What ranks run. Its ``prepare`` takes a command line and returns what its ranks share; its ``main``
            takes the command line, a progress record, what was prepared and the descriptor of a memory file or None,
            and returns an exit code.

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
        code = rank_main.main(*_Zygote(listener, rank_main.prepare).serve())
    except Exception:  # noqa: BLE001 - the process boundary: nothing may run on in the agent's code
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


@dataclass
class _Supervised:
    """A rank that a supervisor asked for, over all epochs.

    Attributes:
        request: What was asked.
        files: Its standard files.
        connection: To the supervisor.
        kept: Its process.
        is_watched: Whether the run's keeper judges it; then ``kept.rank`` is its rank.
        weights_file: Where its processes leave their weights to the next one; None where there is no next one.
    """

    request: ForkRequest
    files: list[int]
    connection: socket.socket
    kept: KeptRank
    is_watched: bool
    weights_file: int | None

    def close(self) -> None:
        """Closes its files in this process."""
        for file in self.files:
            os.close(file)
        if self.weights_file is not None:
            os.close(self.weights_file)
        self.kept.close()


class _Zygote:
    """Forks a rank for each supervisor that asks, tells it how the rank ended, and ends the rank when it is gone.

    Ranks of a run that is to be recovered have a keeper: when it ends their epoch, all are forked anew, and their
    supervisors notice nothing.

    Args:
        listener: Where supervisors ask.
        prepare: Returns what the ranks of a command line share; called once before the first of them is forked.
    """

    def __init__(self, listener: socket.socket, prepare: Callable[[list[str]], object]) -> None:
        self._listener = listener
        self._prepare = prepare
        self._prepared_for: tuple[list[str], str] | None = None
        self._prepared: object = None
        self._selector = selectors.DefaultSelector()
        self._pid = os.getpid()
        self._ranks: list[_Supervised] = []
        self._keeper: RankKeeper | None = None

    def serve(self) -> Forked:
        """Serves until this process ends; in a forked one returns what it is to be."""
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        while True:
            for key, _ in self._selector.select(None if self._keeper is None else self._keeper.wait_s()):
                forked: Forked | None = key.data()
                if forked is not None:
                    return forked
            forked = self._judge()
            if forked is not None:
                return forked

    def _accept(self) -> Forked | None:
        connection, _ = self._listener.accept()
        received = receive_request(connection)
        if received is None:
            connection.close()
            return None
        request, files = received
        self._prepare_for(request)
        settings = RecoverySettings.read(request.environ)
        if settings is not None and self._keeper is None:
            self._keeper = RankKeeper(settings, RunFolder(Path(request.environ[RUN_FOLDER])))
        rank = int(request.environ.get("RANK", "0"))
        kept = KeptRank(rank, ProgressRecord.create(), StackDump.create())
        weights_file = None
        if settings is not None and settings.max_recoveries:
            weights_file = os.memfd_create("lockstep-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        one = _Supervised(request, files, connection, kept, settings is not None, weights_file)
        self._ranks.append(one)
        forked = self._fork(one)
        if forked is None:
            # Its supervisor is told of the first process only, and listened to from now on.
            send_number(connection, kept.pid)
            self._selector.register(connection, selectors.EVENT_READ, partial(self._kill, one))
        return forked

    def _prepare_for(self, request: ForkRequest) -> None:
        """Makes what the ranks of a command line share, unless it is there already."""
        wanted = (request.argv, request.folder)
        if wanted == self._prepared_for:
            return
        self._prepared_for = wanted
        gc.disable()
        # The paths of a command line mean files of its own folder.
        self._prepared = self._prepare(request.argv) if request.folder == str(Path.cwd()) else None
        gc.freeze()
        gc.enable()

    def _fork(self, one: _Supervised) -> Forked | None:
        """Forks a rank's process; returns what it is to be, in that process."""
        kept = one.kept
        kept.stacks.clear()
        kept.record.reset(0 if self._keeper is None else self._keeper.epoch)
        pid = os.fork()
        if pid == 0:
            return self._become_rank(one)
        kept.started(pid)
        if one.is_watched and self._keeper is not None:
            self._keeper.keep(kept)
        self._selector.register(kept.ended, selectors.EVENT_READ, partial(self._reap, one))
        return None

    def _reap(self, one: _Supervised) -> None:
        kept = one.kept
        _, status = os.waitpid(kept.pid, 0)
        self._selector.unregister(kept.ended)
        code = os.waitstatus_to_exitcode(status)
        if not one.is_watched or self._keeper is None or self._keeper.has_ended(kept, code):
            self._let_go(one, code)

    def _judge(self) -> Forked | None:
        """Has the keeper look; when an epoch is over, forks the next one or lets all supervisors go."""
        report = None if self._keeper is None else self._keeper.judge()
        if report is None or self._keeper is None:
            return None
        watched = [one for one in self._ranks if one.is_watched]
        if report.recovers:
            for one in watched:
                self._forget_process(one)
            for one in watched:
                forked = self._fork(one)
                if forked is not None:
                    return forked
            return None
        self._keeper.close()
        for one in watched:
            if one.kept.exit_code is not None:
                self._let_go(one, one.kept.exit_code)
        return None

    def _forget_process(self, one: _Supervised) -> None:
        """Closes what stands for a process that is gone."""
        if one.kept.ended in self._selector.get_map():
            self._selector.unregister(one.kept.ended)
        one.kept.forget()

    def _let_go(self, one: _Supervised, exit_code: int) -> None:
        """Tells a supervisor how its rank ended, and forgets the rank."""
        send_number(one.connection, exit_code)
        self._forget_process(one)
        if one.connection in self._selector.get_map():
            self._selector.unregister(one.connection)
        one.connection.close()
        one.close()
        self._ranks.remove(one)

    def _kill(self, one: _Supervised) -> None:
        """Ends a rank whose supervisor is gone: it says nothing more, so what can be read is the connection's end."""
        self._selector.unregister(one.connection)
        if self._keeper is not None:
            self._keeper.close()
        if one.kept.exit_code is None:
            signal.pidfd_send_signal(one.kept.ended, signal.SIGKILL)
        else:
            self._let_go(one, one.kept.exit_code)

    def _become_rank(self, one: _Supervised) -> Forked:
        """Makes this forked process the one that the supervisor would have been; returns what it is to run."""
        die_with_parent(signal.SIGKILL, str(self._pid))
        for key in list(self._selector.get_map().values()):
            # The zygote's own: a connection held here would outlive it.
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            else:
                os.close(key.fd)
        self._selector.close()
        for file, standard in zip(one.files, STANDARD_FILES, strict=True):
            os.dup2(file, standard)
        for other in self._ranks:
            other.connection.close()
            if other is not one:
                other.close()
        for file in one.files:
            os.close(file)
        one.kept.stacks.answer()
        request = one.request
        os.environ.clear()
        os.environ.update(request.environ)
        os.environ.pop(ZYGOTE_SOCKET, None)
        if self._keeper is not None:
            os.environ[EPOCH] = str(self._keeper.epoch)
        if request.environ.get(CORE_FILES) != "1":
            leave_no_core_file()
        os.chdir(request.folder)
        sys.argv[1:] = request.argv
        prepared = self._prepared if self._prepared_for == (request.argv, request.folder) else None
        return Forked(request.argv, one.kept.record, prepared, one.weights_file)
