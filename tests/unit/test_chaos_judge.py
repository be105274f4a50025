"""The judge of the engine's cells: what keeps each promise, and every way to break it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from launch.chaos.engine.judge import Bounds, Judgement, judge
from launch.chaos.engine.outcome import EngineOutcome, EpochSeen, FrontOutcome, RequestEnd
from launch.chaos.engine.scenario import Scenario
from launch.chaos.processes import Leftovers
from launch.chaos.record import Fired

FAULT_S = 100.0
BOUNDS = Bounds(stall_s=3.0, group_timeout_s=10.0)
DONE = RequestEnd(
    name="plain",
    token_ids=[5, 6, 7, 8],
    times_s=[99.0, 99.5, 100.6, 100.7],
    text="abcd",
    finish_reason="length",
    error="",
)
TRUTH = {"plain": DONE}
FRONT = FrontOutcome(
    epochs=[EpochSeen(epoch=0, ready_s=90.0), EpochSeen(epoch=1, ready_s=100.5)],
    requests=[DONE],
    failure="",
    failed_s=None,
    blamed=[[1]],
    seen_s=[100.05],
    tokens=[6],
    answers_after=True,
    closed_in_s=0.5,
)
OUTCOME = EngineOutcome(
    front=FRONT,
    fired=[Fired(action="kill", rank=1, where="inside all_reduce@0,1 #3", t_s=FAULT_S)],
    exit_code=0,
    gone_s=104.0,
    left=Leftovers(processes=[], files=[], shared_memory=[]),
    load=1.0,
    wall_s=10.0,
    said="",
)
KILL = Scenario(
    action="kill",
    operation="all_reduce",
    victim="first",
    place="inside",
    moment="decode",
    mode="refork",
    numerics="invariant",
)
CUT_OFF = msgspec.structs.replace(
    DONE, token_ids=[5, 6], times_s=[99.0, 99.5], finish_reason=None, error="RanksFailedError: gone"
)
ENDED = msgspec.structs.replace(
    FRONT,
    epochs=FRONT.epochs[:1],
    requests=[CUT_OFF],
    failure="rank 1 (stage 0, tensor-parallel rank 1) failed in step 7: killed by SIGKILL",
    failed_s=100.2,
    answers_after=False,
)
END = msgspec.structs.replace(KILL, mode="end")


def judged(
    *,
    scenario: Scenario = KILL,
    front: FrontOutcome | None = FRONT,
    rank: int | None = 1,
    **outcome: Any,
) -> Judgement:
    changed = msgspec.structs.replace(OUTCOME, front=front, **outcome)
    return judge(scenario, changed, TRUTH, BOUNDS, rank=rank)


def with_request(front: FrontOutcome = FRONT, **changes: Any) -> FrontOutcome:
    return msgspec.structs.replace(front, requests=[msgspec.structs.replace(front.requests[0], **changes)])


def broken(judgement: Judgement) -> dict[str, str]:
    assert judgement.happened
    return {promise: word for promise, word in judgement.promises.items() if word != "kept"}


def test_a_recovery_that_keeps_everything() -> None:
    judgement = judged()
    assert judgement.promises == dict.fromkeys("SDARBL", "kept")
    assert judgement.is_kept
    assert judgement.noticed_s == pytest.approx(0.05)
    assert judgement.recovered_s == pytest.approx(0.6)
    assert judgement.named_right is True
    assert judgement.texts_that_differ == 0


def test_a_run_that_ends_as_it_should() -> None:
    judgement = judged(scenario=END, front=ENDED)
    assert judgement.promises == dict.fromkeys("SDAL", "kept")
    assert judgement.recovered_s is None


def test_a_fault_that_did_not_happen_is_no_success() -> None:
    judgement = judged(fired=[])
    assert not judgement.happened
    assert judgement.promises == {}
    assert not judgement.is_kept


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"token_ids": [5, 6, 9, 8]}, "plain: token 2 is 9, not 7"),
        ({"token_ids": [5, 5, 6, 7]}, "plain: token 1 is 5, not 6"),
        ({"token_ids": [5, 6, 7, 8, 8]}, "plain: token 4 is 8, not the end"),
    ],
)
def test_a_wrong_token(changes: dict[str, Any], word: str) -> None:
    assert broken(judged(front=with_request(**changes)))["S"] == word


def test_a_lost_token() -> None:
    assert broken(judged(front=with_request(token_ids=[5, 6, 7]))) == {
        "R": "plain: its tokens differ from the undisturbed run's"
    }
    quiet = msgspec.structs.replace(with_request(token_ids=[5, 6, 7]), epochs=FRONT.epochs[:1], blamed=[], seen_s=[])
    slow = msgspec.structs.replace(KILL, action="slow")
    assert broken(judged(scenario=slow, front=quiet))["S"] == "plain: ended after 3 of 4 tokens"


def test_in_the_default_mode_only_what_came_before_the_recovery_must_be_equal() -> None:
    default = msgspec.structs.replace(KILL, numerics="default")
    judgement = judged(scenario=default, front=with_request(token_ids=[5, 6, 9, 9]))
    assert judgement.is_kept
    assert judgement.texts_that_differ == 1
    assert broken(judged(scenario=default, front=with_request(token_ids=[5, 9, 7, 8])))["S"].startswith(
        "plain: token 1"
    )


def test_noticed_late() -> None:
    late = msgspec.structs.replace(FRONT, seen_s=[100.6])
    assert broken(judged(front=late)) == {"D": "noticed after 0.60 s, allowed 0.50 s"}
    assert judged(front=late, load=2.0).is_kept


def test_a_stall_has_its_limit_more() -> None:
    stop = msgspec.structs.replace(KILL, action="stop")
    front = msgspec.structs.replace(
        with_request(times_s=[99.0, 99.5, 103.6, 103.7]),
        seen_s=[103.2],
        epochs=[FRONT.epochs[0], EpochSeen(epoch=1, ready_s=103.5)],
    )
    assert judged(scenario=stop, front=front).is_kept
    later = msgspec.structs.replace(front, seen_s=[103.6])
    assert broken(judged(scenario=stop, front=later))["D"] == "noticed after 3.60 s, allowed 3.50 s"


def test_a_large_step_may_be_silent_for_longer() -> None:
    """As its limit is: longer in proportion to its tokens."""
    stop = msgspec.structs.replace(KILL, action="stop")
    late = {"seen_s": [109.1], "epochs": [FRONT.epochs[0], EpochSeen(epoch=1, ready_s=109.3)]}
    front = msgspec.structs.replace(with_request(times_s=[99.0, 99.5, 109.6, 109.7]), **late)
    assert set(broken(judged(scenario=stop, front=front))) == {"D", "B"}
    assert judged(scenario=stop, front=msgspec.structs.replace(front, tokens=[192])).is_kept
    assert set(broken(judged(front=msgspec.structs.replace(front, tokens=[192])))) == {"D", "B"}, "death has no limit"


@pytest.mark.parametrize("action", ["skip", "wrong_size", "corrupt", "cut"])
@pytest.mark.parametrize(
    ("blamed", "named_right"), [([[1]], True), ([[0]], True), ([[0, 1]], True), ([[2]], False), ([[0, 2]], False)]
)
def test_on_the_wire_somebody_who_made_the_call_is_named(
    action: Any, blamed: list[list[int]], named_right: bool
) -> None:
    scenario = msgspec.structs.replace(KILL, action=action, operation="tokens")
    fired = [Fired(action=action, rank=1, where="inside broadcast@0,1 #3", t_s=FAULT_S)]
    judgement = judged(scenario=scenario, front=msgspec.structs.replace(FRONT, blamed=blamed), fired=fired)
    assert judgement.named_right is named_right
    assert ("A" in broken(judgement)) is not named_right
    harmless = judged(scenario=scenario, front=CALM, fired=fired)
    assert (harmless.named_right, harmless.is_kept) == (None, True)


def test_never_ended() -> None:
    words = broken(judged(scenario=END, front=None, exit_code=None, gone_s=None))
    assert words["D"] == "the run did not end"
    assert words["A"] == "nobody was named"


@pytest.mark.parametrize(("blamed", "named"), [([[0]], "0"), ([[1, 2]], "1, 2"), ([[1], [2]], "2"), ([[]], "nobody")])
def test_the_wrong_rank_named(blamed: list[list[int]], named: str) -> None:
    judgement = judged(front=msgspec.structs.replace(FRONT, blamed=blamed, seen_s=[100.05] * len(blamed)))
    assert judgement.named_right is False
    assert judgement.named_exactly is False
    assert broken(judgement) == {"A": f"rank 1 failed; named: {named}"}


def test_of_two_that_are_within_a_call_both_may_be_named() -> None:
    stop = msgspec.structs.replace(KILL, action="stop")
    pair = msgspec.structs.replace(FRONT, blamed=[[0, 1]])
    judgement = judged(scenario=stop, front=pair)
    assert (judgement.named_right, judgement.named_exactly) == (True, False)
    outside = msgspec.structs.replace(stop, operation="none")
    assert broken(judged(scenario=outside, front=pair)) == {"A": "rank 1 failed; named: 0, 1"}
    everyone = msgspec.structs.replace(FRONT, blamed=[[0, 1, 2]])
    assert "A" in broken(judged(scenario=stop, front=everyone))
    assert judged(scenario=stop).named_exactly is True


def test_without_a_report_the_failure_names() -> None:
    assert judged(scenario=END, front=msgspec.structs.replace(ENDED, blamed=[], seen_s=[])).named_right is True
    other = msgspec.structs.replace(ENDED, blamed=[], seen_s=[], failure="rank 0 failed at run: rank 1 is gone")
    assert judged(scenario=END, front=other).named_right is False


def test_a_request_that_was_lost() -> None:
    lost = with_request(finish_reason=None, error="RequestFailedError: no")
    assert broken(judged(front=lost))["R"] == "plain: RequestFailedError: no"
    assert broken(judged(front=ENDED))["R"].startswith("the engine ended: rank 1")
    deaf = msgspec.structs.replace(FRONT, answers_after=False)
    assert broken(judged(front=deaf)) == {"R": "no request was answered afterwards"}


def test_recovered_late_or_never() -> None:
    late = with_request(times_s=[99.0, 99.5, 101.2, 101.3])
    assert broken(judged(front=late)) == {"B": "first token after 1.20 s, allowed 1.00 s"}
    assert judged(front=late, load=1.5).is_kept
    assert broken(judged(front=with_request(times_s=[99.0] * 4)))["B"] == "no token came after the fault"


def test_an_engine_that_recovered_is_held_to_it() -> None:
    """Whether it said that it would or not."""
    assert set(judged(scenario=END).promises) == set("SDARBL")
    assert set(judged(scenario=END, front=ENDED).promises) == set("SDAL")


@pytest.mark.parametrize(
    ("left", "word"),
    [
        (Leftovers(processes=["lockstep r1"], files=[], shared_memory=[]), "left: lockstep r1"),
        (Leftovers(processes=[], files=["lockstep-x/client"], shared_memory=[]), "left: lockstep-x/client"),
        (Leftovers(processes=[], files=[], shared_memory=["lockstep-1"]), "left: lockstep-1"),
    ],
)
def test_leftovers(left: Leftovers, word: str) -> None:
    assert left.any
    assert broken(judged(left=left)) == {"L": word}


def test_a_slow_end() -> None:
    slow = msgspec.structs.replace(FRONT, closed_in_s=7.0)
    assert broken(judged(front=slow)) == {"L": "closing took 7.00 s, allowed 5.00 s"}


def test_a_run_that_a_fault_ended_is_gone_in_time() -> None:
    late = FAULT_S + 0.05 + 5.1
    assert judged(scenario=END, front=ENDED).ended_s == pytest.approx(3.95), "counted from when it was noticed"
    slow = judged(scenario=END, front=ENDED, gone_s=late)
    assert broken(slow) == {"L": "the end took 5.10 s, allowed 5.00 s"}
    assert broken(judged(scenario=END, front=ENDED, gone_s=late, load=1.1)) == {}
    assert judged(gone_s=late).ended_s is None, "it recovered, and was asked once more"
    signal = msgspec.structs.replace(END, action="sigterm", operation="none", victim="nobody")
    asked = judged(scenario=signal, front=None, rank=None, exit_code=143, gone_s=late)
    assert broken(asked) == {"L": "the end took 5.15 s, allowed 5.00 s"}


def test_a_front_side_that_was_killed_may_leave_its_folder() -> None:
    scenario = msgspec.structs.replace(END, victim="front", operation="none")
    left = Leftovers(processes=[], files=["lockstep-x"], shared_memory=[])
    judgement = judged(scenario=scenario, front=None, exit_code=-9, gone_s=100.1, rank=None, left=left)
    assert judgement.promises == {"S": "kept", "D": "kept", "L": "kept"}
    processes = Leftovers(processes=["lockstep r0"], files=[], shared_memory=[])
    judgement = judged(scenario=scenario, front=None, exit_code=-9, gone_s=100.1, rank=None, left=processes)
    assert "L" in broken(judgement)


NOTHING = msgspec.structs.replace(KILL, action="none", operation="none", victim="nobody")
CALM = msgspec.structs.replace(FRONT, epochs=FRONT.epochs[:1], blamed=[], seen_s=[])


def test_without_a_fault_nothing_happens() -> None:
    judgement = judged(scenario=NOTHING, front=CALM, fired=[], rank=None)
    assert judgement.promises == {"S": "kept", "L": "kept", "Q": "kept"}
    assert broken(judged(scenario=NOTHING, fired=[], rank=None))["Q"] == "an alarm without a fault"
    blamed = msgspec.structs.replace(CALM, blamed=[[2]], seen_s=[100.0])
    assert broken(judged(scenario=NOTHING, front=blamed, fired=[], rank=None))["Q"] == "an alarm without a fault"
    lost = with_request(CALM, finish_reason=None, error="X: y")
    assert broken(judged(scenario=NOTHING, front=lost, fired=[], rank=None))["Q"] == "plain: X: y"


@pytest.mark.parametrize(("action", "code"), [("sigterm", 143), ("sigint", 130)])
def test_a_clean_end(action: str, code: int) -> None:
    scenario = msgspec.structs.replace(NOTHING, action=action, victim="front")
    assert judged(scenario=scenario, front=None, exit_code=code, rank=None).is_kept
    assert broken(judged(scenario=scenario, front=None, exit_code=1, rank=None)) == {"Q": f"exit code 1, not {code}"}


def test_a_slow_rank_is_no_fault() -> None:
    slow = msgspec.structs.replace(KILL, action="slow")
    assert judged(scenario=slow, front=CALM).promises == {"S": "kept", "R": "kept", "L": "kept"}


def test_nothing_is_promised_of_numbers_that_all_ranks_share() -> None:
    scenario = msgspec.structs.replace(KILL, action="corrupt")
    assert judged(scenario=scenario, front=with_request(token_ids=[1, 2, 3, 4])).promises == {"L": "kept"}
