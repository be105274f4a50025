"""Judges a run of the engine against what is promised of its fault: S D A R B L Q of the fault matrix.

S: no wrong, doubled or lost token was released. D: the fault was noticed within its bound. A: the rank that is named is
the victim. R: every request finished, with the undisturbed run's tokens. B: tokens flowed again within the bound. L:
nothing is left. Q: without a fault nothing happened. Bounds on seconds are stretched by the same run's load factor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final, Literal

import msgspec

from launch.chaos.engine.outcome import EngineOutcome, FrontOutcome, RequestEnd
from launch.chaos.engine.scenario import Scenario
from launch.chaos.script.outcome import names_rank
from launch.node.stall import stretch_of

Promise = Literal["S", "D", "A", "R", "B", "L", "Q"]
PROMISES: tuple[Promise, ...] = ("S", "D", "A", "R", "B", "L", "Q")

_OF_ROW: Final[Mapping[str, str]] = {
    "K1": "SDARBL",
    "K2": "SDARBL",
    "K3": "SDARBL",
    "K4": "SRL",
    "K5": "SDARL",
    "K6": "SDARL",
    "K7": "SARL",
    "K8": "L",
    "K10": "SDARL",
    "K11": "SDARL",
    "K12": "SDL",
    "K14": "SRL",
    "K16": "SQL",
}
"""What each row promises."""

_OF_A_GROUP: Final = ("K5", "K6", "K7", "K10")
"""These are injected below the ranks' own checks, on the wire: of those who made the call, nobody can tell who is to
blame, and nobody else may be named."""

_NEEDS_RECOVERY = "RB"
_HOSTS_WITHOUT_RECOVERY = ("zygote", "supervisor", "agent", "front")


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that the runtime may take, before they are stretched.

    Args:
        noticed_s: To notice a rank that ended.
        stall_s: How old a rank's last sign of life may be; None where only time-outs end a stall.
        group_timeout_s: Time-out of every collective and message.
        recovered_s: From a fault that was noticed to the next token.
        closed_s: To leave when asked to, or when a fault ended the run and was noticed.
    """

    noticed_s: float = 0.2
    stall_s: float | None = None
    group_timeout_s: float = 30.0
    recovered_s: float = 1.0
    closed_s: float = 5.0


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """A judged cell.

    Args:
        happened: Whether the fault happened; without that no promise is judged.
        promises: For each promise of the fault's row ``kept``, or what broke it.
        noticed_s: Seconds from the fault until it was noticed; None when it was not, or did nothing.
        recovered_s: Seconds from the fault until the first token after it; None without a recovery.
        ended_s: Seconds from when the fault was noticed, a signal from when it was sent, until nothing of the run was
            there; None where the run went on, or had to be ended.
        named_right: Whether the victim was named: alone, or for a stall within a call as one of two; None when nobody
            was to be named, or was.
        named_exactly: Whether it was named alone.
        texts_that_differ: Finished requests whose tokens differ from the undisturbed run's.
    """

    happened: bool
    promises: dict[str, str]
    noticed_s: float | None
    recovered_s: float | None
    ended_s: float | None
    named_right: bool | None
    named_exactly: bool | None
    texts_that_differ: int

    @property
    def is_kept(self) -> bool:
        """Whether the fault happened and every promise was kept."""
        return self.happened and all(word == "kept" for word in self.promises.values())


