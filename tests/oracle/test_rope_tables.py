"""Cosines and sines of every rope variant against transformers, before and after the table has grown."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from runtime.model_config import read_model_config
from runtime.rope import RotaryEmbedding

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn-all-options": {
        "rope_type": "yarn",
        "factor": 3.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 0.8,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "factor": 3.0,
        "original_max_position_embeddings": 1024,
        "attention_factor": 1.25,
    },
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_are_those_of_transformers(name: str, dtype: torch.dtype) -> None:
    parameters = {"rope_type": "default", "rope_theta": 50_000.0, **SCALINGS[name]}
    reference = LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=9000, rope_parameters=parameters
    )
    config = read_model_config(reference.to_dict(), {})
    rope = RotaryEmbedding(config.rope, config.head_dim, dtype=dtype, device=torch.device("cpu"))
    positions = torch.tensor([0, 1, 2, 77, 1023, 1024, 4095])
    before = rope.at(positions, 4095)
    later = torch.cat([positions, torch.tensor([4096, 5000, 8999])])
    after = rope.at(later, 8999)
    expected = LlamaRotaryEmbedding(reference)(torch.zeros(1, dtype=dtype), later.unsqueeze(0))
    for small, grown, whole, sign in zip(before, after, expected, (1, -1), strict=True):
        assert torch.equal(grown[: len(positions)], small)
        first, second = whole[0].chunk(2, dim=-1)
        table = torch.cat((sign * first, second), dim=-1)
        torch.testing.assert_close(grown[:, 0], table, rtol=0, atol=1e-6 if dtype is torch.float32 else 0.004)
