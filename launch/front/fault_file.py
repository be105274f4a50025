"""The file that ``--fault-report`` names: what went wrong with ranks, one JSON object a line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from launch.node.rank_fault import FaultReport


def append_reports(path: Path, reports: Sequence[FaultReport]) -> None:
    """Appends a line for each report; that it cannot be written is said on stderr, and costs nothing else."""
    lines = b"".join(msgspec.json.encode(report) + b"\n" for report in reports)
    try:
        with path.open("ab") as file:
            file.write(lines)
    except OSError as error:
        print(f"lockstep: cannot write {path}: {error.strerror}", file=sys.stderr, flush=True)
