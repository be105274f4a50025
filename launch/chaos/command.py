"""``lockstep chaos``: whose faults they are, and what is checked before any of them."""

from __future__ import annotations

import sys

from launch.chaos.engine.command import run_engine_chaos
from launch.chaos.error import ChaosError
from launch.chaos.script.command import run_script_chaos
from launch.checks import check_json_file
from launch.commands import ChaosCommand
from launch.exit_codes import ExitCode


def run_chaos(command: ChaosCommand) -> ExitCode:
    """Runs the cells and prints what became of each; returns the exit code.

    Raises:
        UsageError: The JSON file cannot be written, or no cell has such a name.
        CheckpointError, ModelConfigError, StagePartitionError: The model cannot be used so.
        ChaosError: What is tested does not run without a fault.
    """
    if not sys.platform.startswith("linux"):
        raise ChaosError("processes are watched through Linux' /proc: chaos runs on Linux only")
    check_json_file(command.json_file)
    check_json_file(command.plot_file, "--plot")
    return run_engine_chaos(command) if command.script is None else run_script_chaos(command)
