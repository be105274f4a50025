"""The agent process of a node: torchrun's own launcher, started by the front side and without torchrun's error box.

``python -m launch.node.agent`` takes torchrun's arguments. It ends with the exit code of the rank that failed.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launch.environment import AGENT_PID, FRONT_PID, RUN_FOLDER, ZYGOTE_SOCKET
from launch.exit_codes import ExitCode
from launch.node.parent_death import die_with_parent
from launch.node.run_folder import RankReport, RunFolder
from launch.node.zygote import start_zygote

if FRONT_PID in os.environ:
    # Before the imports that take seconds: a front side that is killed meanwhile must leave no orphan.
    die_with_parent(signal.SIGTERM, os.environ[FRONT_PID])

# What is imported stays: it is not searched for garbage meanwhile, which would take a fifth of the time.
gc.disable()

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

gc.enable()


def main(argv: list[str]) -> int:
    """Runs the node's ranks; returns the exit code."""
    os.environ[AGENT_PID] = str(os.getpid())
    try:
        with _folder() as folder, _zygote(folder.zygote_socket):
            # Its warnings about ranks that end are for those who started it; here the front side tells what happened.
            # The zygote is forked before: the ranks' own logs are to be seen.
            logging.disable(logging.CRITICAL)
            run(parse_args(["--log-dir", str(folder.log_folder), *argv]))
    except ChildFailedError as error:
        return _failed(error)
    except SignalException as error:
        return 128 + int(error.sigval)
    return ExitCode.OK


@contextmanager
def _folder() -> Iterator[RunFolder]:
    """Yields where the zygote's socket and torchrun's logs go; left to itself torchrun would leave a folder behind."""
    run_folder = os.environ.get(RUN_FOLDER)
    if run_folder is not None:
        yield RunFolder(Path(run_folder))
        return
    with tempfile.TemporaryDirectory(prefix="lockstep-agent-") as name:
        yield RunFolder(Path(name))


@contextmanager
def _zygote(path: Path) -> Iterator[None]:
    """Has the ranks that are started meanwhile forked from one process, where this process can have one."""
    pid = start_zygote(path, "launch.rank.main")
    if pid is None:
        yield
        return
    os.environ[ZYGOTE_SOCKET] = str(path)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _failed(error: ChildFailedError) -> int:
    """Reports the ranks that died without a word of their own; returns the exit code of the first that failed."""
    folder = os.environ.get(RUN_FOLDER)
    codes = {}
    for rank, failure in sorted(error.failures.items()):
        codes[rank] = failure.exitcode
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM and folder is not None:
            name = signal.Signals(-failure.exitcode).name
            report = RankReport(rank, -1, -1, "run", "Killed", f"killed by {name}", False, failure.exitcode)
            RunFolder(Path(folder)).write_report(report)
    own = [code for code in codes.values() if code > 0]
    return own[0] if own else ExitCode.RANK_FAILED


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except SignalException as signal_received:
        code = 128 + int(signal_received.sigval)
    # torchrun's signal handlers still raise; nothing is left to do that an exception could disturb.
    os._exit(code)
