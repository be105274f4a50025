"""Outcomes in a folder: found again by the next run, never by another model, never trusted when damaged."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec
import pytest
from grammars import small_vocabulary

from grammar_sync.engines.prepared import PreparedGrammar
from grammar_sync.spec import GrammarOptions, GrammarSpec
from grammar_sync.vetting.messages import RefusalReason, Refused, Setup, Vetted, VettingLimits
from grammar_sync.vetting.outcome_store import FolderStore

SETUP = Setup(small_vocabulary(), "module:name", "auto", VettingLimits())
VETTED = Vetted(PreparedGrammar("xgrammar", "regex", "a", GrammarOptions()), 10, 0.5, 0.25)


def spec(source: str) -> GrammarSpec:
    return GrammarSpec("regex", source)


def test_another_run_finds_what_was_kept(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "cache"
    store = FolderStore(folder, SETUP)
    assert store.load(spec("a")) is None
    store.save(spec("a"), VETTED)
    store.save(spec("("), Refused("grammar", "not closed"))
    later = FolderStore(folder, Setup(small_vocabulary(), "module:name", "auto", VettingLimits()))
    assert later.load(spec("a")) == VETTED
    assert later.load(spec("(")) == Refused("grammar", "not closed")
    assert later.load(spec("b")) is None
    assert later.load(GrammarSpec("regex", "a", GrammarOptions(strict=False))) is None
    assert len(list(folder.iterdir())) == 2, "no temporary file is left"


@pytest.mark.parametrize(
    "change",
    [
        {"vocabulary": small_vocabulary(400)},
        {"policy": "llguidance"},
        {"limits": VettingLimits(fill_limit_s=0.5)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_is_different_is_not_found(tmp_path: Path, change: dict[str, object]) -> None:
    FolderStore(tmp_path, SETUP).save(spec("a"), VETTED)
    assert FolderStore(tmp_path, msgspec.structs.replace(SETUP, **change)).load(spec("a")) is None


@pytest.mark.parametrize(("reason", "kept"), [("grammar", True), ("masks", True), ("crash", False), ("time", False)])
def test_what_may_be_the_machine_s_doing_is_not_kept(tmp_path: Path, reason: RefusalReason, kept: bool) -> None:
    store = FolderStore(tmp_path, SETUP)
    store.save(spec("a"), Refused(reason, "why"))
    assert (store.load(spec("a")) is not None) is kept


@pytest.mark.parametrize("damage", ["cut", "bit", "empty", "foreign", "text"])
def test_a_damaged_file_is_a_warning_and_made_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    store = FolderStore(tmp_path, SETUP)
    store.save(spec("a"), VETTED)
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    flipped = bytearray(data)
    flipped[-1] ^= 1
    damaged = {"cut": data[:-3], "bit": bytes(flipped), "empty": b"", "foreign": b"x" * 500, "text": b"{}"}
    path.write_bytes(damaged[damage])
    with caplog.at_level(logging.WARNING):
        assert store.load(spec("a")) is None
    assert "is damaged" in caplog.text
    store.save(spec("a"), VETTED)
    assert store.load(spec("a")) == VETTED


def test_the_folder_is_bounded_and_the_oldest_go(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, SETUP)
    store.save(spec("0"), VETTED)
    (path,) = tmp_path.iterdir()
    size_bytes = path.stat().st_size
    bounded = FolderStore(tmp_path, SETUP, limit_bytes=5 * size_bytes)
    for number in range(12):
        bounded.save(spec(str(number)), VETTED)
        for age, kept in enumerate(sorted(tmp_path.iterdir(), key=lambda file: file.stat().st_mtime_ns)):
            os.utime(kept, ns=(age, age))
    assert [number for number in range(12) if bounded.load(spec(str(number)))] == list(range(7, 12))


def test_a_folder_that_cannot_be_used_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    store = FolderStore(tmp_path / "file" / "cache", SETUP)
    with caplog.at_level(logging.WARNING):
        assert store.load(spec("a")) is None
        store.save(spec("a"), VETTED)
    assert "cannot be written" in caplog.text
