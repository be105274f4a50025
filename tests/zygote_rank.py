"""What the zygote's tests fork as a rank: it says what it was given, and ends as its command line says."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

from launch.node.progress_record import Phase, ProgressRecord

_STEP_S = 0.03
_PREPARED: list[list[str]] = []
# As libraries do that ranks import: a crash is first told in many words, here in eleven seconds.
_C = ctypes.CDLL(None)
_C.signal(signal.SIGSEGV, _C.sleep)


def prepare(argv: list[str]) -> list[str]:
    """Returns what the ranks of a command line share: where it was made, how often that was done, and for what."""
    _PREPARED.append(argv)
    return [str(os.getpid()), str(len(_PREPARED)), *argv]


def main(argv: list[str], record: ProgressRecord, prepared: list[str] | None, weights_file: int | None) -> int:
    """Runs one of: ``say``, ``exit CODE``, ``signal NUMBER``, ``raise``, ``sleep``, ``step``; returns the exit code."""
    action, *rest = argv
    if action == "step":
        _note_weights(Path(rest[0]), weights_file)
        return _step(Path(rest[0]), record)
    if action == "say":
        said = {
            "argv": argv,
            "environ": dict(os.environ),
            "folder": str(Path.cwd()),
            "stdin": sys.stdin.read(),
            "files": len(list(Path("/proc/self/fd").iterdir())),
            "parent": os.getppid(),
            "prepared": prepared,
            "weights_file": weights_file,
        }
        print(json.dumps(said), flush=True)
        print("to stderr", file=sys.stderr, flush=True)
    if action == "exit":
        return int(rest[0])
    if action == "signal":
        signal.raise_signal(signal.Signals(int(rest[0])))
    if action == "raise":
        raise LookupError("nothing here")
    if action == "sleep":
        print(os.getpid(), flush=True)
        time.sleep(600)
    return 0


def _note_weights(folder: Path, weights_file: int | None) -> None:
    """Says in a file ``weights-<rank>.<epoch>`` what earlier epochs left, and leaves the epoch's number."""
    rank, epoch = os.environ["RANK"], os.environ["LOCKSTEP_EPOCH"]
    said = folder / f"weights-{rank}.{epoch}"
    if weights_file is None:
        said.write_text("None")
        return
    said.write_bytes(os.pread(weights_file, 100, 0))
    os.pwrite(weights_file, f"{rank}.{epoch} ".encode(), os.fstat(weights_file).st_size)


def _step_now() -> int:
    """Returns the step that all ranks are in, which wait for nobody: the clock of the machine counts them."""
    return int(time.monotonic() / _STEP_S)


def _wait_for_next_step() -> None:
    time.sleep(_STEP_S - time.monotonic() % _STEP_S)


def _step(folder: Path, record: ProgressRecord) -> int:
    """Steps until a file says otherwise; says of itself in a file ``<rank>.<epoch>``."""
    rank, epoch = os.environ["RANK"], os.environ["LOCKSTEP_EPOCH"]
    if (folder / f"fail-{rank}.{epoch}").exists():
        return 7
    record.begin_step(_step_now(), 0, is_idle=False)
    (folder / f"{rank}.{epoch}").write_text(str(os.getpid()))
    while not (folder / "end").exists():
        _wait_for_next_step()
        diverges = (folder / f"diverge-{rank}.{epoch}").exists()
        record.begin_step(_step_now(), int(diverges), is_idle=False)
        if diverges:
            (folder / f"diverged-{rank}.{epoch}").touch()
        if (folder / f"sleep-{rank}.{epoch}").exists():
            time.sleep(600)
        for code in (0, 7):
            if (folder / f"leave-{code}-{rank}.{epoch}").exists():
                return code
    record.enter_phase(Phase.LEAVING)
    return 0
