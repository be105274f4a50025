"""How a process of the front side ends: every error is one line and a code."""

from __future__ import annotations

import sys
from collections.abc import Callable

from launch.cli.parse import UsageError
from launch.default_model import DefaultModelError
from launch.exit_codes import ExitCode
from launch.node.rank_processes import RanksFailedError, Terminated
from launch.output_file import OutputError
from pp.partition import StagePartitionError
from runtime.checkpoint_layout import CheckpointError
from runtime.client_socket import ClientSocketError
from runtime.model_config import ModelConfigError
from runtime.trace_part import TraceFileError

_USAGE_ERRORS: tuple[type[Exception], ...] = (
    UsageError,
    DefaultModelError,
    CheckpointError,
    ModelConfigError,
    StagePartitionError,
    TraceFileError,
)


def exit_code_of(
    run: Callable[[], int],
    *,
    more_usage_errors: tuple[type[Exception], ...] = (),
    more_faults: tuple[type[RuntimeError], ...] = (),
) -> int:
    """Returns the exit code of ``run``, which raises or returns it; says on stderr what it raised.

    Args:
        run: What the process does.
        more_usage_errors: What else is the fault of who started it.
        more_faults: What else is a fault of the program.
    """
    usage_errors: tuple[type[Exception], ...] = (*_USAGE_ERRORS, *more_usage_errors)
    faults: tuple[type[RuntimeError], ...] = (ClientSocketError, OutputError, *more_faults)
    try:
        return run()
    except usage_errors as error:
        message, code = str(error), int(ExitCode.USAGE)
    except RanksFailedError as error:
        message, code = str(error), error.exit_code
    except faults as error:
        message, code = str(error), ExitCode.INTERNAL
    except KeyboardInterrupt:
        message, code = "interrupted", ExitCode.INTERRUPTED
    except Terminated:
        message, code = "terminated", ExitCode.TERMINATED
    print(f"lockstep: {message}", file=sys.stderr)
    return code
