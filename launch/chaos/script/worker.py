"""A rank of a user's script, started by torchrun: puts the faulty backend in place and runs the script's function."""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from launch.chaos.faulty import Trigger, install
from launch.chaos.record import CellFolder
from launch.chaos.script.words import GROUP_TIMEOUT, SCRIPT, LastWord, stack_file, write_last_word
from launch.environment import CHAOS_FOLDER

_FRAMES = 3


def main() -> None:
    """Runs the script's function on this rank; what it raises is noted, and raised."""
    folder = CellFolder(Path(os.environ[CHAOS_FOLDER]))
    rank = int(os.environ["RANK"])
    trigger = Trigger(folder, rank, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
    timeout = os.environ.get(GROUP_TIMEOUT)
    install(trigger, None if timeout is None else float(timeout))
    # Written by the signal's own handler, in C: a rank that waits in a collective runs no Python.
    with stack_file(folder, rank).open("w") as stacks:
        faulthandler.register(signal.SIGTERM, file=stacks, all_threads=False, chain=True)
        name, function = os.environ[SCRIPT].split(":")
        try:
            result = getattr(importlib.import_module(name), function)()
        except BaseException as error:
            write_last_word(folder, _raised(rank, error, trigger))
            raise
        word = LastWord(rank=rank, how="returned", t_s=time.monotonic(), result=repr(result), calls=trigger.calls)
        write_last_word(folder, word)
        faulthandler.unregister(signal.SIGTERM)


def _raised(rank: int, error: BaseException, trigger: Trigger) -> LastWord:
    where = "".join(traceback.format_tb(error.__traceback__)[-_FRAMES:])
    print(where, file=sys.stderr, flush=True)
    return LastWord(
        rank=rank,
        how="raised",
        t_s=time.monotonic(),
        error=type(error).__name__,
        text=" ".join(str(error).split()),
        calls=trigger.calls,
    )


if __name__ == "__main__":
    main()
