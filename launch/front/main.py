"""The front side's entry: parses the command line and runs the command."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from typing import NoReturn

from launch.bench.command import run_bench
from launch.bench.decode import BenchError
from launch.chaos.command import run_chaos
from launch.chaos.error import ChaosError
from launch.check_grammar.command import become_checker
from launch.cli.parse import UsageError, parse_command
from launch.commands import (
    BenchDecodeCommand,
    BenchInvariantCommand,
    BenchSamplerCommand,
    BenchServeCommand,
    ChaosCommand,
    CheckGrammarCommand,
    DoctorCommand,
    GenerateCommand,
    RankCommand,
    SampleCommand,
    ServeCommand,
    TraceSummaryCommand,
)
from launch.doctor import run_doctor
from launch.environment import FRONT_ENDPOINT
from launch.front.exit import exit_code_of
from launch.generate import run_generate
from launch.node.parent_death import die_with_parent
from launch.node.rank_processes import raise_on_signals
from launch.sample.command import run_sample
from launch.serve.start import become_server
from launch.trace.summary import print_summary


def main(argv: list[str] | None = None) -> int:
    """Runs ``lockstep`` with ``argv``; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    raise_on_signals()
    if FRONT_ENDPOINT in os.environ:
        die_with_parent(signal.SIGTERM)
    return exit_code_of(partial(_run, arguments), more_faults=(BenchError, ChaosError))


def _run(argv: list[str]) -> int:
    command = parse_command(argv)
    match command:
        case GenerateCommand():
            code = run_generate(command, argv, os.environ.get(FRONT_ENDPOINT))
        case ServeCommand() | CheckGrammarCommand():
            code = _become(command, argv)
        case RankCommand():
            raise UsageError("rank: ranks are started by an engine, under its torchrun")
        case SampleCommand():
            code = run_sample(command, argv)
        case DoctorCommand():
            code = run_doctor(command)
        case BenchSamplerCommand() | BenchDecodeCommand() | BenchInvariantCommand() | BenchServeCommand():
            code = run_bench(command, argv, os.environ.get(FRONT_ENDPOINT))
        case ChaosCommand():
            code = run_chaos(command)
        case TraceSummaryCommand():
            code = print_summary(command)
        case _:
            code = command
    return code


def _become(command: ServeCommand | CheckGrammarCommand, argv: list[str]) -> NoReturn:
    """Replaces this process by one with the libraries that a command needs."""
    if isinstance(command, ServeCommand):
        become_server(command, argv, os.environ.get(FRONT_ENDPOINT))
    become_checker(command, argv)
