"""The front side's entry: parses the command line, runs the command, turns every error into one line and a code."""

from __future__ import annotations

import os
import signal
import sys

from launch.bench import run_bench
from launch.bench_decode import BenchError
from launch.check_grammar import become_checker
from launch.cli import UsageError, parse_command
from launch.default_model import DefaultModelError
from launch.doctor import run_doctor
from launch.environment import FRONT_ENDPOINT
from launch.exit_codes import ExitCode
from launch.generate import run_generate
from launch.options import (
    BenchDecodeCommand,
    BenchSamplerCommand,
    CheckGrammarCommand,
    DoctorCommand,
    GenerateCommand,
    SampleCommand,
    TraceSummaryCommand,
)
from launch.parent_death import die_with_parent
from launch.rank_processes import RanksFailedError, Terminated, raise_on_signals
from launch.sample import run_sample
from launch.trace_summary import print_summary
from pp.partition import StagePartitionError
from runtime.checkpoint_layout import CheckpointError
from runtime.client_socket import ClientSocketError
from runtime.model_config import ModelConfigError
from runtime.trace_part import TraceFileError

_USAGE = (
    UsageError,
    DefaultModelError,
    CheckpointError,
    ModelConfigError,
    StagePartitionError,
    TraceFileError,
)


def main(argv: list[str] | None = None) -> int:
    """Runs ``lockstep`` with ``argv``; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    raise_on_signals()
    if FRONT_ENDPOINT in os.environ:
        die_with_parent(signal.SIGTERM)
    try:
        return _run(arguments)
    except _USAGE as error:
        return _fail(str(error), ExitCode.USAGE)
    except RanksFailedError as error:
        return _fail(str(error), error.exit_code)
    except (ClientSocketError, BenchError) as error:
        return _fail(str(error), ExitCode.INTERNAL)
    except KeyboardInterrupt:
        return _fail("interrupted", ExitCode.INTERRUPTED)
    except Terminated:
        return _fail("terminated", ExitCode.TERMINATED)


def _run(argv: list[str]) -> int:
    command = parse_command(argv)
    match command:
        case GenerateCommand():
            code = run_generate(command, argv, os.environ.get(FRONT_ENDPOINT))
        case SampleCommand():
            code = run_sample(command, argv)
        case DoctorCommand():
            code = run_doctor(command)
        case CheckGrammarCommand():
            code = become_checker(command, argv)
        case BenchSamplerCommand() | BenchDecodeCommand():
            code = run_bench(command, argv, os.environ.get(FRONT_ENDPOINT))
        case TraceSummaryCommand():
            code = print_summary(command)
        case _:
            code = command
    return code


def _fail(message: str, code: int) -> int:
    print(f"lockstep: {message}", file=sys.stderr)
    return code
