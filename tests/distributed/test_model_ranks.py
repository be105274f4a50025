"""The model over real ranks: the logits of one process at every tensor-parallel size, on every rank alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from default_model import DEFAULT_MODEL_PROMPTS, default_model_path
from model_pipeline import ModelPipeline
from model_rank_functions import (
    greedy_of_rank,
    linear_differences_of_rank,
    logits_of_rank,
    matrix_elements_of_rank,
    mixed_logits,
    stages_agree_on_rank,
)
from ranks import run_ranks
from tiny_checkpoints import FAMILIES, write_tiny_checkpoint

from runtime.checkpoint import open_checkpoint
from runtime.checkpoint_layout import LM_HEAD, required_tensors
from tp.group import TensorParallelGroup

ATOL = 1e-4
# 4100 ids make 64 blocks of 96: with 3 and 4 ranks the cut falls within them and the last rank owns padding alone.
OVERRIDES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"vocab_size": 4100},
    "qwen2": {},
    "qwen3": {"vocab_size": 4096},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {family: write_tiny_checkpoint(root / family, family, seed=11, **OVERRIDES[family]) for family in FAMILIES}


@pytest.mark.parametrize("tp_size", [2, 3, 4])
def test_every_rank_has_the_logits_of_one_process(folders: dict[str, Path], tp_size: int) -> None:
    by_rank = run_ranks(logits_of_rank, tp_size, folders)
    for family, folder in folders.items():
        expected = mixed_logits(folder, TensorParallelGroup(0, 1), pp_size=1)
        for step, logits in enumerate(expected):
            assert np.abs(logits).max() > 1.0
            np.testing.assert_allclose(by_rank[0][family][step], logits, atol=ATOL, rtol=0, err_msg=family)
            for rank in range(1, tp_size):
                np.testing.assert_array_equal(by_rank[rank][family][step], by_rank[0][family][step])


def test_stages_do_not_change_a_bit(folders: dict[str, Path]) -> None:
    assert run_ranks(stages_agree_on_rank, 2, folders["qwen3"]) == [True, True]


def test_column_then_row_parallel_is_the_whole_product() -> None:
    for differences in run_ranks(linear_differences_of_rank, 3):
        assert differences == [0.0] * 15


def test_ranks_read_each_matrix_once_between_them(folders: dict[str, Path]) -> None:
    shapes = required_tensors(open_checkpoint(folders["qwen3"]).config)
    sizes = {name: shape[0] * shape[1] for name, shape in shapes.items() if len(shape) == 2}
    last = sum(size for name, size in sizes.items() if "layers.2." in name) + sizes[LM_HEAD]
    for layers, expected in ((range(3), sum(sizes.values())), (range(2, 3), last)):
        by_rank = run_ranks(matrix_elements_of_rank, 2, folders["qwen3"], layers)
        assert sum(by_rank) == expected
        assert max(by_rank) < 0.7 * expected


# Without the sweep test_default_model compares ranks with transformers, which says more.
@pytest.mark.model
@pytest.mark.sweep
def test_default_model_says_the_same_at_every_size() -> None:
    path, prompts = default_model_path(), list(DEFAULT_MODEL_PROMPTS.values())
    expected = ModelPipeline(path).greedy(prompts, 16)
    for tp_size in (2, 3):
        assert run_ranks(greedy_of_rank, tp_size, path, prompts) == [expected] * tp_size
