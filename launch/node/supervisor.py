"""The process that torchrun starts for a rank on a node with a zygote: it has the rank forked, and ends as it ends.

It imports neither torch nor the runtime, so that it starts in milliseconds.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

from launch.environment import ZYGOTE_SOCKET
from launch.exit_codes import ExitCode
from launch.node.fork_request import ForkRequest, receive_number, send_request
from launch.node.this_process import leave_no_core_file


def main(argv: list[str] | None = None) -> int:
    """Runs this rank of ``lockstep`` with ``argv`` as a process of the zygote's; returns the rank's exit code.

    When a signal ended the rank, this process ends by the same signal.
    """
    # Whoever ends this process ends the rank: its zygote sees the connection close.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    code = _run(sys.argv[1:] if argv is None else argv)
    if code < 0:
        # The rank has left its core file, if any.
        leave_no_core_file()
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _run(argv: list[str]) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(os.environ[ZYGOTE_SOCKET])
            send_request(connection, ForkRequest(argv, dict(os.environ), str(Path.cwd())))
        except OSError as error:
            print(f"lockstep: rank {os.environ['RANK']} cannot reach its zygote: {error}", file=sys.stderr)
            return ExitCode.START_FAILED
        pid = receive_number(connection)
        code = None if pid is None else receive_number(connection)
    if code is None:
        print(f"lockstep: the zygote of rank {os.environ['RANK']} is gone, and the rank with it", file=sys.stderr)
        return ExitCode.RANK_FAILED
    return code
