"""The journal's file and book: what was written is there again, whatever was cut, full or left behind."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.serve.journal import Answered, Asked, Dropped, Journal
from launch.serve.journal_file import JournalError, JournalFile

NOW_S = 1000.0


def book(folder: Path, *, keep_s: float = 1e6, limit_bytes: int = 1 << 30, now_s: float = NOW_S) -> Journal:
    return Journal(folder, keep_s=keep_s, limit_bytes=limit_bytes, clock=lambda: now_s)


def asked(number: int, size: int = 3) -> Asked:
    return Asked(b"%d" % number, "/v1/completions", b"x" * size, b"digest %d" % number)


def answered(number: int, size: int = 3, at: float = NOW_S) -> Answered:
    return Answered(b"%d" % number, 200, b"y" * size, at)


def test_what_was_asked_and_answered_is_there_again(tmp_path: Path) -> None:
    journal = book(tmp_path / "a" / "b")
    for record in (asked(1), asked(2), answered(1), asked(3), Dropped(b"3"), answered(7)):
        journal.write(record)
    for _ in range(2):
        assert journal.unfinished() == [asked(2)]
        assert journal.answer_to(b"1") == answered(1)
        assert journal.answer_to(b"2") is None
        assert (journal.digest_of(b"1"), journal.digest_of(b"3")) == (b"digest 1", None)
        journal.close()
        journal = book(tmp_path / "a" / "b")
    journal.write(asked(3))
    assert journal.unfinished() == [asked(2), asked(3)], "what was refused for a moment may come again"
    journal.close()
    assert (tmp_path / "a" / "b" / "journal").stat().st_mode & 0o77 == 0


def written(folder: Path, payloads: Sequence[bytes]) -> bytes:
    file = JournalFile(folder)
    for payload in payloads:
        file.append(payload)
    file.close()
    return (folder / "journal").read_bytes()


def payloads_in(folder: Path) -> list[bytes]:
    file = JournalFile(folder)
    try:
        return [payload for _, payload in file.records()]
    finally:
        file.close()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.binary(max_size=40), min_size=1, max_size=4), st.data())
def test_a_torn_tail_costs_only_what_was_half_written(
    tmp_path_factory: pytest.TempPathFactory, payloads: list[bytes], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    whole = written(folder, payloads[:-1])
    longer = written(folder, payloads[-1:])
    cut = data.draw(st.integers(len(whole), len(longer) - 1))
    # The disk may have made the file longer before it wrote what is in it.
    torn = longer[:cut] + bytes(data.draw(st.sampled_from((0, 1, 30))))
    (folder / "journal").write_bytes(torn)
    is_whole = torn[: len(longer)] == longer
    assert payloads_in(folder) == (payloads if is_whole else payloads[:-1])
    assert (folder / "journal").read_bytes() == (longer if is_whole else whole)
    assert written(folder, [b"next"]).startswith(whole)
    assert payloads_in(folder)[-1] == b"next"


def test_damage_elsewhere_is_said_and_nothing_is_thrown_away(tmp_path: Path) -> None:
    data = bytearray(written(tmp_path, [b"first", b"second", b"third"]))
    data[data.index(b"second")] ^= 1
    (tmp_path / "journal").write_bytes(data)
    with pytest.raises(JournalError, match=r"is damaged at byte \d+, and goes on behind it"):
        JournalFile(tmp_path)
    assert (tmp_path / "journal").read_bytes() == data
    (tmp_path / "journal").write_bytes(b"something else that is longer than it")
    with pytest.raises(JournalError, match="no journal of this version"):
        JournalFile(tmp_path)
    (tmp_path / "journal").write_bytes(b"lockstep jo")
    assert payloads_in(tmp_path) == [], "its first line was half written"


def test_a_folder_is_one_servers_alone(tmp_path: Path) -> None:
    first = JournalFile(tmp_path)
    with pytest.raises(JournalError, match="another server uses it"):
        JournalFile(tmp_path)
    first.rewrite([first.append(b"x")])
    with pytest.raises(JournalError, match="another server uses it"):
        JournalFile(tmp_path)
    first.close()
    JournalFile(tmp_path).close()
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match=r"--journal .*file: a folder is needed"):
        JournalFile(tmp_path / "file")


def full_after(count: int) -> mock.Mock:
    """Returns an ``os.pwrite`` of a disk that has room for ``count`` bytes."""
    right, left = os.pwrite, count

    def write(file: int, data: memoryview, at: int) -> int:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = right(file, data[:left], at)
        left -= done
        return done

    return mock.Mock(side_effect=write)


@pytest.mark.parametrize("room", [0, 1, 30])
def test_a_full_disk_is_told_and_costs_nothing_else(tmp_path: Path, room: int) -> None:
    journal = book(tmp_path)
    journal.write(asked(1))
    with mock.patch("os.pwrite", full_after(room)), pytest.raises(OSError, match="No space left"):
        journal.write(asked(2))
    assert journal.unfinished() == [asked(1)]
    journal.write(answered(1))
    journal.close()
    journal = book(tmp_path)
    assert (journal.cut_bytes, journal.unfinished(), journal.answer_to(b"1")) == (0, [], answered(1))
    journal.close()


def test_old_answers_go_and_the_file_is_rewritten(tmp_path: Path) -> None:
    size = 100_000
    journal = book(tmp_path, limit_bytes=5 * size)
    journal.write(asked(0))
    for number in range(1, 60):
        journal.write(asked(number))
        journal.write(answered(number, size, at=NOW_S + number))
        assert journal.size_bytes <= (1 << 20) + 2 * size
    assert journal.unfinished() == [asked(0)], "what has no answer stays"
    kept = [number for number in range(1, 60) if journal.answer_to(b"%d" % number) is not None]
    assert kept == [56, 57, 58, 59]
    assert all(journal.answer_to(b"%d" % number) == answered(number, size, at=NOW_S + number) for number in kept)
    journal.close()
    later = book(tmp_path, keep_s=10.0, now_s=NOW_S + 68.5)
    assert [number for number in kept if later.answer_to(b"%d" % number) is not None] == [59]
    later.close()


def test_a_file_that_cannot_be_rewritten_stays_as_it_is(tmp_path: Path) -> None:
    journal = book(tmp_path, limit_bytes=1)
    with mock.patch("pathlib.Path.rename", side_effect=OSError(errno.EIO, "broken")):
        for number in range(30):
            journal.write(asked(number))
            journal.write(answered(number, 100_000))
        assert journal.size_bytes > 2_000_000
    journal.write(asked(77))
    assert journal.size_bytes < 1_000_000
    assert journal.unfinished() == [asked(77)]
    journal.close()
    assert [path.name for path in tmp_path.iterdir()] == ["journal"]
