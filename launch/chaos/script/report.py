"""The report on a script under faults: a line for each cell, what survivors said, who was named."""

from __future__ import annotations

import re
from collections import Counter

import msgspec
from rich.console import Console
from rich.table import Table

from launch.chaos.figures import Percentiles, Score
from launch.chaos.script.outcome import BAD, ScriptCellReport, ScriptOutcome
from launch.commands import ChaosCommand

_SHOWN = 60
_COLOURS = {
    "unharmed": "green",
    "ended": "green",
    "hung": "red",
    "wrong": "red",
    "unnoticed": "red",
    "missed": "yellow",
}


class ScriptReport(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run.

    Args:
        script: ``module:function``.
        ranks: How many.
        matrix: Which cells.
        limit_s: How long ranks had to leave.
        group_timeout_s: The time-out that process groups were given; None = the script's own.
        seed: Of the choice of cells.
        undisturbed: A run without a fault.
        calls: What the ranks called then, by rank.
        is_cut: Whether the run was ended before all cells were run; those that were are here.
        cells: The cells, judged.
        verdicts: How many cells had each verdict.
        left: Seconds until survivors left their calls, over all cells.
        told: How often a survivor's error named the victim.
        blamed: How often torchrun's root cause was the victim.
        texts: The errors that survivors raised, numbers left out, and how often.
    """

    script: str
    ranks: int
    matrix: str
    limit_s: float
    group_timeout_s: float | None
    seed: int
    undisturbed: ScriptOutcome
    calls: dict[int, dict[str, int]]
    is_cut: bool
    cells: list[ScriptCellReport]
    verdicts: dict[str, int]
    left: Percentiles | None
    told: Score
    blamed: Score
    texts: dict[str, int]

    @property
    def all_well(self) -> bool:
        """Whether every fault happened, and every run ended or gave the right results."""
        return not any(cell.verdict in BAD for cell in self.cells)

    def document(self) -> bytes:
        """Returns one JSON document with every figure that the tables show."""
        return msgspec.json.format(msgspec.json.encode(self))

    def print(self, console: Console) -> None:
        """Prints the report."""
        own = "its own" if self.group_timeout_s is None else f"{self.group_timeout_s:g} s"
        table = Table(title=f"{self.script} on {self.ranks} ranks, time-outs of groups: {own}")
        for name in (
            "row",
            "fault / call / victim / place / moment",
            "run",
            "survivors left after s",
            "what they said",
        ):
            table.add_column(name, overflow="fold")
        for cell in self.cells:
            left = ", ".join(f"{seconds:.2f}" for seconds in cell.left_s) or "-"
            colour = _COLOURS[cell.verdict]
            table.add_row(cell.row, cell.name, f"[{colour}]{cell.verdict}[/{colour}]", left, _said(cell))
        console.print(table)
        if self.is_cut:
            console.print("the run was ended before all cells were run")
        console.print(", ".join(f"{count} {verdict}" for verdict, count in sorted(self.verdicts.items())))
        if self.left is not None:
            console.print(f"survivors left their calls: {self.left.sentence()}")
        console.print(f"the victim is named by an error of a survivor in {self.told.sentence()} cells with one,")
        console.print(f"by torchrun as root cause in {self.blamed.sentence()} cells with one")
        for text, count in sorted(self.texts.items(), key=lambda entry: -entry[1]):
            console.print(f"{count:4d} × {text}", soft_wrap=True, markup=False)


def plain_text(error: str) -> str:
    """Returns an error without what differs from run to run: paths, addresses, ports and numbers."""
    text = re.sub(r"\[[^\]]*/[^\]]*\]|/\S+/", "", error)
    return re.sub(r"\d+", "N", re.sub(r"\[[0-9.:a-fA-F]+\](:\d+)?", "[ADDRESS]", text)).strip()


def script_report(
    command: ChaosCommand,
    undisturbed: ScriptOutcome,
    calls: dict[int, dict[str, int]],
    cells: list[ScriptCellReport],
    *,
    is_cut: bool = False,
) -> ScriptReport:
    """Returns the report on cells that were run, all of them unless it ``is_cut``.

    A survivor that still waited at the limit counts as having left no sooner.
    """
    survivors = [(cell, end) for cell in cells for end in cell.outcome.ranks if end.rank != cell.victim]
    left = [seconds for cell in cells for seconds in cell.left_s if cell.verdict in ("ended", "hung")]
    left += [command.limit_s for _, end in survivors if end.how == "waiting"]
    return ScriptReport(
        script=command.script or "",
        ranks=command.ranks,
        matrix=command.matrix,
        limit_s=command.limit_s,
        group_timeout_s=command.group_timeout_s,
        seed=command.seed,
        undisturbed=undisturbed,
        calls=calls,
        is_cut=is_cut,
        cells=cells,
        verdicts=dict(Counter(cell.verdict for cell in cells)),
        left=Percentiles.of(left),
        told=Score.count([cell.told for cell in cells]),
        blamed=Score.count([cell.blamed_right for cell in cells]),
        texts=dict(Counter(plain_text(end.error) for _, end in survivors if end.how == "raised")),
    )


def _said(cell: ScriptCellReport) -> str:
    """Returns how survivors ended, in few words."""
    ends = Counter(
        plain_text(end.error)[:_SHOWN] if end.how == "raised" else f"{end.how} at {end.where}"[:_SHOWN]
        for end in cell.outcome.ranks
        if end.rank != cell.victim and end.how != "returned"
    )
    return "; ".join(f"{count} × {text}" for text, count in ends.items()).replace("[", "\\[")
