"""The tensors a model consists of, by their Hugging Face names, and the check that a checkpoint holds them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from runtime.model_config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"
# Tables that older checkpoints carry although the configuration determines them.
_DERIVED_SUFFIX = "rotary_emb.inv_freq"


class CheckpointError(ValueError):
    """A model's files are missing, broken or not supported; one line that names the file and what is wrong."""


def layer_prefix(layer: int) -> str:
    """Returns what the tensor names of a decoder layer start with."""
    return f"model.layers.{layer}."


def required_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor the model needs."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        prefix = layer_prefix(layer)
        shapes |= {prefix + name: shape for name, shape in _layer_tensors(config).items()}
    shapes[FINAL_NORM] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def check_tensors(path: Path, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Returns when ``shapes``, what a checkpoint holds, is what the model needs.

    Raises:
        CheckpointError: A tensor is missing, has another shape, or is not part of such a model.
    """
    required = required_tensors(config)
    for name, shape in required.items():
        if name not in shapes:
            raise CheckpointError(f"{path}: tensor {name} of the {config.architecture} model is missing")
        if shapes[name] != shape:
            raise CheckpointError(f"{path}: tensor {name} has shape {shapes[name]}, the configuration says {shape}")
    for name in shapes:
        if name not in required and name != LM_HEAD and not name.endswith(_DERIVED_SUFFIX):
            raise CheckpointError(f"{path}: tensor {name} is not part of a {config.architecture} model as configured")


def _layer_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, mlp = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (mlp, hidden),
        "mlp.up_proj.weight": (mlp, hidden),
        "mlp.down_proj.weight": (hidden, mlp),
    }
    if config.qkv_bias:
        shapes |= {f"self_attn.{name}_proj.bias": (size,) for name, size in (("q", query), ("k", kv), ("v", kv))}
    if config.output_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if config.mlp_bias:
        shapes |= {f"mlp.{name}_proj.bias": (size,) for name, size in (("gate", mlp), ("up", mlp), ("down", hidden))}
    if config.qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in ("q", "k")}
    return shapes
