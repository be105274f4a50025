"""``lockstep serve``, the part that needs no web framework: becomes the process that has one."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from launch.checks import check_engine
from launch.commands import ServeCommand
from launch.environment import with_import_path
from launch.node.rank_processes import replace_by_agent
from launch.node.this_process import become
from launch.serve.keys import read_keys


def become_server(command: ServeCommand, argv: list[str], front_endpoint: str | None) -> NoReturn:
    """Replaces this process by the server, or by the agent of one of several nodes, whose leader starts the server.

    Args:
        command: What to serve.
        argv: The command line, run again by the server and by each rank.
        front_endpoint: Where the leader that started this process connects; None when this process starts the ranks.

    Raises:
        UsageError: An option is wrong.
        CheckpointError, ModelConfigError, StagePartitionError: The model is, or cannot be cut as asked.
    """
    check_engine(command.engine)
    read_keys(command.http.api_key_file, os.environ)
    if front_endpoint is None and command.nodes.nnodes > 1:
        replace_by_agent(command.engine, command.nodes, argv)
    become([sys.executable, "-m", "launch.serve.main", *argv], with_import_path(os.environ))
