"""Which faults a script is put to: every kind at the calls that it was seen to make."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

from launch.chaos.faults import BY_ACTION, FAULTS, PLACES, Action, Injection, Place
from launch.chaos.matrix import Matrix, is_named
from launch.chaos.pairwise import Combination, Rule, allowed_combinations, pairwise, shuffled

MOMENTS = ("first", "middle", "last")
_AXES = ("action", "call", "victim", "place", "moment")
_PAYLOADS = ("all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "send", "recv")
_PAYLOAD_ACTIONS = ("wrong_size", "wrong_dtype", "corrupt")

Calls = Mapping[int, Mapping[str, int]]
"""How often each rank made each call: ``all_reduce@0,1`` → number."""


class ScriptCell(NamedTuple):
    """One fault in one run of the script."""

    name: str
    injection: Injection


def script_cells(calls: Calls, matrix: Matrix, *, only: Sequence[str] = (), seed: int = 0) -> list[ScriptCell]:
    """Returns the cells for a script.

    Args:
        calls: What an undisturbed run did.
        matrix: ``quick``: each kind of fault once; ``pairwise``: any two of kind, call,
            victim, place and moment together; ``full``: all.
        only: Patterns for the cells' names; none = all.
        seed: Of the choice.
    """
    axes = script_axes(calls)
    combinations = allowed_combinations(axes, script_rules(calls))
    if matrix == "pairwise":
        combinations = pairwise(combinations, seed)
    elif matrix == "quick":
        combinations = _one_each(combinations, seed)
    cells = [_cell(combination, calls) for combination in combinations]
    return [cell for cell in cells if is_named(cell.name, only)]


def script_axes(calls: Calls) -> dict[str, Sequence[str]]:
    """Returns what may vary."""
    names = sorted({name for counts in calls.values() for name in counts})
    actions = [fault.action for fault in FAULTS if fault.reach != "around"]
    values = (actions, names, [str(rank) for rank in sorted(calls)], PLACES, MOMENTS)
    return dict(zip(_AXES, values, strict=True))


def script_rules(calls: Calls) -> dict[str, Rule]:
    """Returns why combinations are impossible."""
    return {
        "the victim does not make this call": lambda cell: cell["call"] not in calls[int(cell["victim"])],
        "a changed call has no before and after": lambda cell: (
            BY_ACTION[cast(Action, cell["action"])].reach == "call" and cell["place"] != "inside"
        ),
        "the call has no tensor to change": lambda cell: (
            cell["action"] in _PAYLOAD_ACTIONS and not cell["call"].startswith(_PAYLOADS)
        ),
        "a message cannot be preceded by a collective of its pair": lambda cell: (
            cell["action"] == "reorder" and cell["call"].startswith(("send", "recv"))
        ),
        "a group of one has no connections": lambda cell: (
            cell["action"] == "cut" and _peer(cell["call"], int(cell["victim"]), len(calls)) is None
        ),
        "a call made once has one moment": lambda cell: (
            calls[int(cell["victim"])].get(cell["call"], 0) < MOMENTS.index(cell["moment"]) + 1
        ),
    }


def _one_each(combinations: Sequence[Combination], seed: int) -> list[Combination]:
    """Returns one combination for each kind of fault, in the middle of a call, the calls in turn."""
    order = shuffled(combinations, seed)
    used: Counter[str] = Counter()
    chosen = []
    for fault in FAULTS:
        own = [combination for combination in order if combination[0] == fault.action]
        if own:
            chosen.append(min(own, key=lambda it: (it[3] != "inside", it[4] != "middle", used[it[1]])))
            used[chosen[-1][1]] += 1
    return chosen


def _cell(combination: Combination, calls: Calls) -> ScriptCell:
    action, name, victim, place, moment = combination
    rank = int(victim)
    call, _, group = name.partition("@")
    call, _, tag = call.partition(":")
    number: Callable[[int], int] = {"first": lambda _: 0, "middle": lambda n: n // 2, "last": lambda n: n - 1}[moment]
    injection = Injection(
        action=cast(Action, action),
        rank=rank,
        call=call,
        group=group,
        tag=int(tag) if tag else None,
        number=number(calls[rank][name]),
        place=cast(Place, place),
        peer=_peer(name, rank, len(calls)),
    )
    return ScriptCell(f"{action}/{name}/r{victim}/{place}/{moment}", injection)


def _peer(name: str, rank: int, world_size: int) -> int | None:
    """Returns the rank before the victim in a call's group: the other end of a connection to cut."""
    group = name.partition("@")[2]
    members = list(range(world_size)) if group == "default" else [int(member) for member in group.split(",")]
    at = members.index(rank) if rank in members else 0
    return members[at - 1] if len(members) > 1 else None
