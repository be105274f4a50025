"""Runs a command line in a process forked from one that has everything imported, as if Python had been started for it.

Starting Python and importing torch takes most of the time of a short command. What runs afterwards is the same code in
the same processes: the module is run as ``python -m`` would, with its own arguments, environment, folder and files.
What such a process starts in turn is forked likewise: by itself while it has no threads, and else by a seat, a child of
its own that it forked at its start and that waits to become what is asked for.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import inspect
import logging
import multiprocessing.forkserver
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, NoReturn

import msgspec
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

WARM_MODULES: Final = (
    "launch",
    "launch.node.agent",
    "launch.serve.main",
    "launch.check_grammar.main",
    "launch.chaos.engine.front",
    "launch.chaos.script.worker",
    "torch.distributed.run",
)
"""What can be run so; all that they import is there already."""

ROOM: Final = "LOCKSTEP_TEST_ROOM"
"""A long variable in the environment of the process that everything is forked from: room to show another one."""

ROOM_BYTES: Final = 1 << 15
_POLL_S = 0.005
_STANDARD_FILES = (0, 1, 2)
_TORCHRUN = "torch.distributed.run"
_SERVER_LOCK: Final = threading.Lock()
_execute = os.execve
_popen = subprocess.Popen


class Start(msgspec.Struct, frozen=True):
    """A command to be run.

    Args:
        module: What ``python -m`` would run.
        argv: Its arguments.
        environ: Its whole environment.
        folder: Its working folder.
        new_session: Whether it leads a session of its own.
    """

    module: str
    argv: list[str]
    environ: dict[str, str]
    folder: str
    new_session: bool = False


def warm_start(command: Sequence[str], environ: Mapping[str, str], folder: str) -> Start | None:
    """Returns what ``command`` is as a start; None when it has to be executed."""
    words = [word for word in command if word != "-u"]
    if words[0] != sys.executable or words[1:2] != ["-m"] or words[2] not in WARM_MODULES:
        return None
    return Start(words[2], words[3:], dict(environ), folder)


class ForkedChild:
    """A child of this process, with what is needed of ``subprocess.Popen``."""

    def __init__(self, pid: int, args: Sequence[str]) -> None:
        self.pid = pid
        self.args = args
        self.stdin = self.stdout = self.stderr = None
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns its exit code, None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Returns its exit code when it has ended."""
        if timeout is None and self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        deadline_s = time.monotonic() + (timeout or 0.0)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
            time.sleep(_POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        """Sends it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Sends it SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends it SIGKILL."""
        self.send_signal(signal.SIGKILL)


class _Seat:
    """A child of this process that waits to become a command."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            _be_seat(theirs)
        theirs.close()
        self.connection = ours

    def take(self, start: Start, files: Sequence[int]) -> None:
        """Has it become ``start`` with ``files`` as its standard ones."""
        payload = msgspec.msgpack.encode(start)
        socket.send_fds(self.connection, [len(payload).to_bytes(8, "big")], files)
        self.connection.sendall(payload)
        # Once it has its session.
        self.connection.recv(1)
        self.connection.close()


class _Starter:
    """What ``subprocess.Popen`` and ``os.execve`` are in a process that was forked so."""

    def __init__(self, seats: int) -> None:
        self._pid = os.getpid()
        self._own_seats = [_Seat() for _ in range(seats)]

    @property
    def _seats(self) -> list[_Seat]:
        """Those that are this process's: one that it forks knows them too."""
        return self._own_seats if self._pid == os.getpid() else []

    def popen(self, args: list[str] | tuple[str, ...], **options: Any) -> Any:
        """Starts a process as ``subprocess.Popen`` does."""
        environ = options.get("env")
        folder = str(options.get("cwd") or Path.cwd())
        start = warm_start(args, os.environ if environ is None else environ, folder)
        threads = len(list(Path("/proc/self/task").iterdir())) > 1
        known = options.keys() <= {"env", "cwd", "stdin", "stdout", "stderr", "start_new_session"}
        if start is None or not known or (threads and not self._seats):
            return _popen(args, **options)
        start = msgspec.structs.replace(start, new_session=options.get("start_new_session", False))
        with open(os.devnull, "r+b") as null:  # noqa: PTH123 - as a file for both ways
            files = [
                _descriptor(options.get(name), standard, null)
                for name, standard in zip(("stdin", "stdout", "stderr"), _STANDARD_FILES, strict=True)
            ]
            if threads:
                seat = self._seats.pop()
                seat.take(start, files)
                return ForkedChild(seat.pid, args)
            begun, begins = os.pipe()
            pid = os.fork()
            if pid == 0:
                _take_session(start)
                os.close(begins)
                be_command(start, files)
            os.close(begins)
            # Once it has its session.
            os.read(begun, 1)
            os.close(begun)
        return ForkedChild(pid, args)

    def execute(self, path: str, command: list[str] | tuple[str, ...], environ: Mapping[str, str]) -> NoReturn:
        """Has this process become a command, as ``os.execve`` does."""
        start = warm_start(command, environ, str(Path.cwd()))
        if start is None:
            _execute(path, command, environ)
        seats = self._seats
        be_command(start, _STANDARD_FILES, self, keep=tuple(seat.connection.fileno() for seat in seats))


def _descriptor(given: Any, standard: int, null: IO[bytes]) -> int:
    if given is None:
        return standard
    if given is subprocess.DEVNULL:
        return null.fileno()
    return int(given if isinstance(given, int) else given.fileno())


def _be_seat(connection: socket.socket) -> NoReturn:
    """Waits for what this process is to become; ends when nothing comes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    size, files, _, _ = socket.recv_fds(connection, 8, len(_STANDARD_FILES))
    payload = bytearray()
    while size and len(payload) < int.from_bytes(size, "big"):
        part = connection.recv(int.from_bytes(size, "big") - len(payload))
        if not part:
            break
        payload += part
    if not payload or len(payload) < int.from_bytes(size, "big"):
        os._exit(0)
    start = msgspec.msgpack.decode(payload, type=Start)
    _take_session(start)
    connection.send(b".")
    be_command(start, files)


def _take_session(start: Start) -> None:
    if start.new_session:
        os.setsid()


def be_command(
    start: Start, files: Sequence[int], starter: _Starter | None = None, keep: tuple[int, ...] = ()
) -> NoReturn:
    """Is the process that ``start`` asks for, from its first line to its exit.

    Args:
        start: What to run.
        files: Its standard files.
        starter: What starts its own processes; a new one when left out.
        keep: Descriptors beside the standard ones that stay open.
    """
    code: Any = 1
    try:
        atexit._clear()
        weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined] # it is to register anew
        weakref.finalize._registry.clear()  # type: ignore[attr-defined] # what is to be removed is its parent's
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        _take_files(files, keep)
        _take_environ(start.environ)
        tempfile.tempdir = None
        os.chdir(start.folder)
        path = [entry for entry in start.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
        tests = str(Path(__file__).resolve().parent.parent)
        sys.path[:] = [
            start.folder,
            *path,
            *(entry for entry in sys.path if not entry.startswith(tests) or "-packages" in entry),
        ]
        sys.argv = ["-m", *start.argv]
        starter = starter or _Starter(_seats_for(start))
        subprocess.Popen = starter.popen  # type: ignore[assignment,misc] # what it starts is forked too
        subprocess_handler.Popen = starter.popen  # type: ignore[assignment,misc]
        os.execve = starter.execute  # type: ignore[assignment]
        gc.freeze()
        _note_frozen_files()
        sys.modules.pop(start.module, None)
        runpy.run_module(start.module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        _leave(code)


def _note_frozen_files() -> None:
    """Tells ``inspect`` of files that are none: torchrun asks for its callers, which it looks for in all modules."""
    for name, module in (("<frozen runpy>", "runpy"), ("<string>", "builtins")):
        inspect.modulesbyfile[str(Path.cwd() / name)] = module


def _leave(code: Any) -> NoReturn:
    """Ends this process as Python does at its end."""
    threading._shutdown()  # type: ignore[attr-defined] # waits for threads
    atexit._run_exitfuncs()
    logging.shutdown()
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit((code or 0) & 0xFF)


def _seats_for(start: Start) -> int:
    """Returns how many processes it will start while it has threads, and which take long to start."""
    if start.module == _TORCHRUN and "--nproc-per-node" in start.argv:
        return int(start.argv[start.argv.index("--nproc-per-node") + 1])
    is_front = start.module in ("launch", "launch.serve.main", "launch.chaos.engine.front")
    return int(is_front and "RANK" not in start.environ)


def _take_files(files: Sequence[int], keep: tuple[int, ...]) -> None:
    for file, standard in zip([os.dup(file) for file in files], _STANDARD_FILES, strict=True):
        os.dup2(file, standard)
    last = 2
    for file in sorted(keep):
        os.closerange(last + 1, file)
        last = file
    os.closerange(last + 1, os.sysconf("SC_OPEN_MAX"))
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - a descriptor, for good
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(  # noqa: SIM115
        2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
    )


def _take_environ(environ: Mapping[str, str]) -> None:
    """Takes ``environ``, and shows it where the system shows the environment that a process was executed with."""
    os.environ.clear()
    os.environ.update(environ)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[47]), int(fields[48])
    shown = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environ.items())
    if len(shown) > end - begin:
        raise RuntimeError(f"an environment of {len(shown)} bytes does not fit into {end - begin}")
    ctypes.memmove(begin, shown.ljust(end - begin, b"\0"), end - begin)


def start_server() -> None:
    """Starts the fork server of this process, unless it runs; threads may call it at once."""
    with _SERVER_LOCK:
        # It does not take over this process's path, only its environment (see conftest.py).
        multiprocessing.forkserver.set_forkserver_preload(["fork_preload"])
        os.environ[ROOM] = "x" * ROOM_BYTES
        try:
            multiprocessing.forkserver.ensure_running()
        finally:
            del os.environ[ROOM]


class ForkedCommand:
    """A command forked from the fork server, with what tests need of ``subprocess.Popen``."""

    def __init__(self, start: Start, files: tuple[Path, Path, Path]) -> None:
        start_server()
        self._process = multiprocessing.get_context("forkserver").Process(target=_from_server, args=(start, files))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Returns its exit code, None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Returns its exit code when it has ended."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Sends it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Sends it SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _from_server(start: Start, files: tuple[Path, Path, Path]) -> NoReturn:
    flags = (os.O_RDONLY, os.O_WRONLY, os.O_WRONLY)
    be_command(start, [os.open(path, flag) for path, flag in zip(files, flags, strict=True)])
