"""What became of a script under a fault, and how that is judged."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from launch.chaos.faults import BY_ACTION, Injection
from launch.chaos.record import Fired

Verdict = Literal["unharmed", "ended", "hung", "wrong", "unnoticed", "missed"]
"""``unharmed``: the run ended well with the results of an undisturbed one; ``ended``: with an error; ``hung``: it did
not end; ``wrong``: it ended well, but with other results; ``unnoticed``: it ended well, though a rank never came to its
end; ``missed``: the fault did not happen."""

BAD: tuple[Verdict, ...] = ("hung", "wrong", "unnoticed", "missed")

Ending = Literal["returned", "raised", "killed", "gone", "waiting"]


class RankEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank ended.

    Args:
        rank: The rank.
        how: ``returned``, ``raised``, ``killed`` (torchrun ended it), ``gone`` without a word, or ``waiting`` still.
        after_s: Seconds from the fault until then; None while it waits, or where there was no fault.
        error: What it raised, with its class.
        where: The call it was in last, or the line of the program that it was at when it was ended.
        result: What its function returned.
    """

    rank: int
    how: Ending
    after_s: float | None
    error: str = ""
    where: str = ""
    result: str = ""


class ScriptOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one run.

    Args:
        fired: The fault, if it happened.
        exit_code: torchrun's; None when it had to be ended.
        ended_s: Seconds from the fault until torchrun ended; None when it had to be ended.
        blamed: The rank that torchrun names as root cause; None when it names none.
        ranks: All ranks, in order.
        wall_s: Seconds of the whole run.
    """

    fired: Fired | None
    exit_code: int | None
    ended_s: float | None
    blamed: int | None
    ranks: list[RankEnd]
    wall_s: float


class ScriptCellReport(msgspec.Struct, frozen=True, kw_only=True):
    """One cell, judged.

    Args:
        name: The cell's name.
        action: What was done.
        row: The fault's row of the matrix.
        victim: To which rank.
        verdict: What became of the run.
        outcome: All that was seen.
        left_s: Seconds from the fault until each survivor that left had done so, ascending.
        told: Whether an error of a survivor names the victim; None where no survivor raised.
        blamed_right: Whether torchrun names the victim; None where it names nobody.
        attempts: How often it was run; more than once when a run failed before its fault.
    """

    name: str
    action: str
    row: str
    victim: int
    verdict: Verdict
    outcome: ScriptOutcome
    left_s: list[float]
    told: bool | None
    blamed_right: bool | None
    attempts: int


def verdict_of(outcome: ScriptOutcome, undisturbed: ScriptOutcome) -> Verdict:
    """Returns what became of a run, compared with one without a fault."""
    if outcome.fired is None:
        return "missed"
    if outcome.exit_code is None:
        return "hung"
    if outcome.exit_code:
        return "ended"
    if any(end.how != "returned" for end in outcome.ranks):
        return "unnoticed"
    results = [end.result for end in outcome.ranks]
    return "unharmed" if results == [end.result for end in undisturbed.ranks] else "wrong"


def judged(
    name: str, injection: Injection, outcome: ScriptOutcome, undisturbed: ScriptOutcome, *, attempts: int = 1
) -> ScriptCellReport:
    """Returns a cell with what is to be said of it.

    Args:
        name: The cell's name.
        injection: The fault that was to happen.
        outcome: What became of the run.
        undisturbed: A run without a fault.
        attempts: How often it was run.
    """
    victim = injection.rank
    survivors = [end for end in outcome.ranks if end.rank != victim]
    errors = [end.error for end in survivors if end.how == "raised"]
    return ScriptCellReport(
        name=name,
        action=injection.action,
        row=BY_ACTION[injection.action].row,
        victim=victim,
        verdict=verdict_of(outcome, undisturbed),
        outcome=outcome,
        left_s=sorted(end.after_s for end in survivors if end.after_s is not None),
        told=any(names_rank(error, victim) for error in errors) if errors else None,
        blamed_right=None if outcome.blamed is None else outcome.blamed == victim,
        attempts=attempts,
    )


def names_rank(text: str, rank: int) -> bool:
    """Returns whether an error's text names a rank as one that failed: ``rank 1``, ``ranks 0, 1``, ``rank: 1``.

    A rank that a text only begins with, ``[Rank 0]``, is the one that speaks.
    """
    spoken = re.sub(r"^\S*\s*\[rank \d+\]:?", "", text, flags=re.IGNORECASE)
    lists = re.findall(r"\branks?\b\W{0,3}((?:\d+(?:\s*(?:,|and)\s*)?)+)", spoken, flags=re.IGNORECASE)
    return any(str(rank) in re.findall(r"\d+", found) for found in lists)