class _Case:
    """A cell with all that its judges look at."""

    def __init__(
        self,
        scenario: Scenario,
        outcome: EngineOutcome,
        truth: Mapping[str, RequestEnd],
        bounds: Bounds,
        rank: int | None,
    ) -> None:
        self.scenario = scenario
        self.outcome = outcome
        self.truth = truth
        self.bounds = bounds
        self.rank = rank
        self.fault_s = outcome.fired[-1].t_s if outcome.fired else None

    @property
    def front(self) -> FrontOutcome | None:
        return self.outcome.front

    @property
    def recovered(self) -> bool:
        return self.front is not None and any(seen.epoch > 0 for seen in self.front.epochs)

    @property
    def noticed_s(self) -> float | None:
        """Seconds until the runtime saw the fault: by its own report, else when the engine ended or began anew."""
        if self.fault_s is None or self.scenario.row == "K16":
            return None
        front = self.front
        if front is None:
            times = [] if self.outcome.gone_s is None else [self.outcome.gone_s]
        else:
            known = [*front.seen_s, *([] if front.failed_s is None else [front.failed_s])]
            times = known or [seen.ready_s for seen in front.epochs if seen.epoch > 0]
        after = [time_s - self.fault_s for time_s in times if time_s >= self.fault_s - _CLOCK_S]
        return max(0.0, min(after)) if after else None

    @property
    def recovered_s(self) -> float | None:
        """Seconds until the first token that the last life of the ranks gave."""
        if self.fault_s is None or self.front is None or not self.recovered:
            return None
        ready_s = max(seen.ready_s for seen in self.front.epochs)
        times = [time_s for end in self.front.requests for time_s in end.times_s if time_s >= ready_s]
        return min(times) - self.fault_s if times else None

    @property
    def ended_s(self) -> float | None:
        """Seconds from when the fault was noticed until nothing of the run was there; None where the run went on."""
        front, gone_s = self.front, self.outcome.gone_s
        if self.fault_s is None or gone_s is None or (front is not None and not front.failure):
            return None
        # A front side that says nothing was killed, or sent a signal: nobody else tells when that was noticed.
        noticed_s = self.noticed_s if front is not None else None
        return gone_s - self.fault_s - (noticed_s or 0.0)

    @property
    def stall_s(self) -> float:
        """How long a rank may give no sign of life: longer, the more tokens the step has that it is in."""
        limit_s = self.bounds.group_timeout_s if self.bounds.stall_s is None else self.bounds.stall_s
        tokens = max(self.front.tokens[-1:], default=0) if self.front is not None else 0
        return limit_s * stretch_of(tokens)

    @property
    def members(self) -> frozenset[int]:
        """The ranks of the group at whose call the fault happened."""
        found = _MEMBERS.search(self.outcome.fired[-1].where) if self.outcome.fired else None
        return frozenset(map(int, found[1].split(","))) if found is not None else frozenset()

    @property
    def named_right(self) -> bool | None:
        front = self.front
        if self.rank is None or front is None:
            return None
        allowed = self.members if self.scenario.row in _OF_A_GROUP else frozenset({self.rank})
        if not front.blamed:
            said = front.failure.partition(":")[0]
            return any(names_rank(said, rank) for rank in allowed) if front.failure else None
        named = front.blamed[-1]
        if self.scenario.row in _OF_A_GROUP:
            return bool(named) and allowed.issuperset(named)
        if self.scenario.is_stall and not self.scenario.is_from_outside:
            # Within a call nothing tells a rank that waits from one that does nothing: the pair is named.
            return self.rank in named and len(named) <= _PAIR
        return named == [self.rank]

    @property
    def named_exactly(self) -> bool | None:
        """Whether nobody else was named with it."""
        is_alone = self.front is None or not self.front.blamed or len(self.front.blamed[-1]) == 1
        return is_alone if self.named_right else self.named_right


_PAIR: Final = 2
_MEMBERS: Final = re.compile(r"@(\d+(?:,\d+)*)")
_CLOCK_S: Final = 0.01
_POLL_S: Final = 0.3
"""How long the front side may take to hear of what the ranks' keeper saw."""


def judge(
    scenario: Scenario,
    outcome: EngineOutcome,
    truth: Mapping[str, RequestEnd],
    bounds: Bounds,
    *,
    rank: int | None,
) -> Judgement:
    """Returns what a cell kept and broke.

    Args:
        scenario: What was injected.
        outcome: What was seen.
        truth: The requests of an undisturbed run with the same numerics, by name.
        bounds: Seconds that are allowed.
        rank: The victim's rank; None when it is no rank.
    """
    case = _Case(scenario, outcome, truth, bounds, rank)
    happened = scenario.action == "none" or bool(outcome.fired)
    promised = _promised(case) if happened else ()
    return Judgement(
        happened=happened,
        promises={promise: _JUDGES[promise](case) or "kept" for promise in promised},
        noticed_s=case.noticed_s,
        recovered_s=case.recovered_s,
        ended_s=case.ended_s,
        named_right=case.named_right if "A" in promised else None,
        named_exactly=case.named_exactly if "A" in promised else None,
        texts_that_differ=len(_that_differ(case)),
    )


def _promised(case: _Case) -> tuple[Promise, ...]:
    """Returns the promises of a cell, in order."""
    scenario = case.scenario
    letters = _OF_ROW[scenario.row]
    must_recover = scenario.mode == "refork" or case.recovered
    if scenario.victim in _HOSTS_WITHOUT_RECOVERY or scenario.moment == "init":
        must_recover = case.recovered
    if not must_recover and not _does_no_harm(scenario):
        letters = "".join(letter for letter in letters if letter not in _NEEDS_RECOVERY)
    if case.rank is None or scenario.victim == "front":
        letters = letters.replace("A", "")
    if scenario.moment in ("idle", "init"):
        letters = letters.replace("B", "")
    return tuple(promise for promise in PROMISES if promise in letters)


def _does_no_harm(scenario: Scenario) -> bool:
    """Returns whether a run is to go on as if there had been no fault."""
    return scenario.action in ("slow", "none", "load", "store_slow")


