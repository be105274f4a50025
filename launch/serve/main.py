"""The entry of the server's process, which ``lockstep serve`` becomes."""

from __future__ import annotations

from launch.node.early_signals import leave_on_signals

leave_on_signals()

import os
import signal
import sys
from functools import partial

from launch.cli.parse import UsageError, parse_command
from launch.commands import ServeCommand
from launch.environment import FRONT_ENDPOINT
from launch.front.exit import exit_code_of
from launch.node.parent_death import die_with_parent
from launch.node.rank_processes import raise_on_signals
from launch.serve.server import run_serve


def main(argv: list[str]) -> int:
    """Runs ``lockstep`` with ``argv``, which ask for ``serve``; returns the exit code."""
    raise_on_signals()
    if FRONT_ENDPOINT in os.environ:
        die_with_parent(signal.SIGTERM)
    return exit_code_of(partial(_run, argv))


def _run(argv: list[str]) -> int:
    command = parse_command(argv)
    if not isinstance(command, ServeCommand):
        raise UsageError("this process runs serve only")
    return run_serve(command, argv, os.environ.get(FRONT_ENDPOINT))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
