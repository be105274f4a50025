"""A GGUF file as llama.cpp's converter writes it: configuration from its metadata, tensors under Hugging Face names."""

from __future__ import annotations

import math
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
from runtime.model_config import Architecture, ModelConfig, ModelConfigError, RopeConfig, layer_count

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
    except ModelConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
    tensors = {_model_name(name): tensor for name, tensor in header.tensors.items() if name != _ROPE_DIVISORS}
    check_tensors(path, config, {name: tensor.shape for name, tensor in tensors.items()})
    supported: set[GGMLQuantizationType] = set()
    for name, tensor in tensors.items():
        if tensor.kind not in supported and not _can_dequantize(tensor.kind):
            raise CheckpointError(f"{path}: quantisation {tensor.kind.name} of tensor {name} is not supported")
        supported.add(tensor.kind)
    return GgufCheckpoint(path, config, header.metadata, tensors)


class _Values:
    """The metadata of one architecture: values by the part of their key after its name, checked by kind."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self._metadata = metadata
        self._architecture = architecture

    def count(self, key: str, default: int | None = None) -> int:
        """Returns a whole number; ``default`` where the file has none, an error where there is no default."""
        value = self._value(key, default)
        if not isinstance(value, int):
            raise ModelConfigError(f"{self._architecture}.{key} must be one whole number for all layers, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a number, as ``count`` does."""
        value = self._value(key, default)
        if not isinstance(value, int | float):
            raise ModelConfigError(f"{self._architecture}.{key} must be a number, not {value!r}")
        return float(value)

    def text(self, key: str, default: str) -> str:
        """Returns a value as text."""
        return str(self._value(key, default))

    def _value(self, key: str, default: object) -> Any:
        value = self._metadata.get(f"{self._architecture}.{key}", default)
        if value is None:
            raise ModelConfigError(f"metadata {self._architecture}.{key} is missing")
        return value


def _config(path: Path, header: GgufHeader) -> ModelConfig:
    names = header.tensors.keys()
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        raise ModelConfigError(f"architecture {name!r} is not supported; supported are {', '.join(_ARCHITECTURES)}")
    values = _Values(header.metadata, name)
    for key in ("expert_count", "attention.sliding_window"):
        if values.count(key, 0):
            raise ModelConfigError(f"{name}.{key} {values.count(key)} is not supported")
    if _Values(header.metadata, "split").count("count", 1) > 1:
        raise ModelConfigError("the file is one of several parts; merge them into one file")
    if "token_embd.weight" not in names:
        raise ModelConfigError("tensor token_embd.weight is missing")
    embedding = header.tensors["token_embd.weight"]
    num_heads, hidden_size = values.count("attention.head_count"), values.count("embedding_length")
    head_dim = values.count("attention.key_length", hidden_size // max(num_heads, 1))
    num_layers = layer_count(values.count("block_count"))
    return ModelConfig(
        architecture=_ARCHITECTURES[name],
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=values.count("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=values.count("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=values.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(path, header, values, head_dim),
        tie_word_embeddings="output.weight" not in names,
        qkv_bias="blk.0.attn_q.bias" in names,
        output_bias="blk.0.attn_output.bias" in names,
        mlp_bias="blk.0.ffn_gate.bias" in names,
        qk_norm="blk.0.attn_q_norm.weight" in names,
        windows=(None,) * num_layers,
        max_position_embeddings=values.count("context_length"),
        eos_token_ids=_eos_token_ids(header.metadata),
        dtype="bfloat16" if embedding.kind is GGMLQuantizationType.BF16 else "float32",
    )


def _rope(path: Path, header: GgufHeader, values: _Values, head_dim: int) -> RopeConfig:
    rotated = values.count("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ModelConfigError(f"rope.dimension_count {rotated} is not supported; supported is head_dim {head_dim}")
    theta = values.number("rope.freq_base", 10_000.0)
    scaling = values.text("rope.scaling.type", "none")
    factor = values.number("rope.scaling.factor", values.number("rope.scale_linear", 1.0))
    if _ROPE_DIVISORS in header.tensors:
        # What the converter makes of a llama3 scaling: its result, one divisor a pair.
        divisors = _dequantize(_raw(path, header.tensors[_ROPE_DIVISORS]), header.tensors[_ROPE_DIVISORS].kind)
        if divisors.shape != (1, head_dim // 2) or scaling != "none":
            raise ModelConfigError(f"{_ROPE_DIVISORS} of shape {divisors.shape} with scaling {scaling!r}")
        return RopeConfig(theta=theta, frequency_divisors=tuple(divisors[0].tolist()))
    if scaling == "yarn":
        # The format holds a factor on top of yarn's own.
        extra = values.number("rope.scaling.attn_factor", 1.0)
        return RopeConfig(
            theta=theta,
            rope_type="yarn",
            factor=factor,
            original_max_position_embeddings=values.count("rope.scaling.original_context_length"),
            beta_fast=values.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=values.number("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=extra * (0.1 * math.log(factor) + 1.0) if factor > 1 else extra,
        )
    if scaling not in ("none", "linear"):
        raise ModelConfigError(f"rope.scaling.type {scaling!r} is not supported; supported are none, linear, yarn")
    linear = factor not in (0.0, 1.0)
    return RopeConfig(theta=theta, rope_type="linear" if linear else "default", factor=factor if linear else 1.0)


def _eos_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    values = _Values(metadata, "tokenizer")
    keys = [f"ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    return tuple(sorted({values.count(key) for key in keys if f"tokenizer.{key}" in metadata}))


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
