"""A rank's part of a trace: where it lies, and how its clock stood when it began and ended."""

from __future__ import annotations

from pathlib import Path

import msgspec

from launch.environment import RankEnvironment
from launch.options import EngineOptions
from launch.rank.clock import clock_identity, read_clock
from launch.trace.file import part_path, parts_folder
from runtime.trace_part import PartHeader, TracePart
from runtime.tracer import KINDS, Tracer


class RankTrace:
    """This rank's part of a trace; every rank makes one at the same point, once all ranks can communicate.

    Args:
        trace: The file that the parts are to become.
        options: The engine's options.
        environment: What torchrun says.

    Raises:
        TraceFileError: The part cannot be made.
    """

    def __init__(self, trace: Path, options: EngineOptions, environment: RankEnvironment) -> None:
        stage, tp_rank = divmod(environment.rank, options.tp)
        rank, epoch = environment.rank, environment.epoch
        self._header = PartHeader(rank, stage, tp_rank, clock_identity(), KINDS, (read_clock(),), epoch)
        folder = parts_folder(trace, environment.run_folder)
        folder.mkdir(mode=0o700, exist_ok=True)
        self._part = TracePart(part_path(folder, rank, epoch), self._header)
        self.tracer = Tracer(self._part)

    def finish(self) -> None:
        """Ends the part; every rank calls it at the same point, after its last step."""
        clocks = (*self._header.clocks, read_clock())
        self._part.write_header(msgspec.structs.replace(self._header, clocks=clocks))
