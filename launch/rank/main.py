"""A rank's entry: runs the engine, and turns every error into a report and a named exit code."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time

from grammar_sync.vocabulary import VocabularyError
from launch.bench.invariant import BenchInvariantRank
from launch.bench.sampler import BenchSamplerRank
from launch.cli.parse import UsageError, parse_command
from launch.commands import BenchInvariantCommand, BenchSamplerCommand, SampleCommand
from launch.default_model import DefaultModelError
from launch.environment import RankEnvironment, RankEnvironmentError
from launch.exit_codes import ExitCode
from launch.node.progress_record import ProgressRecord
from launch.node.run_folder import RankReport, RunFolder
from launch.node.this_process import name_process
from launch.output_file import OutputError
from launch.rank.engine_rank import Rank
from launch.rank.preparation import EngineCommand, PreparedEngine
from launch.rank.start_barrier import StartError
from launch.sample.rank import SampleRank
from runtime.checkpoint_layout import CheckpointError
from runtime.comm_error import COMM_ERRORS, is_consequence
from runtime.plan import DesyncError
from runtime.tokenizer import TokenizerError
from runtime.trace_part import TraceFileError
from sampler.processor_names import ProcessorLoadError

AnyRank = Rank | SampleRank | BenchSamplerRank | BenchInvariantRank
_LINGER_S = 0.1
"""How long a rank that is out of step stays, so that the others come to where their digests tell who is wrong."""


def prepare(argv: list[str]) -> PreparedEngine | None:
    """Returns what the ranks that run ``argv`` share, made once; this process can be forked as before.

    None when they share nothing, and when anything is wrong: then each of them meets the error, and reports it.
    """
    try:
        command = parse_command(argv)
        return PreparedEngine.make(command) if isinstance(command, EngineCommand) else None
    except (ValueError, RuntimeError, OSError):
        return None


def main(
    argv: list[str] | None = None,
    record: ProgressRecord | None = None,
    prepared: PreparedEngine | None = None,
    weights_file: int | None = None,
) -> int:
    """Runs this rank of ``lockstep`` with ``argv``; returns the exit code.

    Args:
        argv: The command line, without the program's name; this process's own when left out.
        record: Where this rank notes what it does, shared with whoever watches it; one of its own when left out.
        prepared: What ``prepare`` returned for this command line, in the process that this one was forked from.
        weights_file: A memory file of this rank and of those that will take its place, if any.
    """
    arguments = sys.argv[1:] if argv is None else argv
    # Python cannot run a handler while a collective waits in C++: the default action ends the rank at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        environment = RankEnvironment.read(os.environ)
        command = parse_command(arguments) if prepared is None else prepared.command
    except (RankEnvironmentError, UsageError, DefaultModelError) as error:
        print(f"lockstep: {error}", file=sys.stderr)
        return ExitCode.USAGE
    name_process(f"lockstep r{environment.rank}")
    logging.basicConfig(format=f"lockstep rank {environment.rank}: %(levelname)s %(message)s", level=logging.WARNING)
    rank: AnyRank
    match command:
        case _ if isinstance(command, EngineCommand):
            progress = record or ProgressRecord.create()
            rank = Rank(command.engine, environment, arguments, progress, prepared=prepared, weights_file=weights_file)
        case SampleCommand():
            rank = SampleRank(command, environment)
        case BenchSamplerCommand():
            rank = BenchSamplerRank(command, environment)
        case BenchInvariantCommand():
            rank = BenchInvariantRank(command, environment)
        case _:
            print("lockstep: only 'generate', 'serve', 'sample' and 'bench' run under torchrun", file=sys.stderr)
            return ExitCode.USAGE
    try:
        code = rank.run()
    except Exception as error:  # noqa: BLE001 - the process boundary: whatever it was, it is reported and ends the rank
        code = _report(rank, environment, error)
    logging.shutdown()
    sys.stderr.flush()
    sys.stdout.flush()
    # Nothing in torch ends an operation of gloo that still waits, and its threads take their time: leave at once.
    os._exit(code)


def _report(rank: AnyRank, environment: RankEnvironment, error: Exception) -> ExitCode:
    code = _exit_code(rank, error)
    report = RankReport(
        rank=environment.rank,
        stage=rank.stage,
        tp_rank=rank.tp_rank,
        phase=rank.phase,
        kind=type(error).__name__,
        message=" ".join(str(error).split()) or type(error).__name__,
        is_consequence=isinstance(error, StartError) or is_consequence(error),
        exit_code=code,
    )
    expected = isinstance(error, (ValueError, OutputError, StartError, *COMM_ERRORS))
    if environment.run_folder is None:
        print(f"lockstep: {report.sentence()}", file=sys.stderr)
    else:
        RunFolder(environment.run_folder).write_report(report)
    if not expected:
        logging.getLogger(__name__).error("%s", report.kind, exc_info=error)
    if isinstance(error, DesyncError):
        time.sleep(_LINGER_S)
    return code


def _exit_code(rank: AnyRank, error: Exception) -> ExitCode:
    if isinstance(
        error, (CheckpointError, TokenizerError, VocabularyError, UsageError, TraceFileError, ProcessorLoadError)
    ):
        return ExitCode.USAGE
    if isinstance(error, OutputError):
        return ExitCode.INTERNAL
    return ExitCode.START_FAILED if rank.phase == "start" else ExitCode.RANK_FAILED
