"""``lockstep sample``: one sampling step from logits in a file, over real ranks."""

from __future__ import annotations

from launch.checks import check_files
from launch.cli.parse import UsageError
from launch.commands import SampleCommand
from launch.exit_codes import ExitCode
from launch.node.rank_processes import run_to_the_end
from launch.progress import show_cursor


def run_sample(command: SampleCommand, argv: list[str]) -> ExitCode:
    """Runs the ranks, of which the first writes the results; returns the exit code.

    Raises:
        UsageError: The input file cannot be read, or the output not written.
        RanksFailedError: A rank failed.
    """
    if str(command.input_file) == "-":
        raise UsageError("--input -: a file is needed, since every rank reads it by itself")
    if command.input_file.exists() and not command.input_file.is_file():
        raise UsageError(f"--input {command.input_file}: a regular file is needed, since every rank reads it by itself")
    check_files(str(command.input_file), command.output_file)
    try:
        return run_to_the_end(command.ranks, argv)
    finally:
        # The bar is rank 0's, and a rank that is ended by a signal cleans up nothing.
        show_cursor()
