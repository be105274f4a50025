"""``lockstep bench``: which benchmark it is, and what is checked before any of them."""

from __future__ import annotations

from launch.bench.decode import run_bench_decode
from launch.bench.serve import become_load_generator
from launch.checks import check_engine, check_json_file
from launch.commands import BenchDecodeCommand, BenchInvariantCommand, BenchSamplerCommand, BenchServeCommand
from launch.node.rank_processes import run_to_the_end

BenchCommand = BenchSamplerCommand | BenchDecodeCommand | BenchInvariantCommand | BenchServeCommand


def run_bench(command: BenchCommand, argv: list[str], front_endpoint: str | None) -> int:
    """Runs the benchmark; returns the exit code.

    Args:
        command: What to measure.
        argv: The command line, run again by each rank.
        front_endpoint: Where the leader that started this process connects; None when this process starts the ranks.

    Raises:
        UsageError: An option is wrong, the JSON file cannot be written, or a peer cannot run.
        RanksFailedError: A rank failed.
        BenchError: The engine did not do what is to be measured.
    """
    check_json_file(command.json_file)
    if isinstance(command, BenchServeCommand):
        become_load_generator(command, argv)
    if isinstance(command, BenchDecodeCommand):
        return run_bench_decode(command, argv, front_endpoint)
    if isinstance(command, BenchInvariantCommand):
        check_engine(command.engine)
        return run_to_the_end(command.engine, argv)
    # The first rank prints the table and writes the figures.
    return run_to_the_end(command.ranks, argv)
