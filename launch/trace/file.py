"""The parts that ranks wrote, merged into one file of trace events for Perfetto or chrome://tracing.

A process of the trace is a stage, a thread is a rank's step loop or one of its threads. Times are those of the leader's
clock. Needs no torch.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from runtime.trace_part import PartHeader, ReadPart, Span, TraceFileError

_FIRST_THREAD = 1000
_THREADS_OF_RANK = 100


def parts_folder(trace: Path, run_folder: Path | None) -> Path:
    """Returns where ranks write their parts: in the run's folder, or beside the trace under a torchrun of one's own.

    Ranks on other nodes have no run folder in common: the trace must then lie on a file system that all nodes share.
    """
    return trace.with_name(trace.name + ".parts") if run_folder is None else run_folder / "trace"


def part_path(folder: Path, rank: int, epoch: int = 0) -> Path:
    """Returns where a rank writes its part of an epoch."""
    return folder / f"{rank}.{epoch}.part"


def write_trace(trace: Path, folder: Path, world_size: int) -> None:
    """Writes the trace from the parts in ``folder``, and removes it; what is missing or failed is said on stderr."""
    try:
        missing = merge_parts(trace, folder, world_size)
    except TraceFileError as error:
        print(f"lockstep: no trace: {error}", file=sys.stderr)
        return
    if missing:
        print(f"lockstep: {trace} lacks what ranks {missing} did", file=sys.stderr)


def merge_parts(trace: Path, folder: Path, world_size: int) -> list[int]:
    """Writes the trace from the parts in ``folder``, which is removed; returns the ranks that left none.

    Raises:
        TraceFileError: There is no part, one cannot be read, or the trace cannot be written.
    """
    with ExitStack() as stack:
        parts = [stack.enter_context(closing(ReadPart(path))) for path in _part_paths(folder, world_size)]
        if not parts:
            raise TraceFileError(f"no rank left a part in {folder}")
        missing = sorted(set(range(world_size)) - {part.header.rank for part in parts})
        try:
            with trace.open("w", encoding="utf-8") as file:
                file.writelines(_document(parts, missing))
        except OSError as error:
            raise TraceFileError(f"cannot write {trace}: {error.strerror}") from error
    shutil.rmtree(folder, ignore_errors=True)
    return missing


def parts_are_finished(folder: Path, world_size: int) -> bool:
    """Returns whether every rank has ended the part of its last epoch."""
    last = {_rank_and_epoch(path)[0]: path for path in _part_paths(folder, world_size)}
    if len(last) < world_size:
        return False
    with ExitStack() as stack:
        parts = [stack.enter_context(closing(ReadPart(path))) for path in last.values()]
        return all(len(part.header.clocks) > 1 for part in parts)


def _part_paths(folder: Path, world_size: int) -> list[Path]:
    """Returns the parts that are there, in the order of ranks and their epochs."""
    paths = sorted(folder.glob("*.part"), key=_rank_and_epoch)
    return [path for path in paths if _rank_and_epoch(path)[0] < world_size]


def _rank_and_epoch(path: Path) -> tuple[int, int]:
    rank, epoch, _ = path.name.split(".")
    return int(rank), int(epoch)


def leader_ns(header: PartHeader, leader_host: str, at_ns: int) -> int:
    """Returns the leader's time at a rank's time.

    Ranks of the leader's machine have its clock. For others the offset is the one measured at the start, or the line
    through start and end, since clocks of two machines drift apart.
    """
    if header.host == leader_host or not header.clocks:
        return at_ns
    first, last = header.clocks[0], header.clocks[-1]
    drift = 0
    if last.at_ns > first.at_ns:
        drift = (last.offset_ns - first.offset_ns) * (at_ns - first.at_ns) // (last.at_ns - first.at_ns)
    return at_ns + first.offset_ns + drift


def _document(parts: list[ReadPart], missing: list[int]) -> Iterator[str]:
    """Yields the trace as JSON text, one event a line."""
    about = {
        "program": "lockstep",
        "missing_ranks": missing,
        "ranks": [
            {
                "rank": part.header.rank,
                "epoch": part.header.epoch,
                "stage": part.header.stage,
                "tp_rank": part.header.tp_rank,
                "host": part.header.host,
                "lost_spans": part.lost,
                "clock_offset_ns": [reading.offset_ns for reading in part.header.clocks],
                "clock_error_ns": [reading.error_ns for reading in part.header.clocks],
            }
            for part in parts
        ],
    }
    yield f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [\n'
    yield ",\n".join(json.dumps(event) for event in _names(parts))
    host = next((part.header.host for part in parts if part.header.rank == 0), "")
    starts = (leader_ns(part.header, host, span.start_ns) for part in parts for span in part.spans())
    origin_ns = min(starts, default=0)
    for part in parts:
        for span in part.spans():
            yield ",\n" + _event(part.header, span, host, origin_ns)
    yield "\n]}\n"


def _names(parts: Iterable[ReadPart]) -> Iterator[dict[str, Any]]:
    """Yields what the viewer is to call processes and threads, and their order."""
    for part in parts:
        header = part.header
        yield _meta("process_name", header, 0, {"name": f"stage {header.stage}"})
        yield _meta("process_sort_index", header, 0, {"sort_index": header.stage})
        for track in sorted({0, *(span.track for span in part.spans())}):
            name = f"rank {header.rank} (TP {header.tp_rank})" + (f" thread {track}" if track else "")
            yield _meta("thread_name", header, track, {"name": name})
            yield _meta("thread_sort_index", header, track, {"sort_index": _thread(header, track)})


def _meta(name: str, header: PartHeader, track: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": header.stage + 1, "tid": _thread(header, track), "args": args}


def _thread(header: PartHeader, track: int) -> int:
    return _FIRST_THREAD + header.rank * _THREADS_OF_RANK + track


def _event(header: PartHeader, span: Span, host: str, origin_ns: int) -> str:
    kind = header.kinds[span.kind]
    start_ns, end_ns = (leader_ns(header, host, one) for one in (span.start_ns, span.end_ns))
    args = {"rank": header.rank, "epoch": header.epoch, "step": span.step} | (
        {kind.value: span.value} if kind.value else {}
    )
    waits = f"wait for {kind.waits}" if kind.waits else "work"
    return (
        f'{{"ph": "X", "name": {json.dumps(kind.name)}, "cat": {json.dumps(waits)}, "pid": {header.stage + 1}, '
        f'"tid": {_thread(header, span.track)}, "ts": {_microseconds(start_ns - origin_ns)}, '
        f'"dur": {_microseconds(end_ns - start_ns)}, "args": {json.dumps(args)}}}'
    )


def _microseconds(ns: int) -> str:
    """Returns nanoseconds as microseconds, exactly."""
    return f"{ns // 1000}.{ns % 1000:03d}"
