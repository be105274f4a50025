"""Which rank has stopped, from what their records and the kernel tell."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from command_line import wait_until
from hypothesis import given
from hypothesis import strategies as st

from launch.node.progress_record import Phase, Progress
from launch.node.stall import SeenRank, describe_stall, process_state, stalled_ranks

STALL_S, START_S = 3.0, 120.0


def seen(
    age_s: float,
    *,
    inside: bool = False,
    phase: Phase = Phase.COMPUTE,
    step: int = 5,
    number: int = 10,
    tokens: int = 1,
    operation: str = "all_reduce",
    group: str = "tp0",
    state: str = "S",
    cpu: float = 0.0,
) -> SeenRank:
    progress = Progress(
        epoch=0,
        phase=Phase.COLLECTIVE if inside else phase,
        step=step,
        tokens=tokens,
        op_sequence=number,
        operation=operation,
        group=group,
        is_inside=inside,
        t_ns=0,
    )
    return SeenRank(progress, age_s, state, cpu)


@pytest.mark.parametrize(
    ("ranks", "stalled"),
    [
        pytest.param([seen(0.1), seen(0.1, inside=True)], [], id="all get on"),
        pytest.param([seen(3.1), seen(3.1, inside=True)], [0], id="one does not come, one waits for it"),
        pytest.param([seen(2.9), seen(9.0, inside=True)], [], id="one works, one waits for it"),
        pytest.param([seen(3.1), seen(3.2), seen(9.0, inside=True)], [0, 1], id="two do not come"),
        pytest.param([seen(9.0, inside=True), seen(9.0, inside=True, state="T")], [1], id="stopped inside"),
        pytest.param([seen(4.0), seen(9.0, inside=True, state="T")], [1], id="stopped inside, one outside"),
        pytest.param([seen(9.0, cpu=0.5), seen(9.0, inside=True)], [], id="at work for long"),
        pytest.param([seen(9.0, state="R"), seen(9.0, inside=True)], [], id="the machine does not let it"),
        pytest.param([seen(9.0, cpu=0.02), seen(9.0, inside=True)], [0], id="only its other threads work"),
        pytest.param([seen(31.0, cpu=0.5), seen(9.0, inside=True)], [0], id="in an endless loop"),
        pytest.param([seen(9.0, inside=True, number=4), seen(9.0, inside=True)], [0], id="one is behind"),
        pytest.param([seen(9.0, inside=True), seen(9.0, inside=True, number=11)], [0], id="one skipped"),
        pytest.param([seen(9.0, inside=True), seen(9.0, inside=True)], [0, 1], id="nobody can tell"),
        pytest.param([seen(9.0, inside=True), seen(0.5, inside=True)], [], id="one has just begun to wait"),
        pytest.param([seen(9.0, tokens=256), seen(9.0, inside=True)], [], id="a long prompt"),
        pytest.param([seen(12.1, tokens=256), seen(9.0, inside=True)], [0], id="a long prompt, too long"),
        pytest.param([seen(60.0, phase=Phase.LOAD), seen(60.0, phase=Phase.LOAD)], [], id="they come up"),
        pytest.param([seen(3.1, phase=Phase.START, state="T"), seen(1.0)], [0], id="stopped while it comes up"),
        pytest.param([seen(121.0, phase=Phase.LOAD), seen(1.0, phase=Phase.LOAD)], [0], id="one does not come up"),
        pytest.param([seen(999.0, phase=Phase.LEAVING), seen(1.0)], [], id="one leaves"),
        pytest.param([], [], id="none"),
    ],
)
def test_who_holds_up_the_others(ranks: list[SeenRank], stalled: list[int]) -> None:
    assert stalled_ranks(dict(enumerate(ranks)), 2, STALL_S, START_S) == stalled


def message(verb: str, stage: int, rank: int) -> SeenRank:
    """Returns a rank that has been inside a message to or from a stage for long."""
    way = "from" if verb == "receive" else "to"
    return seen(9.0, inside=True, operation=f"{verb} mask {way} stage {stage}", group=f"pp{rank % 2}")


def collective(stage: int, number: int = 10) -> SeenRank:
    return seen(9.0, inside=True, group=f"tp{stage}", number=number)


@pytest.mark.parametrize(
    ("ranks", "stalled"),
    [
        pytest.param(
            [message("send", 1, 0), collective(0), message("receive", 0, 2), collective(1)],
            [0, 2],
            id="two at the ends of one message",
        ),
        pytest.param(
            [collective(0), message("receive", 1, 1), message("receive", 0, 2), collective(1)],
            [0, 1, 2, 3],
            id="each waits for the next",
        ),
        pytest.param(
            [message("receive", 1, 0), collective(0), collective(1, 11), collective(1, 10)],
            [3],
            id="a message, then one behind in a collective",
        ),
        pytest.param([collective(0), collective(0), collective(1), collective(1)], [0, 1, 2, 3], id="nobody can tell"),
    ],
)
def test_who_waits_for_whom(ranks: list[SeenRank], stalled: list[int]) -> None:
    assert stalled_ranks(dict(enumerate(ranks)), 2, STALL_S, START_S) == stalled


ANY = st.builds(
    seen,
    st.floats(0, 200),
    inside=st.booleans(),
    phase=st.sampled_from(Phase),
    step=st.integers(0, 3),
    number=st.integers(0, 3),
    tokens=st.integers(0, 4096),
    state=st.sampled_from("RSTD"),
    cpu=st.floats(0, 1),
    operation=st.sampled_from(("all_reduce", "send mask to stage 1", "receive tokens from stage 0")),
    group=st.sampled_from(("tp0", "tp1", "pp0")),
)


@given(st.lists(ANY, max_size=6))
def test_who_is_young_is_never_to_blame_alone(ranks: list[SeenRank]) -> None:
    found = stalled_ranks(dict(enumerate(ranks)), 2, STALL_S, START_S)
    assert found == sorted(set(found))
    assert all(ranks[rank].age_s > STALL_S for rank in found)


def test_it_is_told_what_the_process_does() -> None:
    assert describe_stall(seen(3.14, inside=True, state="T"), [2]) == (
        "no sign of life for 3.1 s: the process is stopped (inside all_reduce on tp0)"
    )
    assert describe_stall(seen(3.14), [2]) == "no sign of life for 3.1 s (after all_reduce on tp0)"
    assert describe_stall(seen(3.14, inside=True), [1, 2]) == (
        "no sign of life for 3.1 s: it and ranks [1, 2] wait for one another (inside all_reduce on tp0)"
    )


def test_the_kernel_tells_whether_a_process_runs_is_stopped_or_gone() -> None:
    command: list[Any] = [sys.executable, "-c", "print(1, flush=True)\nwhile True: pass"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        _, before = process_state(process.pid)
        wait_until(lambda: process_state(process.pid)[1] > before, 10, "the process to use the CPU")
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: process_state(process.pid)[0] == "T", 10, "the process to stop")
        process.kill()
    assert process_state(process.pid) == ("", 0.0)
