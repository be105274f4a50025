"""``lockstep sample``: one sampling step from logits in a file, over real ranks."""

from __future__ import annotations

from launch.cli import UsageError
from launch.exit_codes import ExitCode
from launch.options import SampleCommand
from launch.rank_processes import run_to_the_end


def run_sample(command: SampleCommand, argv: list[str]) -> int:
    """Runs the ranks, of which the first writes the results; returns the exit code.

    Raises:
        UsageError: The input file cannot be read.
        RanksFailedError: A rank failed.
    """
    try:
        with command.input_file.open("rb"):
            pass
    except OSError as error:
        raise UsageError(f"--input {command.input_file}: {error.strerror}") from error
    run_to_the_end(command.ranks, argv)
    return ExitCode.OK
