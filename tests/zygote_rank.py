"""What the zygote's tests fork as a rank: it says what it was given, and ends as its command line says."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path


def main(argv: list[str]) -> int:
    """Runs one of: ``say``, ``exit CODE``, ``signal NUMBER``, ``raise``, ``sleep``; returns the exit code."""
    action, *rest = argv
    if action == "say":
        said = {
            "argv": argv,
            "environ": dict(os.environ),
            "folder": str(Path.cwd()),
            "stdin": sys.stdin.read(),
            "files": len(list(Path("/proc/self/fd").iterdir())),
            "parent": os.getppid(),
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
