"""A pipeline stage's part of the model: embedding on the first, a run of layers, the LM head on the last."""

from __future__ import annotations

import torch

from runtime.attention import Seen, visible
from runtime.batch import ForwardBatch
from runtime.checkpoint_layout import EMBEDDING, FINAL_NORM, LM_HEAD
from runtime.decoder_layer import DecoderLayer, LayerLoader, RMSNorm, StepContext
from runtime.kernel_attention import KernelAttention, invariant_attention
from runtime.kv_cache import KVCache, PagedKVCache, Span
from runtime.model_config import ModelConfig
from runtime.rope import RotaryEmbedding
from runtime.tiled_attention import AttentionShapes, tiled_visible
from runtime.weights import WeightPart, WeightReader
from tp.embedding import ParallelLMHead, VocabularyParallelEmbedding
from tp.group import TensorParallelGroup
from tp.invariant_products import InvariantProductFactory
from tp.linear import LinearFactory
from tp.partition import VocabularyBlocks, VocabularySlice, attention_slice
from tp.products import ProductFactory


class DecoderStage:
    """The layers of one stage, this rank's slices of them, in memory.

    Args:
        config: The model.
        reader: Reads its checkpoint.
        layers: Which layers, from ``pp.partition.layer_ranges``; the stage with layer 0 embeds, the stage with the last
            layer has the LM head.
        group: The stage's ranks; all of them call ``forward`` together.
        dtype: Of weights, hidden states and KV cache: float32 or bfloat16.
        device: This rank's device.
        products: Makes the products with the weights; plain ones when left out. Invariant ones make attention invariant
            too.
    """

    def __init__(
        self,
        config: ModelConfig,
        reader: WeightReader,
        layers: range,
        group: TensorParallelGroup,
        *,
        dtype: torch.dtype,
        device: torch.device,
        products: ProductFactory | InvariantProductFactory | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.vocabulary = VocabularyBlocks(config.vocab_size).slice_of(group.rank, group.size)
        heads = attention_slice(config.num_heads, config.num_kv_heads, group.rank, group.size)
        self._cache_shape = (len(layers), len(heads.kv_heads), config.head_dim)
        self._rope = RotaryEmbedding(config.rope, config.head_dim, dtype=dtype, device=device)
        self._linears = LinearFactory(products or ProductFactory(), group)
        self._attention: KernelAttention | AttentionShapes | None = None
        if isinstance(products, InvariantProductFactory):
            self._attention = invariant_attention(
                products,
                head_dim=config.head_dim,
                group=config.num_heads // config.num_kv_heads,
                kv_heads=len(heads.kv_heads),
                dtype=dtype,
            )
        self._windows = tuple(dict.fromkeys(config.windows[layer] for layer in layers))
        self._layers: list[DecoderLayer] = []
        for layer in layers:
            loader = LayerLoader(config, reader, layer, linears=self._linears, dtype=dtype, device=device)
            self._layers.append(DecoderLayer(config, loader, layer, layers.start, linears=self._linears, group=group))
        self._embedding: VocabularyParallelEmbedding | None = None
        self._final_norm: RMSNorm | None = None
        self._head: ParallelLMHead | None = None
        rows = range(self.vocabulary.start, self.vocabulary.valid_stop)
        if layers.start == 0:
            weight = reader.load([WeightPart(EMBEDDING, rows)], dtype=dtype, device=device)
            self._embedding = VocabularyParallelEmbedding(weight, self.vocabulary, group)
        if layers.stop == config.num_layers:
            norm = reader.load([WeightPart(FINAL_NORM)], dtype=dtype, device=device)
            self._final_norm = RMSNorm(norm, config.rms_norm_eps)
            if config.tie_word_embeddings and self._embedding is not None:
                self._head = self._head_of(self._embedding.weight, self.vocabulary)
            else:
                self._head = self.load_head(reader, self.vocabulary)

    def load_head(self, reader: WeightReader, piece: VocabularySlice) -> ParallelLMHead:
        """Returns the LM head of one vocabulary slice."""
        name = EMBEDDING if self.config.tie_word_embeddings else LM_HEAD
        parts = [WeightPart(name, range(piece.start, piece.valid_stop))]
        return self._head_of(reader.load(parts, dtype=self.dtype, device=self.device), piece)

    def _head_of(self, weight: torch.Tensor, piece: VocabularySlice) -> ParallelLMHead:
        # Whatever rank a slice belongs to, here and where it is audited its logits are computed in one form.
        shared = self.config.tie_word_embeddings and self._embedding is not None
        product = self._linears.column(weight, None, unit=piece.block_length, shared=shared)
        return ParallelLMHead(product, piece)

    def parts(self) -> list[object]:
        """Returns what holds this stage's weights, part by part: embedding, layers, final norm and LM head."""
        parts = (self._embedding, *self._layers, self._final_norm, self._head)
        return [part for part in parts if part is not None]

    def new_cache(self, num_blocks: int, block_tokens: int) -> PagedKVCache:
        """Returns an empty KV pool for this stage's layers and this rank's KV heads.

        Args:
            num_blocks: Blocks of the pool, the same on every rank.
            block_tokens: Tokens of a block.
        """
        num_layers, num_kv_heads, head_dim = self._cache_shape
        return PagedKVCache(
            num_layers,
            num_kv_heads,
            head_dim,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            dtype=self.dtype,
            device=self.device,
        )

    @torch.no_grad()
    def forward(self, batch: ForwardBatch, hidden: torch.Tensor | None, cache: KVCache) -> torch.Tensor:
        """Returns the stage's output; every rank of the stage calls it with the same batch.

        Args:
            batch: The tokens of the step.
            hidden: [T, D] from the stage before, left unchanged; ignored on the first stage.
            cache: This stage's KV pool.

        Returns:
            [T, D] in the model's dtype; on the last stage [S, D], what ``logits`` takes.

        Raises:
            CollectiveError: A sum over the group failed.
        """
        if self._embedding is not None:
            hidden = self._embedding(batch.token_ids)
        if hidden is None:
            raise RuntimeError("a stage after the first needs the hidden states of the stage before")
        cos, sin = self._rope.at(batch.positions, batch.max_position)
        seen = {window: self._seen(batch.spans, window, cache) for window in self._windows}
        step = StepContext(batch.slots, cos, sin, seen, cache)
        for layer in self._layers:
            hidden = layer(hidden, step)
        return hidden if self._final_norm is None else self._final_norm(hidden[batch.sample_rows])

    def _seen(self, spans: tuple[Span, ...], window: int | None, cache: KVCache) -> Seen:
        if self._attention is None:
            return visible(spans, window, cache, self.device)
        if isinstance(self._attention, KernelAttention):
            return self._attention.visible(spans, window)
        return tiled_visible(spans, window, self._attention, self.device)

    @torch.no_grad()
    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the logits of this rank's vocabulary slice: fresh float32 [S, vocabulary.size], padding −inf.

        Last stage only; no collective.

        Args:
            rows: [S, D] from ``forward``.
        """
        if self._head is None:
            raise RuntimeError("only the last stage has an LM head")
        return self._head(rows)
