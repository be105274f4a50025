"""What ranks share is made before the first fork, without a thread; what is wrong is left to the ranks."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from tiny_checkpoints import write_tiny_checkpoint
from zygote_node import ROOT

from grammar_sync.engines.factory import MAKE_BACKEND
from grammar_sync.vetting.messages import Setup, VettingLimits
from launch.environment import RankEnvironment
from launch.node.progress_record import ProgressRecord
from launch.rank import engine_rank
from launch.rank.engine_rank import Rank
from launch.rank.main import prepare
from launch.rank.preparation import PreparedEngine

ALONE = """
import sys
from launch.node.this_process import has_threads
from launch.rank.main import prepare
from pathlib import Path
prepared = prepare(sys.argv[1:])
print(prepared is not None, has_threads(), len(list(Path('/proc/self/task').iterdir())))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama")


def made(folder: Path, *argv: str) -> PreparedEngine:
    prepared = prepare(["generate", "--model", str(folder), "--tp", "2", "--pp", "2", *argv, "x"])
    assert prepared is not None
    return prepared


def test_no_thread_is_started(folder: Path) -> None:
    """In a process of its own with several cores to use: whatever is forked from it afterwards must be whole."""
    argv = ["generate", "--model", str(folder), "x"]
    environ = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "4", "OPENBLAS_NUM_THREADS": "1", "PATH": ""}
    command = [sys.executable, "-c", ALONE, *argv]
    out = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout
    assert out == "True False 1\n"


@pytest.mark.parametrize(
    "argv",
    [
        ["generate", "--model", "/nowhere", "x"],
        ["generate", "--no-such-option"],
        ["generate", "--model", "{folder}", "--logit-processor", "no name", "x"],
        ["generate", "--model", "{folder}", "--reasoning-marker", "</x>", "--reasoning-start-marker", "", "x"],
        ["sample", "--input", "{folder}/config.json"],
        ["doctor"],
    ],
)
def test_what_is_wrong_or_shares_nothing_is_left_to_the_ranks(folder: Path, argv: list[str]) -> None:
    assert prepare([word.format(folder=folder) for word in argv]) is None


def test_engines_are_for_one_vocabulary_and_policy(folder: Path) -> None:
    engines = made(folder).engines()
    assert engines is not None
    setup = Setup(engines.vocabulary, MAKE_BACKEND, "auto", VettingLimits())
    assert engines.fits(setup)
    other = replace(engines.vocabulary, tokens=[*engines.vocabulary.tokens, "more"])
    for wrong in (
        Setup(engines.vocabulary, MAKE_BACKEND, "xgrammar", VettingLimits()),
        Setup(engines.vocabulary, "raw_engine:RawEngine", "auto", VettingLimits()),
        Setup(other, MAKE_BACKEND, "auto", VettingLimits()),
    ):
        assert not engines.fits(wrong)


@pytest.fixture
def no_others() -> Iterator[mock.Mock]:
    """A rank comes up without others; yields its engine."""
    engine = mock.Mock()
    with mock.patch.multiple(
        engine_rank, bring_up=mock.DEFAULT, meet=mock.DEFAULT, RankReporter=mock.DEFAULT, dist=mock.DEFAULT
    ):
        yield engine


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_ranks_of_later_stages_hold_neither_tokenizer_nor_compiler(
    folder: Path, no_others: mock.Mock, rank: int
) -> None:
    prepared = made(folder)
    assert prepared.first_stage is not None
    parts: list[weakref.ref[object]] = [
        weakref.ref(prepared.first_stage.tokenizer),
        weakref.ref(prepared.first_stage.backend),
    ]
    environment = RankEnvironment(rank, 4, rank, 4, "127.0.0.1", 1, True, 0, None)
    one = Rank(prepared.command.engine, environment, [], ProgressRecord.create(), prepared=prepared)
    held: list[bool] = []
    no_others.run.side_effect = lambda: held.extend(part() is not None for part in parts)
    with mock.patch.object(one, "_build", return_value=(no_others, None)):
        one.run()
    assert held == [rank < 2] * 2, "as the first step begins"
