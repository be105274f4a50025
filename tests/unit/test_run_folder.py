"""The folder of a run: whose it is, which rank's last words name the cause, and that nothing is left."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.node.run_folder import RankReport, RunFolder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunFolder]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = RunFolder.create()
    yield made
    made.remove()


def report(rank: int, *, consequence: bool = False, message: str = "broken", stage: int = 1) -> RankReport:
    return RankReport(
        rank=rank,
        stage=stage,
        tp_rank=0,
        phase="run",
        kind="LinkError",
        message=message,
        is_consequence=consequence,
        exit_code=4,
    )


def test_only_its_owner_may_look_in(folder: RunFolder) -> None:
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert folder.endpoint == f"ipc://{folder.path}/client"
    assert folder.log_folder.parent == folder.path
    assert not folder.log_folder.exists()


def test_two_runs_have_two_folders(folder: RunFolder) -> None:
    other = RunFolder.create()
    assert other.path != folder.path
    other.remove()
    assert folder.path.exists()


def test_without_a_report_there_is_no_cause(folder: RunFolder) -> None:
    assert folder.cause() is None


def test_a_failure_of_its_own_comes_before_one_that_lost_contact(folder: RunFolder) -> None:
    for one in (report(0, consequence=True), report(2), report(1, consequence=True), report(3)):
        folder.write_report(one)
    assert folder.cause() == report(2)


def test_of_equal_failures_the_lowest_rank_is_named(folder: RunFolder) -> None:
    for rank in (10, 9, 2, 11):
        folder.write_report(report(rank, consequence=True))
    assert folder.cause() == report(2, consequence=True), "by number, not by the name of the file"


def test_the_first_report_of_a_rank_stays(folder: RunFolder) -> None:
    folder.write_report(report(1, message="first"))
    folder.write_report(report(1, message="second"))
    assert folder.cause() == report(1, message="first")


def test_who_is_judged_to_be_the_cause_is_the_cause(folder: RunFolder) -> None:
    """Where all only lost contact, the client reads the rank that the fault report names."""
    for rank in range(3):
        folder.write_report(report(rank, consequence=True))
    folder.write_report(report(1, message="judged"), replaces=True)
    assert folder.cause() == report(1, message="judged")


def test_a_report_keeps_any_text(folder: RunFolder) -> None:
    folder.write_report(report(0, message='"quoted" \\ 在线 \n 😀'))
    cause = folder.cause()
    assert cause is not None
    assert cause.message == '"quoted" \\ 在线 \n 😀'


def test_a_report_that_is_being_written_is_not_read(folder: RunFolder) -> None:
    (folder.path / "reports" / "0.part").write_bytes(b'{"rank": 0')
    assert folder.cause() is None
    folder.write_report(report(1))
    assert folder.cause() == report(1)


def test_sentences_name_rank_and_place() -> None:
    assert report(3).sentence() == "rank 3 (stage 1, tensor-parallel rank 0) failed at run: broken"
    assert report(3, stage=-1).sentence() == "rank 3 failed at run: broken"


def test_nothing_is_left(folder: RunFolder) -> None:
    folder.write_report(report(0))
    folder.log_folder.mkdir()
    (folder.log_folder / "log").write_text("x")
    folder.remove()
    assert not folder.path.exists()
    folder.remove()


def test_last_words_after_the_folder_is_gone_are_no_error(folder: RunFolder) -> None:
    folder.remove()
    folder.write_report(report(0))
    assert not folder.path.exists()
