"""The process that checks finished outputs for the leader, tied to the leader's life."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping

from launch.environment import with_import_path, without_rank_variables
from launch.node.parent_death import die_with_parent

if __name__ == "__main__":
    # Before the imports that take seconds: a leader that ends meanwhile must leave no orphan.
    die_with_parent(signal.SIGKILL, sys.argv[1])

from runtime.output_check import serve

_MEMORY_BYTES = 1 << 30
_NICENESS = 10


def start_output_check(environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts the process; it serves on its standard input and output."""
    argv = [sys.executable, "-m", "launch.rank.output_check_process", str(os.getpid())]
    return subprocess.Popen(
        argv,
        env=with_import_path(without_rank_variables(environ)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def main() -> None:
    """Is the process."""
    # The terminal's Ctrl-C is for those who can tell the client; this process ends with its rank.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    os.nice(_NICENESS)
    serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
