"""The process that vets grammars for a stage, started by that stage's first rank and tied to its life."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from launch.node.parent_death import die_with_parent

if __name__ == "__main__":
    # Before the imports that take seconds: a rank that ends meanwhile must leave no orphan.
    die_with_parent(signal.SIGKILL, sys.argv[2])

from grammar_sync.vetting.process import serve
from grammar_sync.vetting.warm_backend import WarmBackend
from launch.node.this_process import name_process


def run_compile_process(connection: socket.socket, parent_pid: int, born_with: WarmBackend | None = None) -> NoReturn:
    """Is the compile process: nothing of it reaches the terminal but Python's own errors."""
    code = 1
    try:
        die_with_parent(signal.SIGKILL, str(parent_pid))
        name_process("lockstep gram")
        # The terminal's Ctrl-C is for those who can tell the client; this process ends with its rank.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # The engines write warnings of their own to descriptor 2.
        terminal = os.fdopen(os.dup(2), "w", encoding="utf-8")
        _keep_only(connection.fileno(), terminal.fileno())
        logging.basicConfig(format="lockstep grammar compiler: %(levelname)s %(message)s", stream=terminal, force=True)
        serve(connection, on_fork=_tie_worker, born_with=born_with)
        code = 0
    except Exception:
        logging.getLogger(__name__).exception("the compile process failed")
    finally:
        logging.shutdown()
        os._exit(code)


def _keep_only(*descriptors: int) -> None:
    """Closes all other files of this process, whose owners know nothing of it; the standard ones lead nowhere."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    for path in list(Path("/proc/self/fd").iterdir()):
        descriptor = int(path.name)
        if descriptor > 2 and descriptor not in descriptors:
            with suppress(OSError):  # the listing's own
                os.close(descriptor)


def _tie_worker() -> None:
    die_with_parent(signal.SIGKILL)


if __name__ == "__main__":
    run_compile_process(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
