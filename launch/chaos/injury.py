"""What a fault does to the process it happens in."""

from __future__ import annotations

import ctypes
import os
import signal
import time

from launch.chaos.connections import cut_connections
from launch.chaos.faults import Injection
from launch.chaos.record import CellFolder

EXIT_CODE = 7
_FOR_EVER_S = 1_000_000


class InjectedError(Exception):
    """What the program of a victim raises."""


def injure(injection: Injection, folder: CellFolder) -> None:
    """Has the fault befall this process; returns only if it does not end it.

    Raises:
        InjectedError: That is the fault.
    """
    match injection.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segv":
            ctypes.string_at(0)
        case "exit":
            os._exit(EXIT_CODE)
        case "exit0":
            os._exit(0)
        case "raise":
            raise InjectedError("injected: the program raises")
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(_FOR_EVER_S)
        case "slow":
            time.sleep(injection.seconds)
        case "gil":
            # The handle of the interpreter itself keeps the GIL during calls.
            ctypes.pythonapi.sleep(_FOR_EVER_S)
        case "cut":
            _cut(injection, folder)
        case _:
            return


def _cut(injection: Injection, folder: CellFolder) -> None:
    pid = None if injection.peer is None else folder.pid_of(injection.peer)
    if pid is not None:
        cut_connections(pid)
