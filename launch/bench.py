"""``lockstep bench``: runs the ranks of a benchmark, of which the first prints the table and writes the figures."""

from __future__ import annotations

from launch.cli import UsageError
from launch.options import BenchSamplerCommand
from launch.rank_processes import run_to_the_end


def run_bench(command: BenchSamplerCommand, argv: list[str]) -> int:
    """Runs the benchmark; returns the exit code.

    Raises:
        UsageError: The JSON file cannot be written.
        RanksFailedError: A rank failed.
    """
    if command.json_file is not None:
        # Now, and not after minutes.
        try:
            with command.json_file.open("ab"):
                pass
        except OSError as error:
            raise UsageError(f"--json {command.json_file}: {error.strerror}") from error
    return run_to_the_end(command.ranks, argv)
