"""Attention of invariant mode by the compiled kernels: the bits of ``tiled_attention``, with little around them.

Keys and values are read where they lie in the pool. Exponentials stay torch's own, so that their bits are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from runtime.kv_cache import KVCache, PagedKVCache, Span
from runtime.tiled_attention import KEY_BLOCK, AttentionShapes, QueryTile, query_tile, tiled_visible, whole_blocks
from tp.invariant_kernels import InvariantKernels
from tp.invariant_products import InvariantProductFactory
from tp.invariant_trial import TRIAL_SEED, same_bits

_MOST_TILE_ROWS = 48
_MOST_WEIGHTS = 1 << 19
"""Scores that are computed before any are used; they stay in a core's cache."""
_SUM_LANES: Final = (8, 16, 4)
_TRIAL_BLOCKS, _TRIAL_BLOCK_TOKENS = 80, 8


@dataclass(frozen=True)
class TileBatch:
    """Tiles that run together.

    Attributes:
        tiles: [N, 7] int64, as the kernels take them.
        weights: How many scores they have.
    """

    tiles: torch.Tensor
    weights: int


@dataclass(frozen=True)
class KernelVisible:
    """What the queries of a batch see in the layers of one window.

    Attributes:
        batches: All tiles.
        slots: int64, the pool's slots of the blocks that they read.
        window: How many positions a token sees, its own included; None is all.
        attention: Computes it.
    """

    batches: tuple[TileBatch, ...]
    slots: torch.Tensor
    window: int | None
    attention: KernelAttention

    def attend(self, queries: torch.Tensor, cache: KVCache, layer: int) -> torch.Tensor:
        """Returns the attention output of each query, a fresh [T, heads, head_dim]."""
        kernels, lanes = self.attention.kernels, self.attention.sum_lanes
        keys, values = cache.pool(layer)
        wide = queries.float()
        outputs = wide.new_empty(wide.shape)
        for batch in self.batches:
            weights = wide.new_empty(batch.weights)
            kernels.scores(batch.tiles, self.slots, queries=wide, keys=keys, weights=weights, window=self.window)
            kernels.outputs(
                batch.tiles, self.slots, values=values, weights=weights.exp_(), outputs=outputs, sum_lanes=lanes
            )
        return outputs.to(queries.dtype)


