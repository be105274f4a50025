"""One decoder layer of the Llama shape: normalised attention and gated MLP, each added to the residual stream.

The four supported families differ in biases, in a norm of queries and keys per head, and in windows. Query, key and
value projections are one product, gate and up projections another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.attention import Seen
from runtime.checkpoint_layout import layer_prefix
from runtime.kv_cache import KVCache
from runtime.model_config import ModelConfig
from runtime.rope import rotate
from runtime.weights import WeightPart, WeightReader
from tp.group import TensorParallelGroup
from tp.linear import LinearFactory, RowLayer
from tp.partition import AttentionSlice, attention_slice, mlp_slice
from tp.products import Product


class RMSNorm:
    """Root-mean-square norm over the last dimension, computed in float32 whatever the dtype.

    Args:
        weight: [..., D] in the model's dtype; it may differ by head.
        epsilon: Added to the mean square.
    """

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        self.weight = weight
        self._epsilon = torch.full((1,), epsilon, device=weight.device)
        self._part = 1.0 / weight.shape[-1]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a fresh tensor of ``x``'s shape and dtype."""
        # functional.rms_norm does the same in twice as many small operations.
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        normal = torch.addcmul(self._epsilon, norm, norm, value=self._part).rsqrt_().mul(wide)
        return normal.to(x.dtype).mul_(self.weight)


@dataclass(frozen=True)
class StepContext:
    """What every layer of a stage needs to know of a step.

    Attributes:
        slots: [T] int64, where each token's keys and values go.
        cos: [T, 1, head_dim].
        sin: [T, 1, head_dim].
        visible: What the batch sees, by the layer's window.
        cache: Keys and values of this stage.
    """

    slots: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    visible: dict[int | None, Seen]
    cache: KVCache


class LayerLoader:
    """Reads this rank's slices of one layer's tensors.

    Args:
        config: The model.
        reader: Its checkpoint.
        layer: Which layer, counted over the whole model.
        linears: Makes the layers with the weights.
        dtype: The model's dtype.
        device: This rank's device.
    """

    def __init__(
        self,
        config: ModelConfig,
        reader: WeightReader,
        layer: int,
        *,
        linears: LinearFactory,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._config = config
        self._reader = reader
        self._prefix = layer_prefix(layer)
        self._linears = linears
        self._dtype = dtype
        self._device = device

    def norm(self, name: str) -> RMSNorm:
        """Returns the norm called ``name``, which every rank holds whole."""
        return RMSNorm(self._load(WeightPart(f"{name}.weight")), self._config.rms_norm_eps)

    def column_parallel(self, parts: list[tuple[str, range]], *, unit: int, cut_in: int = 1, bias: bool) -> Product:
        """Returns one product of several projections: ``parts`` names each and the output elements this rank owns."""
        weight = self._load(*[WeightPart(f"{name}.weight", rows) for name, rows in parts])
        biases = self._load(*[WeightPart(f"{name}.bias", rows) for name, rows in parts]) if bias else None
        return self._linears.column(weight, biases, unit=unit, parts=cut_in)

    def row_parallel(self, name: str, columns: range, *, unit: int, units: int, bias: bool) -> RowLayer:
        """Returns the projection called ``name`` over the input elements this rank owns."""
        weight = self._load(WeightPart(f"{name}.weight", None, columns))
        biases = self._load(WeightPart(f"{name}.bias")) if bias else None
        return self._linears.row(weight, biases, unit=unit, units=units)

    def head_norm(self, heads: AttentionSlice) -> RMSNorm | None:
        """Returns one norm over the rank's query heads and then its key heads; None when the model has none."""
        if not self._config.qk_norm:
            return None
        query, key = (self._load(WeightPart(f"self_attn.{name}.weight")) for name in ("q_norm", "k_norm"))
        rows = [query.expand(len(heads.heads), -1), key.expand(len(heads.kv_heads), -1)]
        return RMSNorm(torch.cat(rows), self._config.rms_norm_eps)

    def _load(self, *parts: WeightPart) -> torch.Tensor:
        whole = [part._replace(name=self._prefix + part.name) for part in parts]
        return self._reader.load(whole, dtype=self._dtype, device=self._device)


class DecoderLayer:
    """This rank's part of a decoder layer.

    Args:
        config: The model.
        loader: Reads the layer's tensors.
        layer: Which layer, counted over the whole model.
        first_layer: The stage's first layer.
        linears: What the loader makes the layers with.
        group: The stage's ranks; all of them call the layer together.
    """

    def __init__(
        self,
        config: ModelConfig,
        loader: LayerLoader,
        layer: int,
        first_layer: int,
        *,
        linears: LinearFactory,
        group: TensorParallelGroup,
    ) -> None:
        heads = attention_slice(config.num_heads, config.num_kv_heads, group.rank, group.size)
        unit = linears.mlp_unit(config.intermediate_size, config.num_kv_heads)
        columns = mlp_slice(config.intermediate_size, group.rank, group.size, unit)
        count = -(-config.intermediate_size // unit)
        query, kv = (_elements(run, config.head_dim) for run in (heads.heads, heads.kv_heads))
        self._input_norm = loader.norm("input_layernorm")
        self._qkv = loader.column_parallel(
            [("self_attn.q_proj", query), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)],
            unit=config.head_dim,
            bias=config.qkv_bias,
        )
        self._head_norm = loader.head_norm(heads)
        self._output = loader.row_parallel(
            "self_attn.o_proj",
            query,
            unit=config.num_heads // config.num_kv_heads * config.head_dim,
            units=config.num_kv_heads,
            bias=config.output_bias,
        )
        self._mlp_norm = loader.norm("post_attention_layernorm")
        self._gate_up = loader.column_parallel(
            [("mlp.gate_proj", columns), ("mlp.up_proj", columns)], unit=unit, cut_in=2, bias=config.mlp_bias
        )
        self._down = loader.row_parallel("mlp.down_proj", columns, unit=unit, units=count, bias=config.mlp_bias)
        self._gated = linears.gated
        self._num_heads, self._num_kv_heads = len(heads.heads), len(heads.kv_heads)
        self._head_dim = config.head_dim
        self._window = config.windows[layer]
        self._cache_layer = layer - first_layer

    def __call__(self, hidden: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Returns the next residual stream, a fresh [T, D], equal on every rank of the stage."""
        hidden = self._attention(self._input_norm(hidden), step).add_(hidden)
        return self._mlp(self._mlp_norm(hidden)).add_(hidden)

    def _attention(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        qkv = self._qkv(x).view(x.shape[0], -1, self._head_dim)
        rotated_heads = self._num_heads + self._num_kv_heads
        query_key, values = qkv[:, :rotated_heads], qkv[:, rotated_heads:]
        if self._head_norm is not None:
            query_key = self._head_norm(query_key)
        query_key = rotate(query_key, step.cos, step.sin)
        queries, keys = query_key[:, : self._num_heads], query_key[:, self._num_heads :]
        step.cache.write(self._cache_layer, step.slots, keys, values)
        attended = step.visible[self._window].attend(queries, step.cache, self._cache_layer)
        return self._output(attended.view(x.shape[0], -1))

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(self._gated(gate, up))


def _elements(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
