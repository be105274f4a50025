"""A GGUF file as llama.cpp's converter writes it: configuration from its metadata, tensors under Hugging Face names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from runtime.checkpoint_layout import CheckpointError, check_tensors
from runtime.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from runtime.model_config import Architecture, ModelConfig, ModelConfigError, RopeConfig

# A Mistral model is a llama one in this format.
_ARCHITECTURES: dict[str, Architecture] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_ROPE_DIVISORS = "rope_freqs.weight"
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PERMUTED = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.q_proj.bias", "self_attn.k_proj.bias")


@dataclass(frozen=True)
class GgufCheckpoint:
    """An opened and checked GGUF file.

    Attributes:
        path: The file.
        config: The model's configuration.
        metadata: Every value of the header by its GGUF key, the tokenizer's included.
        tensors: Where each tensor lies, by its Hugging Face name.
    """

    path: Path
    config: ModelConfig
    metadata: Mapping[str, Any]
    tensors: dict[str, GgufTensor]

    def read(self, name: str, rows: range | None, columns: range | None) -> npt.NDArray[np.float32]:
        """Returns a dequantised slice of a tensor; reads the rows and quantisation blocks that it touches, no others.

        Args:
            name: Its Hugging Face name.
            rows: Rows (or elements of a vector), by their order in the Hugging Face tensor; None is all.
            columns: Columns of a matrix; None is all.
        """
        tensor = self.tensors[name]
        order = self._order(name, rows, tensor.shape[0])
        if len(tensor.shape) == 1:
            vector: npt.NDArray[np.float32] = _dequantize(_raw(self.path, tensor), tensor.kind)[0][order]
            return vector
        raw = _raw(self.path, tensor)[order]
        if columns is None:
            return _dequantize(raw, tensor.kind)
        block, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        first, last = columns.start // block, -(-columns.stop // block)
        values = _dequantize(raw[:, first * block_bytes : last * block_bytes], tensor.kind)
        return values[:, columns.start - first * block : columns.stop - first * block]

    def _order(self, name: str, rows: range | None, count: int) -> slice | npt.NDArray[np.int64]:
        """Returns which stored rows hold ``rows``.

        For llama files the converter interleaves the two halves of each query and key head, because llama.cpp rotates
        neighbouring pairs; Hugging Face models rotate element i with element i + head_dim / 2.
        """
        rows = rows if rows is not None else range(count)
        if self.config.architecture != "llama" or not name.endswith(_PERMUTED):
            return slice(rows.start, rows.stop)
        head_dim = self.config.head_dim
        head, within = np.divmod(np.arange(rows.start, rows.stop, dtype=np.int64), head_dim)
        half, pair = np.divmod(within, head_dim // 2)
        stored: npt.NDArray[np.int64] = head * head_dim + 2 * pair + half
        return stored


def open_gguf(path: Path) -> GgufCheckpoint:
    """Returns the checkpoint in a GGUF file; reads its header only.

    Raises:
        CheckpointError: The file is broken, or its model, quantisation or scaling is not supported.
    """
    header = read_gguf_header(path)
    try:
        config = _config(path, header)
    except (ModelConfigError, KeyError) as error:
        missing = f"metadata {error} is missing" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{path}: {missing}") from error
    tensors = {_model_name(name): tensor for name, tensor in header.tensors.items() if name != _ROPE_DIVISORS}
    check_tensors(path, config, {name: tensor.shape for name, tensor in tensors.items()})
    supported: set[GGMLQuantizationType] = set()
    for name, tensor in tensors.items():
        if tensor.kind not in supported and not _can_dequantize(tensor.kind):
            raise CheckpointError(f"{path}: quantisation {tensor.kind.name} of tensor {name} is not supported")
        supported.add(tensor.kind)
    return GgufCheckpoint(path, config, header.metadata, tensors)


def _config(path: Path, header: GgufHeader) -> ModelConfig:
    metadata, names = header.metadata, header.tensors.keys()
    name = metadata["general.architecture"]
    if name not in _ARCHITECTURES:
        raise ModelConfigError(f"architecture {name!r} is not supported; supported are {', '.join(_ARCHITECTURES)}")
    for key, harmless in (("expert_count", 0), ("attention.sliding_window", 0)):
        if metadata.get(f"{name}.{key}", harmless) != harmless:
            raise ModelConfigError(f"{name}.{key} {metadata[f'{name}.{key}']} is not supported")
    if metadata.get("split.count", 1) > 1:
        raise ModelConfigError(f"the file is one of {metadata['split.count']} parts; merge them into one file")
    if "token_embd.weight" not in names:
        raise ModelConfigError("tensor token_embd.weight is missing")
    num_heads = _count(metadata, f"{name}.attention.head_count")
    hidden_size = _count(metadata, f"{name}.embedding_length")
    head_dim = metadata.get(f"{name}.attention.key_length", hidden_size // max(num_heads, 1))
    num_layers = _count(metadata, f"{name}.block_count")
    return ModelConfig(
        architecture=_ARCHITECTURES[name],
        vocab_size=header.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=_count(metadata, f"{name}.feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_count(metadata, f"{name}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=metadata[f"{name}.attention.layer_norm_rms_epsilon"],
        rope=_rope(path, header, name, head_dim),
        tie_word_embeddings="output.weight" not in names,
        qkv_bias="blk.0.attn_q.bias" in names,
        output_bias="blk.0.attn_output.bias" in names,
        mlp_bias="blk.0.ffn_gate.bias" in names,
        qk_norm="blk.0.attn_q_norm.weight" in names,
        windows=(None,) * num_layers,
        max_position_embeddings=_count(metadata, f"{name}.context_length"),
        eos_token_ids=_eos_token_ids(metadata),
        dtype="bfloat16" if header.tensors["token_embd.weight"].kind is GGMLQuantizationType.BF16 else "float32",
    )


def _rope(path: Path, header: GgufHeader, name: str, head_dim: int) -> RopeConfig:
    metadata = header.metadata
    rotated = metadata.get(f"{name}.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ModelConfigError(f"{name}.rope.dimension_count {rotated} is not supported; supported is {head_dim}")
    theta = float(metadata.get(f"{name}.rope.freq_base", 10_000.0))
    scaling = metadata.get(f"{name}.rope.scaling.type", "none")
    factor = metadata.get(f"{name}.rope.scaling.factor", metadata.get(f"{name}.rope.scale_linear", 1.0))
    if _ROPE_DIVISORS in header.tensors:
        divisors = _dequantize(_raw(path, header.tensors[_ROPE_DIVISORS]), header.tensors[_ROPE_DIVISORS].kind)
        if divisors.shape != (1, head_dim // 2) or scaling != "none":
            raise ModelConfigError(f"{_ROPE_DIVISORS} of shape {divisors.shape} with scaling {scaling!r}")
        return RopeConfig(theta=theta, frequency_divisors=tuple(divisors[0].tolist()))
    if scaling == "yarn":
        # The format holds a factor on top of yarn's own 0.1 ln(factor) + 1.
        extra = metadata.get(f"{name}.rope.scaling.attn_factor", 1.0)
        return RopeConfig(
            theta=theta,
            rope_type="yarn",
            factor=factor,
            original_max_position_embeddings=_count(metadata, f"{name}.rope.scaling.original_context_length"),
            beta_fast=metadata.get(f"{name}.rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=metadata.get(f"{name}.rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=extra * float(0.1 * np.log(factor) + 1.0),
        )
    if scaling not in ("none", "linear"):
        raise ModelConfigError(f"{name}.rope.scaling.type {scaling!r} is not supported")
    linear = factor not in (0.0, 1.0)
    return RopeConfig(theta=theta, rope_type="linear" if linear else "default", factor=factor if linear else 1.0)


def _count(metadata: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = metadata[key] if default is None else metadata.get(key, default)
    if not isinstance(value, int):
        raise ModelConfigError(f"{key} must be one number for all layers")
    return value


def _eos_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    return tuple(sorted({metadata[key] for key in keys if key in metadata}))


def _model_name(name: str) -> str:
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if found is None or found[2] not in _NAMES:
        return name
    layer = f"model.layers.{found[1]}." if found[1] is not None else ""
    return f"{layer}{_NAMES[found[2]]}.{found[3]}"


def _raw(path: Path, tensor: GgufTensor) -> npt.NDArray[np.uint8]:
    rows = tensor.size_bytes // tensor.row_bytes
    return np.memmap(path, np.uint8, mode="r", offset=tensor.offset, shape=(rows, tensor.row_bytes))


def _dequantize(raw: npt.NDArray[np.uint8], kind: GGMLQuantizationType) -> npt.NDArray[np.float32]:
    values: npt.NDArray[np.float32] = dequantize(np.ascontiguousarray(raw), kind)
    return values


def _can_dequantize(kind: GGMLQuantizationType) -> bool:
    try:
        _dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
