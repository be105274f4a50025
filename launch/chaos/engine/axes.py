"""What may vary in a fault of Lockstep's own engine, and which combinations cannot be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

from launch.chaos.faults import BY_ACTION, FAULTS, PLACES, Action
from launch.chaos.pairwise import Rule

MOMENTS = ("init", "idle", "prefill", "decode", "recovery")
MODES = ("refork", "end")
"""``refork``: all ranks are forked anew; ``end``: recovery is off, and the run ends."""

NUMERICS = ("default", "invariant")
RANK_ROLES = ("leader", "first", "source", "last")
"""The decider, another rank of the first stage, the rank whose ids count, another rank of the last stage."""

HOSTS = ("zygote", "supervisor", "agent", "front", "nobody")
AXES = ("action", "operation", "victim", "place", "moment", "mode", "numerics")

_FIRST_STAGE, _LAST_STAGE = ("leader", "first"), ("source", "last")
_MESSAGES = ("relay", "hidden", "mask", "tokens_sent")
_FROM_OUTSIDE = ("kill", "segv", "stop")
_HOST_ACTIONS: Mapping[str, tuple[str, ...]] = {
    "zygote": ("kill",),
    "supervisor": ("kill",),
    "agent": ("kill", "store_slow", "store_dead"),
    "front": ("kill", "sigterm", "sigint"),
    "nobody": ("load", "none"),
}


class Operation(NamedTuple):
    """One thing that ranks do together.

    Args:
        call: What it is to the backend.
        group: ``tp``, ``pp`` or ``*``.
        roles: Who takes part.
        tag: Of a message.
        byte: Where a token id lies in it; None = it carries none.
    """

    call: str
    group: str
    roles: tuple[str, ...]
    tag: int | None = None
    byte: int | None = None


OPERATIONS: Mapping[str, Operation] = {
    "warm_up": Operation("*", "*", RANK_ROLES),
    "intake": Operation("broadcast", "tp", _FIRST_STAGE),
    "agree": Operation("all_gather", "tp", _FIRST_STAGE),
    "relay": Operation("send/recv", "pp", RANK_ROLES, tag=1),
    "hidden": Operation("send/recv", "pp", RANK_ROLES, tag=3),
    "mask": Operation("send/recv", "pp", RANK_ROLES, tag=4),
    "all_reduce": Operation("all_reduce", "tp", RANK_ROLES),
    "sample": Operation("all_gather", "tp", _LAST_STAGE),
    "tokens": Operation("broadcast", "tp", _LAST_STAGE, byte=40),
    "tokens_sent": Operation("send/recv", "pp", RANK_ROLES, tag=5, byte=96),
}
NO_OPERATION = "none"


def engine_axes() -> dict[str, Sequence[str]]:
    """Returns what may vary."""
    actions = [fault.action for fault in FAULTS]
    operations = (*OPERATIONS, NO_OPERATION)
    values = (actions, operations, (*RANK_ROLES, *HOSTS), PLACES, MOMENTS, MODES, NUMERICS)
    return dict(zip(AXES, values, strict=True))


def _reach(cell: Mapping[str, str]) -> str:
    return BY_ACTION[cast(Action, cell["action"])].reach


def _has_call(cell: Mapping[str, str]) -> bool:
    return cell["operation"] != NO_OPERATION


RULES: Mapping[str, Rule] = {
    "a rank takes part in the operation": lambda cell: (
        _has_call(cell) and cell["victim"] not in OPERATIONS[cell["operation"]].roles
    ),
    "a changed call has no before and after": lambda cell: _reach(cell) == "call" and cell["place"] != "inside",
    "without a call there is no before and after": lambda cell: not _has_call(cell) and cell["place"] != "inside",
    "only a signal comes from outside": lambda cell: (
        not _has_call(cell) and cell["victim"] in RANK_ROLES and cell["action"] not in _FROM_OUTSIDE
    ),
    "processes around ranks have faults of their own": lambda cell: (
        cell["victim"] in HOSTS and cell["action"] not in _HOST_ACTIONS[cell["victim"]]
    ),
    "what surrounds ranks is no rank": lambda cell: _reach(cell) == "around" and cell["victim"] in RANK_ROLES,
    "a message cannot be preceded by a collective of its pair": lambda cell: (
        cell["action"] == "reorder" and cell["operation"] in (*_MESSAGES, "warm_up")
    ),
    "ranks warm up as they start, and do nothing else then": lambda cell: (
        (cell["operation"] == "warm_up" and cell["moment"] not in ("init", "recovery"))
        or (cell["moment"] == "init" and cell["operation"] not in ("warm_up", NO_OPERATION))
    ),
    "idle ranks make no call": lambda cell: cell["moment"] == "idle" and _has_call(cell),
    "grammars are agreed on before requests run": lambda cell: (
        cell["operation"] == "agree" and cell["moment"] != "prefill"
    ),
    "masks are sent when a token was drawn": lambda cell: (
        cell["operation"] == "mask" and cell["moment"] not in ("prefill", "decode")
    ),
    "a second fault needs a recovery from the first": lambda cell: (
        cell["moment"] == "recovery" and cell["mode"] != "refork"
    ),
    "who is not a rank does not fail twice": lambda cell: cell["moment"] == "recovery" and cell["victim"] in HOSTS,
    "surroundings change as requests run": lambda cell: _reach(cell) == "around" and cell["moment"] != "decode",
}
"""Why combinations are impossible."""
