"""One fault in one run of the engine, as data: what is injected where, and what the matrix promises of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec

from launch.chaos.engine.axes import AXES, MODES, NO_OPERATION, OPERATIONS, RANK_ROLES, RULES, engine_axes
from launch.chaos.faults import BY_ACTION, FAULTS, Action, Injection, Place
from launch.chaos.matrix import Matrix, is_named
from launch.chaos.pairwise import Combination, allowed_combinations, pairwise

_FIRST_FAULT_CALL = "all_reduce"
_SUMMED = ("all_reduce", "sample", "hidden")
_STALLS = ("stop", "sleep", "gil")


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One cell.

    Args:
        action: What happens.
        operation: At which operation of the ranks; ``none``: at no call.
        victim: To whom, by its role.
        place: Before, inside or after the call.
        moment: When in the run.
        mode: What the runtime is to do about it.
        numerics: ``default`` or ``invariant``.
    """

    action: Action
    operation: str
    victim: str
    place: Place
    moment: str
    mode: str
    numerics: str

    @property
    def name(self) -> str:
        """The cell's name."""
        return "/".join(getattr(self, axis) for axis in AXES)

    @property
    def row(self) -> str:
        """The fault's row of the matrix; a sum that is corrupted alike on all ranks is a row of its own."""
        if self.action == "corrupt" and self.operation in _SUMMED:
            return "K8"
        return "K14" if self.moment in ("init", "recovery") else BY_ACTION[self.action].row

    @property
    def is_from_outside(self) -> bool:
        """Whether no rank works the fault by itself."""
        return self.operation == NO_OPERATION

    @property
    def is_stall(self) -> bool:
        """Whether the victim lives on and does nothing."""
        return self.action in _STALLS

    def rank_of(self, role: str, tp: int, pp: int) -> int | None:
        """Returns the global rank of a role; None for a process that is no rank."""
        last = tp * (pp - 1)
        ranks = {"leader": 0, "first": tp - 1, "source": last, "last": last + tp - 1}
        return ranks.get(role)

    def victim_rank(self, tp: int, pp: int) -> int | None:
        """Returns the victim's global rank; None when it is no rank."""
        return self.rank_of(self.victim, tp, pp)

    def injections(self, tp: int, pp: int) -> tuple[Injection, ...]:
        """Returns what the faulty backend is to do: with a fault during recovery, first what is recovered from."""
        rank = self.victim_rank(tp, pp)
        first: tuple[Injection, ...] = ()
        if self.moment == "recovery" and rank is not None:
            other = (rank + 1) % (tp * pp)
            first = (Injection(action="kill", rank=other, call=_FIRST_FAULT_CALL, number=2),)
        if self.is_from_outside or rank is None:
            return first
        operation = OPERATIONS[self.operation]
        column, stage = rank % tp, rank // tp
        groups = {
            "tp": ",".join(str(stage * tp + one) for one in range(tp)),
            "pp": ",".join(str(one * tp + column) for one in range(pp)),
        }
        sends = (stage == 0) != (self.operation == "tokens_sent")
        call = ("send" if sends else "recv") if operation.call == "send/recv" else operation.call
        peer = (stage * tp + (column + 1) % tp) if operation.group != "pp" else (rank + tp) % (tp * pp)
        return (
            *first,
            Injection(
                action=self.action,
                rank=rank,
                call=call,
                group=groups.get(operation.group, "*"),
                tag=operation.tag,
                number=0,
                place=self.place,
                epoch=1 if self.moment == "recovery" else 0,
                peer=peer,
                byte=operation.byte if self.action == "corrupt" else None,
            ),
        )


def engine_scenarios(
    matrix: Matrix, *, tp: int = 2, pp: int = 2, only: Sequence[str] = (), seed: int = 0
) -> list[Scenario]:
    """Returns the cells of a matrix.

    Args:
        matrix: How many.
        tp: Ranks of a stage; with one, nothing that they do together is there.
        pp: Stages; likewise.
        only: Patterns for the cells' names; none = all.
        seed: Of the choice.
    """
    rules = dict(RULES)
    if tp == 1:
        rules["a stage of one rank makes no collective"] = lambda cell: (
            cell["victim"] in ("first", "last")
            or (cell["operation"] in OPERATIONS and OPERATIONS[cell["operation"]].group == "tp")
        )
    if pp == 1:
        rules["one stage sends no messages"] = lambda cell: (
            cell["victim"] in ("source", "last")
            or (cell["operation"] in OPERATIONS and OPERATIONS[cell["operation"]].group == "pp")
        )
    combinations = allowed_combinations(engine_axes(), rules)
    if matrix == "pairwise":
        combinations = pairwise(combinations, seed)
    elif matrix == "quick":
        combinations = _quick(pairwise(combinations, seed))
    scenarios = [_scenario(combination) for combination in combinations]
    return [scenario for scenario in scenarios if is_named(scenario.name, only)]


def _quick(combinations: Sequence[Combination]) -> list[Combination]:
    """Returns one combination for each kind of fault, in a run that is to go on where there is one."""
    chosen: list[Combination] = []
    for fault in FAULTS:
        own = [combination for combination in combinations if combination[0] == fault.action]
        chosen += sorted(own, key=lambda it: (it[2] not in RANK_ROLES, it[5] != MODES[0], it[4] != "decode"))[:1]
    return chosen


def _scenario(combination: Combination) -> Scenario:
    values = dict(zip(AXES, combination, strict=True))
    action, place = cast(Action, values.pop("action")), cast(Place, values.pop("place"))
    return Scenario(action=action, place=place, **values)