def _wrong_tokens(case: _Case) -> str:
    if case.front is None:
        return ""
    first_s = min((seen.ready_s for seen in case.front.epochs if seen.epoch > 0), default=None)
    for end in case.front.requests:
        wanted = case.truth[end.name].token_ids
        ids = end.token_ids
        if first_s is not None and case.scenario.numerics == "default":
            # Behind a recovery the sums of floats may be taken in another order.
            ids = ids[: sum(time_s < first_s for time_s in end.times_s)]
        if ids != wanted[: len(ids)]:
            at = next(at for at, token in enumerate(ids) if at >= len(wanted) or token != wanted[at])
            return f"{end.name}: token {at} is {ids[at]}, not {wanted[at] if at < len(wanted) else 'the end'}"
        if end.is_done and first_s is None and len(ids) < len(wanted):
            return f"{end.name}: ended after {len(ids)} of {len(wanted)} tokens"
    return ""


def _noticed_late(case: _Case) -> str:
    scenario, bounds, load = case.scenario, case.bounds, case.outcome.load
    if case.outcome.exit_code is None:
        return "the run did not end"
    noticed_s = case.noticed_s
    if noticed_s is None:
        # What did no harm need not be noticed: S and R tell whether it did.
        return "" if not case.front or not case.front.failure else "noticed before the fault"
    is_stall = scenario.row in ("K3", "K5", "K6", "K10", "K12") or scenario.is_stall
    limit_s = bounds.noticed_s
    if is_stall:
        limit_s += case.stall_s
    limit_s = limit_s * load + _POLL_S
    return "" if noticed_s <= limit_s else f"noticed after {noticed_s:.2f} s, allowed {limit_s:.2f} s"


def _named_wrong(case: _Case) -> str:
    if case.named_right:
        return ""
    front = case.front
    if front is None:
        return "nobody was named"
    if case.scenario.row in _OF_A_GROUP and case.named_right is None:
        # It did no harm: R tells whether that is so.
        return ""
    named = ", ".join(str(rank) for report in front.blamed[-1:] for rank in report) or front.failure or "nobody"
    return f"rank {case.rank} failed; named: {named}"


def _lost_requests(case: _Case) -> str:
    if case.front is None:
        return "the front side said nothing"
    if case.front.failure:
        return f"the engine ended: {case.front.failure}"
    for end in case.front.requests:
        if not end.is_done:
            return f"{end.name}: {end.error or 'did not finish'}"
    differ = _that_differ(case)
    if differ and case.scenario.numerics == "invariant":
        return f"{differ[0]}: its tokens differ from the undisturbed run's"
    return "" if case.front.answers_after else "no request was answered afterwards"


def _recovered_late(case: _Case) -> str:
    recovered_s = case.recovered_s
    if recovered_s is None:
        return "no token came after the fault"
    limit_s = case.bounds.recovered_s
    if case.scenario.is_stall:
        limit_s += case.stall_s
    limit_s *= case.outcome.load
    return "" if recovered_s <= limit_s else f"first token after {recovered_s:.2f} s, allowed {limit_s:.2f} s"


def _left_over(case: _Case) -> str:
    left, front = case.outcome.left, case.front
    files = left.files if case.scenario.victim != "front" or case.scenario.action != "kill" else []
    found = [*left.processes, *files, *left.shared_memory]
    if found:
        return f"left: {', '.join(found)}"
    limit_s = case.bounds.closed_s * case.outcome.load
    if front is not None and front.closed_in_s > limit_s:
        return f"closing took {front.closed_in_s:.2f} s, allowed {limit_s:.2f} s"
    ended_s = case.ended_s
    if ended_s is not None and ended_s > limit_s:
        return f"the end took {ended_s:.2f} s, allowed {limit_s:.2f} s"
    return ""


def _disturbed(case: _Case) -> str:
    if case.scenario.action in ("sigterm", "sigint"):
        wanted = {"sigterm": 143, "sigint": 130}[case.scenario.action]
        code = case.outcome.exit_code
        return "" if code == wanted else f"exit code {code}, not {wanted}"
    if case.recovered or (case.front is not None and case.front.blamed):
        return "an alarm without a fault"
    return _lost_requests(case)


def _that_differ(case: _Case) -> list[str]:
    ends = case.front.requests if case.front is not None else []
    return [end.name for end in ends if end.is_done and end.token_ids != case.truth[end.name].token_ids]


_JUDGES: Final[Mapping[Promise, Callable[[_Case], str]]] = {
    "S": _wrong_tokens,
    "D": _noticed_late,
    "A": _named_wrong,
    "R": _lost_requests,
    "B": _recovered_late,
    "L": _left_over,
    "Q": _disturbed,
}
