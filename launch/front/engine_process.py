"""The engine as the front side sees it: a socket, and ranks that live or have died."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from launch.exit_codes import ExitCode
from launch.front.fault_file import append_reports
from launch.node.rank_fault import FaultReport
from launch.node.rank_processes import RankProcesses, RanksFailedError, signals_held
from launch.node.recovery_settings import RecoverySettings
from launch.node.run_folder import RunFolder
from launch.options import EngineOptions
from launch.trace.file import parts_are_finished, parts_folder, write_trace
from runtime.client_socket import ClientSocketError, FrontSocket
from runtime.messages import EngineReady, Shutdown

_POLL_S = 0.2
_GRACE_S = 3.0


class EngineProcess(Protocol):
    """What a front side needs of an engine.

    Attributes:
        socket: Where to send requests and receive tokens.
        is_ready: Whether the leader said that all ranks are up.
        faults_at_start: The reports on faults that came before.
    """

    socket: FrontSocket
    is_ready: bool
    faults_at_start: list[FaultReport]

    def check(self) -> None:
        """Returns if the ranks live; raises RanksFailedError otherwise."""

    def faults(self) -> list[FaultReport]:
        """Returns the reports on faults of ranks that came since the last call."""

    def stop(self) -> None:
        """Ends the ranks within five seconds."""


class StartedEngine:
    """An engine whose ranks this process started on this node.

    Args:
        options: The engine's options.
        argv: The command line that each rank runs again.
    """

    def __init__(self, options: EngineOptions, argv: list[str]) -> None:
        self._options = options
        self._folder = RunFolder.create()
        try:
            self.socket = FrontSocket(self._folder.endpoint)
            self._ranks = RankProcesses(options, argv, self._folder, _recovery(options))
        except BaseException:
            self._folder.remove()
            raise
        self.is_ready = False
        self.faults_at_start: list[FaultReport] = []
        self._told_faults = 0

    def check(self) -> None:
        """Returns if the ranks live, or are recovered; raises RanksFailedError otherwise."""
        self._ranks.check()

    def faults(self) -> list[FaultReport]:
        """Returns the reports on faults of ranks that came since the last call."""
        reports = []
        while (report := self._folder.fault(self._told_faults + 1)) is not None:
            self._told_faults += 1
            reports.append(report)
        if reports and self._options.fault_report is not None:
            append_reports(self._options.fault_report, reports)
        return reports

    @signals_held()
    def stop(self) -> None:
        """Asks the ranks to leave, then ends them: done within five seconds, and the time to write a trace.

        Ranks that are still starting do not listen yet and are ended at once.
        """
        if self.is_ready and self._ranks.alive:
            with suppress(ClientSocketError):
                self.socket.send([Shutdown()])
                self._ranks.wait(_GRACE_S)
        self._ranks.end()
        self.socket.close(undelivered_s=0)
        # Nobody may have asked since the last one came.
        self.faults()
        trace = self._options.trace
        if trace is not None:
            write_trace(trace, parts_folder(trace, self._folder.path), self._options.world_size)
        self._folder.remove()


class AttachedEngine:
    """An engine whose leader started this process: the ranks run under a torchrun that someone else started.

    Args:
        options: The engine's options.
        endpoint: Where the leader connects.
    """

    def __init__(self, options: EngineOptions, endpoint: str) -> None:
        self._options = options
        self._folder = RunFolder(Path(endpoint.removeprefix("ipc://")).parent)
        self.socket = FrontSocket(endpoint)
        self.is_ready = False
        self.faults_at_start: list[FaultReport] = []
        self._leader_pid = os.getppid()

    def check(self) -> None:
        """Returns if the leader lives; raises RanksFailedError otherwise."""
        if os.getppid() != self._leader_pid:
            raise RanksFailedError("the leader rank is gone", ExitCode.RANK_FAILED)

    def faults(self) -> list[FaultReport]:
        """Returns nothing: under someone else's torchrun a fault of a rank ends the run."""
        return []

    @signals_held()
    def stop(self) -> None:
        """Asks the ranks to leave; the leader waits for this process."""
        with suppress(ClientSocketError):
            self.socket.send([Shutdown()])
        self.socket.close()
        if self._options.trace is not None:
            self._write_trace(self._options.trace)
        self._folder.remove()

    def _write_trace(self, trace: Path) -> None:
        """Writes the trace once all ranks have ended their parts, or have had the time for it."""
        folder, ranks = parts_folder(trace, None), self._options.world_size
        deadline_s = time.monotonic() + _GRACE_S
        while not parts_are_finished(folder, ranks) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        write_trace(trace, folder, ranks)


def _recovery(options: EngineOptions) -> RecoverySettings:
    return RecoverySettings(
        tp=options.tp,
        world_size=options.world_size,
        max_recoveries=options.max_recoveries,
        window_s=options.recovery_window_s,
        stall_timeout_s=options.stall_timeout_s,
        start_timeout_s=options.start_timeout_s,
    )


def start_or_attach(options: EngineOptions, argv: list[str], front_endpoint: str | None) -> EngineProcess:
    """Returns the engine of a command.

    Args:
        options: The engine's options.
        argv: The command line that each rank runs again.
        front_endpoint: Where the leader that started this process connects; None when this process starts the ranks.
    """
    return StartedEngine(options, argv) if front_endpoint is None else AttachedEngine(options, front_endpoint)


def print_line(line: str) -> None:
    """Prints a line to stderr, as this program's."""
    print(f"lockstep: {line}", file=sys.stderr, flush=True)


def wait_until_ready(engine: EngineProcess, timeout_s: float, tell: Callable[[str], None] = print_line) -> EngineReady:
    """Returns the leader's first message; ranks that fail meanwhile, and are started anew, are told of at once.

    Args:
        engine: The engine; reports on such faults are left in its ``faults_at_start``.
        timeout_s: How long all of it may take.
        tell: Takes a line for each fault.

    Raises:
        RanksFailedError: A rank died, or the ranks were not ready in ``timeout_s``.
    """
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        for message in engine.socket.receive(_POLL_S):
            if isinstance(message, EngineReady):
                engine.is_ready = True
                _take_faults(engine, tell)
                return message
        _take_faults(engine, tell)
        engine.check()
    raise RanksFailedError(f"the ranks were not ready in {timeout_s:g} s", ExitCode.START_FAILED)


def _take_faults(engine: EngineProcess, tell: Callable[[str], None]) -> None:
    """Tells of faults of ranks that are not ready yet; the one that ends the run is told by whoever ends."""
    for report in engine.faults():
        engine.faults_at_start.append(report)
        if report.recovers:
            tell(f"{report.sentence()}; the ranks are started anew")
