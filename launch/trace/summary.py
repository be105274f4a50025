"""``lockstep trace-summary``: what each rank of a trace spent its time on, and how much of it on waiting.

Only steps that ran something count, and none in which the leader waited for its client, so that an engine without work
does not look like one that waits. A span's own time is that of no span within it.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from launch.commands import TraceSummaryCommand
from runtime.trace_part import TraceFileError

_STEP = "step"
_FORWARD = "forward"
_BUSY = (_FORWARD, "settle")
_CLIENT = "client"
_CLIENT_WAIT_NS = 1_000_000
_LARGEST = 6


class RankSummary(msgspec.Struct, frozen=True):
    """What a rank did in the steps that ran something at once.

    Args:
        rank: Global rank.
        stage: Its stage.
        steps: Its steps.
        busy_steps: Those of them that ran something and did not wait for a client; the rest of this is about them.
        busy_s: Their seconds.
        own_s: Seconds of each kind of span, those of spans within it left out.
        stage_wait: The share of ``busy_s`` in which it waited for another stage: the pipeline's bubbles.
        group_wait: The share in which it was in its stage's collectives.
        fill_s: Seconds of filling masks in threads of their own.
        fill_hidden: The share of ``fill_s`` that lay under a forward pass of this rank; 0 when there was none.
    """

    rank: int
    stage: int
    steps: int
    busy_steps: int
    busy_s: float
    own_s: dict[str, float]
    stage_wait: float
    group_wait: float
    fill_s: float
    fill_hidden: float


class _Event(NamedTuple):
    """A span of the trace; times in nanoseconds, the step as (epoch, number)."""

    start: int
    end: int
    name: str
    category: str
    step: tuple[int, int]


@dataclass(slots=True)
class _Open:
    """A span whose end is not reached, and the time of the spans within it."""

    event: _Event
    children: int = 0


@dataclass(slots=True)
class _Step:
    """One step by (epoch, number), and each kind's own time in it by (name, category)."""

    number: tuple[int, int]
    duration: int
    own: Counter[tuple[str, str]] = field(default_factory=Counter)


def print_summary(command: TraceSummaryCommand) -> int:
    """Prints the summary; returns the exit code.

    Raises:
        TraceFileError: The file is no trace of this program.
    """
    summaries = summarize(command.trace)
    if command.as_json:
        print(msgspec.json.encode(summaries).decode())
        return 0
    names: Counter[str] = Counter()
    for summary in summaries:
        names.update(summary.own_s)
    shown = [name for name, _ in names.most_common(_LARGEST)]
    columns = ("rank", "stage", "steps", "seconds", "waits: stage", "waits: group", *shown, "masks under forward")
    table = Table(*columns, box=None, header_style="bold")
    for one in summaries:
        shares = [_percent(one.own_s.get(name, 0.0) / one.busy_s) for name in shown]
        hidden = _percent(one.fill_hidden) if one.fill_s else "-"
        head = (str(one.rank), str(one.stage), f"{one.busy_steps} of {one.steps}", f"{one.busy_s:.2f}")
        table.add_row(*head, _percent(one.stage_wait), _percent(one.group_wait), *shares, hidden)
    Console(width=None if Console().is_terminal else 200).print(table)
    return 0


def summarize(trace: Path) -> list[RankSummary]:
    """Returns what each rank of a trace did, in rank order.

    Raises:
        TraceFileError: The file is no trace of this program.
    """
    tracks: dict[tuple[int, int, int], list[_Event]] = defaultdict(list)
    try:
        with trace.open(encoding="utf-8") as file:
            if '"program": "lockstep"' not in file.readline():
                raise TraceFileError(f"{trace} is no trace that lockstep wrote")
            for line in file:
                if line.startswith('{"ph": "X"'):
                    found = json.loads(line.rstrip(",\n"))
                    start = round(found["ts"] * 1000)
                    end, args = start + round(found["dur"] * 1000), found["args"]
                    event = _Event(start, end, found["name"], found["cat"], (args["epoch"], args["step"]))
                    tracks[args["rank"], found["pid"] - 1, found["tid"]].append(event)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise TraceFileError(f"cannot read {trace}: {error}") from error
    events = (event for track in tracks.values() for event in track)
    idle = {event.step for event in events if event.name == _CLIENT and event.end - event.start >= _CLIENT_WAIT_NS}
    ranks = sorted({(rank, stage) for rank, stage, _ in tracks})
    return [
        _rank_summary(rank, stage, [tracks[key] for key in sorted(tracks) if key[0] == rank], idle)
        for rank, stage in ranks
    ]


def _rank_summary(rank: int, stage: int, tracks: list[list[_Event]], idle: set[tuple[int, int]]) -> RankSummary:
    loop, threads = tracks[0], tracks[1:]
    steps = _steps(loop)
    busy = [step for step in steps if step.number not in idle and any(name in _BUSY for name, _ in step.own)]
    by_name: Counter[str] = Counter()
    by_category: Counter[str] = Counter()
    for step in busy:
        for (name, category), own in step.own.items():
            by_name[name] += own
            by_category[category] += own
    total = sum(step.duration for step in busy)
    fills = sorted(event for track in threads for event in track)
    fill = sum(event.end - event.start for event in fills)
    hidden = _overlap(fills, sorted(event for event in loop if event.name == _FORWARD))
    return RankSummary(
        rank=rank,
        stage=stage,
        steps=len(steps),
        busy_steps=len(busy),
        busy_s=total / 1e9,
        own_s={name: own / 1e9 for name, own in by_name.most_common()},
        stage_wait=by_category["wait for stage"] / total if total else 0.0,
        group_wait=by_category["wait for group"] / total if total else 0.0,
        fill_s=fill / 1e9,
        fill_hidden=hidden / fill if fill else 0.0,
    )


def _steps(loop: list[_Event]) -> list[_Step]:
    """Returns the steps of a rank's loop with each kind's own time."""
    steps: list[_Step] = []
    stack: list[_Open] = []

    def close_until(start: float) -> None:
        while stack and stack[-1].event.end <= start:
            closed = stack.pop()
            duration = closed.event.end - closed.event.start
            if stack:
                stack[-1].children += duration
            if stack or closed.event.name == _STEP:
                steps[-1].own[closed.event.name, closed.event.category] += duration - closed.children

    for event in sorted(loop, key=lambda one: (one.start, -one.end)):
        close_until(event.start)
        if event.name == _STEP:
            steps.append(_Step(event.step, event.end - event.start))
        if stack or event.name == _STEP:
            stack.append(_Open(event))
    close_until(math.inf)
    return steps


def _overlap(these: list[_Event], those: list[_Event]) -> int:
    """Returns how long ``these`` lay under ``those``, which do not overlap each other; both sorted."""
    total = first = 0
    for one in these:
        while first < len(those) and those[first].end <= one.start:
            first += 1
        at = first
        while at < len(those) and those[at].start < one.end:
            total += min(one.end, those[at].end) - max(one.start, those[at].start)
            at += 1
    return total


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
