"""Progress records: what is written is read, by another process too, whatever state the writer is in."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from launch.node.progress_record import DigestKind, Phase, Progress, ProgressRecord

OPERATIONS = [f"operation {number}" for number in range(7)]


@pytest.fixture
def record() -> Iterator[ProgressRecord]:
    made = ProgressRecord.create()
    yield made
    made.close()


def test_a_new_record_says_that_the_rank_starts(record: ProgressRecord) -> None:
    before_ns = time.monotonic_ns()
    record.reset(3)
    progress = record.read()
    assert before_ns <= progress.t_ns <= time.monotonic_ns()
    assert progress == Progress(3, Phase.START, 0, 0, "", "", is_inside=False, tokens=0, t_ns=progress.t_ns)
    assert record.digests(DigestKind.STATE) == record.digests(DigestKind.MASKS) == {}


def test_an_operation_is_seen_with_its_name_and_group(record: ProgressRecord) -> None:
    reduce, gather = record.register("all_reduce", "tp0"), record.register("all_gather", "tp0")
    assert record.register("all_reduce", "tp0") == reduce != gather
    record.begin_step(5, -7, is_idle=False)
    record.enter(reduce, 41)
    inside = record.read()
    assert (inside.operation, inside.group, inside.op_sequence) == ("all_reduce", "tp0", 41)
    assert (inside.is_inside, inside.phase, inside.step) == (True, Phase.COLLECTIVE, 5)
    record.leave()
    outside = record.read()
    assert (outside.operation, outside.is_inside, outside.phase) == ("all_reduce", False, Phase.COMPUTE)
    record.enter(gather, 42)
    assert record.read().operation == "all_gather"


def test_phases(record: ProgressRecord) -> None:
    code = record.register("broadcast", "tp0")
    record.enter(code, 1)
    assert record.read().phase is Phase.START
    record.leave()
    record.enter_phase(Phase.LOAD)
    assert record.read().phase is Phase.LOAD
    record.begin_step(1, 0, is_idle=True)
    record.enter(code, 2)
    assert (record.read().phase, record.read().is_inside) == (Phase.IDLE, True)
    record.leave()
    record.begin_work()
    assert (record.read().phase, record.read().step) == (Phase.COMPUTE, 1)
    record.begin_step(2, 0, is_idle=False)
    record.begin_work()
    assert (record.read().phase, record.read().step) == (Phase.COMPUTE, 2)
    record.enter_phase(Phase.LEAVING)
    assert (record.read().phase, record.read().step) == (Phase.LEAVING, 2)


def test_a_beat_changes_the_time_alone(record: ProgressRecord) -> None:
    record.begin_step(9, 1, is_idle=False)
    before = record.read()
    time.sleep(0.002)
    record.beat()
    after = record.read()
    assert after.t_ns - before.t_ns >= 2_000_000
    assert before == Progress(**{**vars(after), "t_ns": before.t_ns})
    assert after.age_s(after.t_ns + 500_000_000) == 0.5
    assert 0 <= after.age_s() < 60


def test_digests_of_the_last_steps_are_kept(record: ProgressRecord) -> None:
    for step in range(1, 100):
        record.begin_step(step, (-1) ** step * (2**62 + step), is_idle=False)
        if step % 3 == 0:
            record.note_masks(step, step * step)
    assert record.digests(DigestKind.STATE) == {step: (-1) ** step * (2**62 + step) for step in range(68, 100)}
    masks = record.digests(DigestKind.MASKS)
    assert list(masks) == sorted(masks)
    assert all(step % 3 == 0 and digest == step * step for step, digest in masks.items())


def test_more_names_than_there_is_room_for_are_unnamed_and_do_no_harm(record: ProgressRecord) -> None:
    codes = [record.register(f"operation {number} of many", "tp0") for number in range(1000)]
    record.begin_step(4, 11, is_idle=False)
    record.enter(codes[0], 1)
    assert record.read().operation == "operation 0 of many"
    record.enter(codes[-1], 2)
    assert (record.read().operation, record.read().op_sequence, record.read().step) == ("", 2, 4)
    assert record.digests(DigestKind.STATE) == {4: 11}


def test_a_record_is_used_again_by_the_next_epoch(record: ProgressRecord) -> None:
    record.register("all_reduce", "tp0")
    record.enter(record.register("all_gather", "tp0"), 8)
    record.begin_step(6, 5, is_idle=False)
    record.reset(1)
    assert record.read() == Progress(1, Phase.START, 0, 0, "", "", is_inside=False, tokens=0, t_ns=record.read().t_ns)
    assert record.digests(DigestKind.STATE) == {}
    record.enter(record.register("broadcast", "tp1"), 1)
    assert (record.read().operation, record.read().group) == ("broadcast", "tp1")


@contextmanager
def writing(record: ProgressRecord) -> Iterator[int]:
    """Yields the process that writes states in which every part tells what the others are."""
    pid = os.fork()
    if pid == 0:
        try:
            codes = [record.register(name, f"group {number}") for number, name in enumerate(OPERATIONS)]
            for turn in itertools.count(1):
                record.begin_step(turn, -turn * turn, is_idle=False)
                record.note_masks(turn, turn * turn)
                for number, code in enumerate(codes):
                    record.enter(code, len(codes) * turn + number)
                    record.leave()
        finally:
            os._exit(1)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def impossible(record: ProgressRecord, progress: Progress, began_ns: int, oldest: Progress | None) -> list[str]:
    """Returns what of a state that was read cannot be."""
    wrong = []
    if not began_ns <= progress.t_ns <= time.monotonic_ns():
        wrong.append("its time")
    if progress.operation:
        number = progress.op_sequence % len(OPERATIONS)
        turn = progress.op_sequence // len(OPERATIONS)
        if (progress.operation, progress.group) != (OPERATIONS[number], f"group {number}"):
            wrong.append("its operation")
        # After the last operation of a step the next one begins.
        is_last = number == len(OPERATIONS) - 1 and not progress.is_inside
        if progress.step not in ((turn, turn + 1) if is_last else (turn,)):
            wrong.append("its step")
    if oldest is not None and (progress.t_ns, progress.step) < (oldest.t_ns, oldest.step):
        wrong.append("its order")
    if any(digest != -step * step for step, digest in record.digests(DigestKind.STATE).items()):
        wrong.append("its digests of states")
    if any(digest != step * step for step, digest in record.digests(DigestKind.MASKS).items()):
        wrong.append("its digests of masks")
    return wrong


def test_no_state_is_torn_while_another_process_writes(record: ProgressRecord) -> None:
    began_ns = time.monotonic_ns()
    record.reset(0)
    newest: Progress | None = None
    seen: set[tuple[int, int]] = set()
    with writing(record):
        while time.monotonic_ns() - began_ns < 1.5e9 or len(seen) < 100:
            oldest, newest = newest, record.read()
            assert impossible(record, newest, began_ns, oldest) == [], newest
            seen.add((newest.step, newest.op_sequence))


def test_a_writer_that_is_stopped_or_killed_anywhere_leaves_a_whole_state(record: ProgressRecord) -> None:
    began_ns = time.monotonic_ns()
    record.reset(0)
    draw = random.Random(1)
    newest = None
    for _ in range(8):
        record.reset(0)
        began_ns, newest = time.monotonic_ns() - 1_000_000, None
        with writing(record) as pid:
            while record.read().step < 2:
                pass
            for _ in range(20):
                time.sleep(draw.uniform(0, 0.002))
                os.kill(pid, signal.SIGSTOP)
                os.waitpid(pid, os.WUNTRACED)
                oldest, newest = newest, record.read()
                assert impossible(record, newest, began_ns, oldest) == [], newest
                assert record.read() == newest
                os.kill(pid, signal.SIGCONT)
        last = record.read()
        assert impossible(record, last, began_ns, newest) == [], last
