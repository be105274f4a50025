"""All ranks compute in the dtype and form that the first rank chose, or in one that all of them have."""

from __future__ import annotations

from pathlib import Path

import pytest
from compute_rank_functions import choice_of_rank
from ranks import run_ranks
from tiny_checkpoints import write_tiny_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama")


def test_the_first_rank_chooses_for_all(folder: Path) -> None:
    choices = run_ranks(choice_of_rank, 3, folder, -1)
    assert [choice[:2] for choice in choices] == [("torch.float32", "onednn")] * 3
    assert "2 times as fast as plain ones" in choices[0][2]


def test_what_one_rank_lacks_none_uses(folder: Path) -> None:
    choices = run_ranks(choice_of_rank, 3, folder, 2)
    assert choices == [("torch.float32", "plain", "plain products, since some rank has no oneDNN")] * 3
