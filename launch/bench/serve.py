"""``lockstep bench serve``, the part that needs no HTTP client: becomes the process that has one."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import NoReturn

from launch.cli.parse import UsageError
from launch.commands import BenchServeCommand
from launch.environment import with_import_path
from launch.node.this_process import become
from launch.serve.keys import read_keys


def become_load_generator(command: BenchServeCommand, argv: list[str]) -> NoReturn:
    """Replaces this process by the load generator.

    Args:
        command: What to send, and where.
        argv: The command line, which it reads again.

    Raises:
        UsageError: An option is wrong, or a package is missing.
    """
    if find_spec("httpx") is None:
        raise UsageError("bench serve sends its requests with httpx: pip install httpx")
    read_keys(command.api_key_file, os.environ)
    become([sys.executable, "-m", "launch.bench.serve_main", *argv], with_import_path(os.environ))
