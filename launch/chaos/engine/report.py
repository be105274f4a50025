"""The report on the engine under faults: a line for each cell, promises kept and broken, times and blame over all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from launch.chaos.engine.axes import NUMERICS
from launch.chaos.engine.judge import PROMISES, Bounds, Judgement
from launch.chaos.engine.outcome import EngineOutcome
from launch.chaos.engine.plot import Times, times_plot
from launch.chaos.engine.scenario import Scenario
from launch.chaos.figures import Percentiles, Score


class CellReport(msgspec.Struct, frozen=True, kw_only=True):
    """One cell, judged.

    Args:
        name: The cell's name.
        row: The fault's row of the matrix.
        scenario: What was to happen.
        judgement: What was kept and broken.
        outcome: All that was seen.
        attempts: How often it was run; more than once when its fault did not happen.
    """

    name: str
    row: str
    scenario: Scenario
    judgement: Judgement
    outcome: EngineOutcome
    attempts: int

    def what_broke(self) -> str:
        """Returns what was not as promised, in one line; empty when all was."""
        if not self.judgement.happened:
            return f"the fault did not happen; {self.outcome.said}"
        return "; ".join(f"{promise}: {word}" for promise, word in self.judgement.promises.items() if word != "kept")


class KindTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What faults of one kind took.

    Args:
        noticed: Seconds until they were noticed.
        recovered: Seconds until tokens flowed again.
    """

    noticed: Percentiles | None
    recovered: Percentiles | None


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run.

    Args:
        model: Folder or file.
        tp: Ranks of a stage.
        pp: Stages.
        matrix: Which cells.
        seed: Of the choice of cells.
        bounds: Seconds that are allowed, before they are stretched by each cell's load factor.
        is_cut: Whether the run was ended before all cells were run; those that were are here.
        cells: The cells, judged.
        promises: For each promise, in how many of the cells that promise it it was kept.
        named: For each row, in how many cells the victim was named as promised.
        named_exactly: For each row, in how many it was named alone.
        noticed: Seconds until faults were noticed.
        recovered: Seconds until tokens flowed again.
        ended: Seconds until nothing was there of runs that a fault ended, from when it was noticed.
        by_kind: The first two for each kind of fault.
        load: Load factors around the cells.
        finished: For either numerics, the requests that finished in cells whose ranks recovered.
        texts_that_differ: How many of them have other tokens than in the undisturbed run.
    """

    model: str
    tp: int
    pp: int
    matrix: str
    seed: int
    bounds: Bounds
    is_cut: bool
    cells: list[CellReport]
    promises: dict[str, Score]
    named: dict[str, Score]
    named_exactly: dict[str, Score]
    noticed: Percentiles | None
    recovered: Percentiles | None
    ended: Percentiles | None
    by_kind: dict[str, KindTimes]
    load: Percentiles | None
    finished: dict[str, int]
    texts_that_differ: dict[str, int]

    @property
    def all_well(self) -> bool:
        """Whether every fault happened and every promise was kept."""
        return all(cell.judgement.is_kept for cell in self.cells)

    def document(self) -> bytes:
        """Returns one JSON document with every figure that the tables show."""
        return msgspec.json.format(msgspec.json.encode(self))

    def print(self, console: Console) -> None:
        """Prints the report."""
        table = Table(title=f"{self.model}, tp {self.tp}, pp {self.pp}: {self.matrix} matrix")
        for name in ("row", "fault / operation / victim / place / moment / mode / numerics", "".join(PROMISES)):
            table.add_column(name, overflow="fold")
        for name in ("noticed s", "again s", "load"):
            table.add_column(name, justify="right")
        table.add_column("what broke", overflow="fold")
        for cell in self.cells:
            table.add_row(*_line(cell))
        console.print(table)
        if self.is_cut:
            console.print("the run was ended before all cells were run")
        kept = sum(cell.judgement.is_kept for cell in self.cells)
        console.print(f"{kept} of {len(self.cells)} cells kept what is promised of them")
        for promise, score in self.promises.items():
            console.print(f"  {promise}: {score.sentence()}")
        for row, score in self.named.items():
            console.print(f"the victim was named, {row}: {score.sentence()}, alone in {self.named_exactly[row].right}")
        for word, figures in (
            ("noticed", self.noticed),
            ("tokens again", self.recovered),
            ("gone, where the fault ended the run,", self.ended),
        ):
            if figures is not None:
                console.print(f"{word} after: {figures.sentence()}")
        if self.load is not None:
            console.print(
                f"load factor: p50 {self.load.p50:.1f}, at most {self.load.most:.1f}; bounds are stretched by it"
            )
        for kind, times in self.by_kind.items():
            if times.recovered is not None:
                console.print(f"  {kind}: tokens again after {times.recovered.sentence()}")
        for numerics, count in self.finished.items():
            differ = self.texts_that_differ[numerics]
            console.print(f"texts that differ behind a recovery, {numerics} numerics: {differ} of {count}")

    def plot(self) -> str:
        """Returns the times of each kind of fault as an SVG document."""
        kinds = dict.fromkeys(cell.scenario.action for cell in self.cells)
        return times_plot(
            f"{self.model}, tp {self.tp}, pp {self.pp}: {self.matrix} matrix, seconds after the fault",
            {kind: _times([cell for cell in self.cells if cell.scenario.action == kind]) for kind in kinds},
        )


def _times(cells: Sequence[CellReport]) -> Times:
    judged = [cell.judgement for cell in cells]
    return Times(
        [it.noticed_s for it in judged if it.noticed_s is not None],
        [it.recovered_s for it in judged if it.recovered_s is not None],
    )


def engine_report(cells: list[CellReport], **facts: Any) -> EngineReport:
    """Returns the report on cells that were run.

    Args:
        cells: The cells.
        facts: The fields of ``EngineReport`` that say what was run.
    """
    judged = [cell.judgement for cell in cells]
    kinds = dict.fromkeys(cell.scenario.action for cell in cells)
    recovered = [cell for cell in cells if cell.judgement.recovered_s is not None]
    rows = sorted({cell.row for cell in cells}, key=lambda row: int(row[1:]))
    named = {row: Score.count([cell.judgement.named_right for cell in cells if cell.row == row]) for row in rows}
    alone = {row: Score.count([cell.judgement.named_exactly for cell in cells if cell.row == row]) for row in rows}
    return EngineReport(
        cells=cells,
        promises={
            promise: Score.count([word == "kept" for it in judged if (word := it.promises.get(promise)) is not None])
            for promise in PROMISES
        },
        named={row: score for row, score in named.items() if score.of},
        named_exactly={row: score for row, score in alone.items() if score.of},
        noticed=Percentiles.of(_times(cells).noticed_s),
        recovered=Percentiles.of(_times(cells).recovered_s),
        ended=Percentiles.of([it.ended_s for it in judged if it.ended_s is not None]),
        by_kind={kind: _kind_times([cell for cell in cells if cell.scenario.action == kind]) for kind in kinds},
        load=Percentiles.of([cell.outcome.load for cell in cells]),
        finished={one: sum(_finished(cell) for cell in recovered if cell.scenario.numerics == one) for one in NUMERICS},
        texts_that_differ={
            one: sum(cell.judgement.texts_that_differ for cell in recovered if cell.scenario.numerics == one)
            for one in NUMERICS
        },
        **facts,
    )


def _kind_times(cells: Sequence[CellReport]) -> KindTimes:
    times = _times(cells)
    return KindTimes(noticed=Percentiles.of(times.noticed_s), recovered=Percentiles.of(times.recovered_s))


def _finished(cell: CellReport) -> int:
    return sum(end.is_done for end in cell.outcome.front.requests) if cell.outcome.front is not None else 0


def _line(cell: CellReport) -> list[str]:
    judgement = cell.judgement
    marks = ""
    for promise in PROMISES:
        word = judgement.promises.get(promise)
        marks += "[dim]·[/dim]" if word is None else f"[green]{promise}[/green]" if word == "kept" else "[red]x[/red]"
    times = (judgement.noticed_s, judgement.recovered_s, cell.outcome.load)
    figures = ["-" if value is None else f"{value:.2f}" for value in times]
    return [cell.row, cell.name, marks, *figures, escape(cell.what_broke())]