@dataclass(frozen=True)
class KernelAttention:
    """Attention by the kernels.

    Attributes:
        kernels: Compute it.
        group: Query heads of a KV head.
        kv_heads: Of this rank.
        sum_lanes: Elements of a register of torch's sums.
    """

    kernels: InvariantKernels
    group: int
    kv_heads: int
    sum_lanes: int

    def visible(self, spans: Sequence[Span], window: int | None) -> KernelVisible:
        """Returns what the spans of a batch see; the same for all layers of one window."""
        positions = max(_MOST_TILE_ROWS // self.group, 1)
        starts: list[int] = []
        lengths: list[int] = []
        batches: list[TileBatch] = []
        rows: list[tuple[int, ...]] = []
        slots = weights = 0
        for span in spans:
            tiles = [
                query_tile(span, first, min(first + positions, span.length), window)
                for first in range(0, span.length, positions)
            ]
            whole = QueryTile(span.start, span.stop, tiles[0].first_block, tiles[-1].stop_block)
            for slot, length in whole_blocks(span, whole):
                starts.append(slot)
                lengths.append(length)
            for tile in tiles:
                if weights > _MOST_WEIGHTS:
                    batches.append(TileBatch(torch.tensor(rows), weights))
                    rows, weights = [], 0
                blocks = tile.stop_block - tile.first_block
                place = slots + (tile.first_block - whole.first_block) * KEY_BLOCK
                at = span.context_length + tile.start - span.start
                rows.append((tile.start, tile.stop - tile.start, at, tile.first_block, blocks, place, weights))
                weights += self.kv_heads * self.group * (tile.stop - tile.start) * blocks * KEY_BLOCK
            slots += (whole.stop_block - whole.first_block) * KEY_BLOCK
        batches.append(TileBatch(torch.tensor(rows), weights))
        return KernelVisible(tuple(batches), _slots(starts, lengths, slots), window, self)


def _slots(starts: list[int], lengths: list[int], count: int) -> torch.Tensor:
    """Returns the slots of runs one after the other, [count] int64."""
    if len(starts) == 1:
        return torch.arange(starts[0], starts[0] + count)
    each = torch.tensor(lengths)
    before = torch.tensor(starts).sub_(each.cumsum(0)).add_(each)
    return before.repeat_interleave(each, output_size=count).add_(torch.arange(count))


def invariant_attention(
    products: InvariantProductFactory, *, head_dim: int, group: int, kv_heads: int, dtype: torch.dtype
) -> KernelAttention | AttentionShapes:
    """Returns how a rank computes attention: by compiled kernels where a trial finds the bits of the definition.

    Args:
        products: This rank's; it says whether there are kernels.
        head_dim: Elements of a head.
        group: Query heads of a KV head.
        kv_heads: Of this rank.
        dtype: The model's dtype.
    """
    shapes = AttentionShapes(group, products.batched(head_dim, KEY_BLOCK))
    if products.kernels is None or kv_heads == 0 or not products.kernels.attends(head_dim):
        return shapes
    for lanes in _SUM_LANES:
        attention = KernelAttention(products.kernels, group, kv_heads, lanes)
        if _gives_the_same_bits(attention, shapes, head_dim, dtype):
            return attention
    return shapes


def _gives_the_same_bits(
    attention: KernelAttention, shapes: AttentionShapes, head_dim: int, dtype: torch.dtype
) -> bool:
    """Returns whether random queries have the outputs of the definition, decoding and in a prompt, at any place."""
    cpu, source = torch.device("cpu"), torch.Generator().manual_seed(TRIAL_SEED)
    cache = PagedKVCache(
        1,
        attention.kv_heads,
        head_dim,
        num_blocks=_TRIAL_BLOCKS,
        block_tokens=_TRIAL_BLOCK_TOKENS,
        dtype=dtype,
        device=cpu,
    )
    slots = _TRIAL_BLOCKS * _TRIAL_BLOCK_TOKENS
    shape = (slots, attention.kv_heads, head_dim)
    keys, values = (torch.randn(shape, generator=source).mul_(scale).to(dtype) for scale in (3.0, 1.0))
    cache.write(0, torch.arange(slots), keys, values)
    for lengths in (((1, 0), (1, 69), (1, 333), (3, 20)), ((1, 500),), ((75, 128), (40, 0))):
        spans = _trial_spans(lengths)
        count = sum(span.length for span in spans)
        queries = torch.randn(count, attention.kv_heads * attention.group, head_dim, generator=source).to(dtype)
        for window in (None, 70):
            expected = tiled_visible(spans, window, shapes, cpu).attend(queries, cache, 0)
            found = attention.visible(spans, window).attend(queries, cache, 0)
            if not same_bits(found.float(), expected.float()):
                return False
    return True


def _trial_spans(lengths: Sequence[tuple[int, int]]) -> list[Span]:
    """Returns spans of these lengths after these contexts, whose blocks lie in any order."""
    blocks = torch.randperm(_TRIAL_BLOCKS, generator=torch.Generator().manual_seed(TRIAL_SEED)).tolist()
    spans: list[Span] = []
    start = 0
    for index, (length, context) in enumerate(lengths):
        own = [blocks.pop() for _ in range(-(-(length + context) // _TRIAL_BLOCK_TOKENS))]
        left = length + context
        runs = []
        for block in own:
            runs.append((block * _TRIAL_BLOCK_TOKENS, min(left, _TRIAL_BLOCK_TOKENS)))
            left -= _TRIAL_BLOCK_TOKENS
        spans.append(Span(index, start, length, context, tuple(runs)))
        start += length
    return spans
