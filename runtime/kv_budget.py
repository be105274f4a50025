"""How much of the KV cache a token takes: torch-free, so that the command line can check it."""

from __future__ import annotations

from runtime.model_config import ModelConfig
from tp.partition import attention_slice

KV_BLOCK_TOKENS = 16
"""Tokens of a block of the KV pool: what is shared, evicted and handed out as one."""


def kv_bytes_per_token(config: ModelConfig, layers: list[range], tp_size: int, element_bytes: int) -> int:
    """Returns the KV bytes of one token on the rank that holds most of them; the same on every rank.

    Args:
        config: The model.
        layers: Each stage's layers.
        tp_size: Ranks of a stage.
        element_bytes: Bytes of one element in the model's dtype.
    """
    heads = max(
        len(attention_slice(config.num_heads, config.num_kv_heads, rank, tp_size).kv_heads) for rank in range(tp_size)
    )
    return 2 * max(len(stage) for stage in layers) * heads * config.head_dim * element_bytes
