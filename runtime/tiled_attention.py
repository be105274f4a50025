"""Attention of invariant mode: a token's output has the same bits in any batch, chunk and place.

Keys are cut into blocks of 64 positions, counted from a sequence's first token. A tile holds the queries of one
sequence that share KV heads, in one of a few heights. Scores and outputs are products of one tile and one block, of one
shape; a block's weights are relative to the row's maximum over all blocks, which is exact, and the blocks' outputs are
added two by two in a tree over absolute block numbers. A block of which a query sees nothing adds zeros, so that it
does not matter what else its tile sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from runtime.kv_cache import KVCache, Runs, Span, cut_runs
from tp.invariant_products import BatchedProduct

KEY_BLOCK = 64
_NONE = float("-inf")


class QueryTile(NamedTuple):
    """Rows ``start`` to ``stop`` of the batch, of one sequence, and the blocks that they see some of."""

    start: int
    stop: int
    first_block: int
    stop_block: int


class TreeLevel(NamedTuple):
    """How the nodes of one level become those of the next: [n] int64 each.

    ``right`` are the nodes that are added, ``into`` the places in the next level where they are.
    """

    left: torch.Tensor
    right: torch.Tensor
    into: torch.Tensor


@dataclass(frozen=True)
class TileGroup:
    """Tiles that run together.

    Attributes:
        runs: The slots of the blocks that they read, each block whole: where a sequence ends, its own tokens fill up.
        rows: [S, P] int64, the batch row of each tile's positions; a tile with fewer repeats its last.
        kept: [n] int64, which of the S · P places are no repetitions.
        kept_rows: [n] int64, their batch rows.
        tile_of: [N] int64, the tile of each block.
        hidden: [N, 1, P, 1, 64] bool, which keys of a block its tile's positions do not see.
        levels: The tree over each tile's blocks.
    """

    runs: Runs
    rows: torch.Tensor
    kept: torch.Tensor
    kept_rows: torch.Tensor
    tile_of: torch.Tensor
    hidden: torch.Tensor
    levels: tuple[TreeLevel, ...]


class AttentionShapes:
    """In which shapes a rank's attention runs.

    Args:
        group: Query heads of a KV head.
        product: Multiplies batches of tiles and blocks, in heights of its own.
    """

    def __init__(self, group: int, product: BatchedProduct) -> None:
        self.group = group
        self.product = product
        heights = product.heights
        enough = [height for height in heights if height >= group]
        least = -(-group // heights[0]) * heights[0]
        self.short = enough[0] if enough else least
        self.tall = max(heights[-1], self.short)

    def positions(self, height: int) -> int:
        """Returns how many query positions a tile of this height holds."""
        return height // self.group


@dataclass(frozen=True)
class TiledVisible:
    """What the queries of a batch see in the layers of one window.

    Attributes:
        groups: The tiles, and the height of each group's.
        shapes: In which shapes attention runs.
        in_order: Whether there is one group, whose tiles hold one row of the batch each, in order.
    """

    groups: tuple[tuple[TileGroup, int], ...]
    shapes: AttentionShapes
    in_order: bool = False

    def attend(self, queries: torch.Tensor, cache: KVCache, layer: int) -> torch.Tensor:
        """Returns the attention output of each query, a fresh [T, heads, head_dim]."""
        scaled = queries.float() * queries.shape[2] ** -0.5
        if self.in_order:
            group, height = self.groups[0]
            found = self._attend(scaled.unsqueeze(1), cache, layer, group, height)
            return found.reshape(queries.shape).to(queries.dtype)
        output = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        flat = output.view(queries.shape[0], -1, self.shapes.group, queries.shape[2])
        for group, height in self.groups:
            found = self._attend(scaled[group.rows], cache, layer, group, height)
            flat[group.kept_rows] = found.flatten(0, 1)[group.kept].to(output.dtype)
        return output

    def _attend(self, queries: torch.Tensor, cache: KVCache, layer: int, group: TileGroup, height: int) -> torch.Tensor:
        """Returns the outputs of a group's tiles, [S, P, kv_heads, group, head_dim] float32.

        Args:
            queries: [S, P, heads, head_dim] float32, of the tiles' positions.
            cache: Holds their keys and values.
            layer: Which of the stage's layers, from 0.
            group: The tiles.
            height: Rows of a tile.
        """
        keys, values = (_blocks(part) for part in cache.read(layer, group.runs))
        blocks, kv_heads, _, head_dim = keys.shape
        tiles, positions = group.rows.shape
        per_head = self.shapes.group
        product = self.shapes.product
        by_tile = queries.view(tiles, positions, kv_heads, per_head, head_dim)
        rows = by_tile.transpose(1, 2).reshape(tiles, kv_heads, positions * per_head, head_dim)
        rows = functional.pad(rows, (0, 0, 0, height - positions * per_head))
        of_block = rows[group.tile_of].reshape(-1, height, head_dim)
        scores = product(of_block, keys.flatten(0, 1).transpose(1, 2)).view(blocks, kv_heads, height, KEY_BLOCK)
        seen = scores[:, :, : positions * per_head].view(blocks, kv_heads, positions, per_head, KEY_BLOCK)
        seen.masked_fill_(group.hidden, _NONE)
        weights = scores.sub_(_maxima(scores, group).unsqueeze(-1)).exp_()
        sums = weights.sum(dim=-1, keepdim=True)
        outputs = product(weights.view(-1, height, KEY_BLOCK), values.flatten(0, 1)).view(
            blocks, kv_heads, height, head_dim
        )
        nodes = torch.cat((outputs, sums), dim=-1)
        for left, right, into in group.levels:
            following = nodes[left]
            following.index_add_(0, into, nodes[right])
            nodes = following
        found = (nodes[..., :-1] / nodes[..., -1:])[:, :, : positions * per_head]
        return found.view(tiles, kv_heads, positions, per_head, head_dim).transpose(1, 2)


def _maxima(scores: torch.Tensor, group: TileGroup) -> torch.Tensor:
    """Returns the largest score of each row over all blocks of its tile, which is exact in any order.

    Args:
        scores: [N, kv_heads, height, 64].
        group: Whose blocks these are.

    Returns:
        [N, kv_heads, height], or [1, kv_heads, height] of a single tile.
    """
    by_block = scores.amax(dim=-1)
    tiles = group.rows.shape[0]
    if tiles == 1:
        return by_block.amax(dim=0, keepdim=True)
    index = group.tile_of.view(-1, 1, 1).expand_as(by_block)
    of_tile = by_block.new_full((tiles, *by_block.shape[1:]), _NONE).scatter_reduce_(0, index, by_block, "amax")
    return of_tile[group.tile_of]


def tiled_visible(
    spans: Sequence[Span], window: int | None, shapes: AttentionShapes, device: torch.device
) -> TiledVisible:
    """Returns what the spans of a batch see; the same for all layers of one window.

    Args:
        spans: The sequences of a batch.
        window: How many positions a token sees, its own included; None is all.
        shapes: In which shapes attention runs.
        device: Where index tensors are made.
    """
    short, tall = shapes.positions(shapes.short), shapes.positions(shapes.tall)
    few = [span for span in spans if span.length <= short]
    groups = []
    if few:
        members = [(span, query_tile(span, 0, span.length, window)) for span in few]
        groups.append((_group(members, short, window, device), shapes.short))
    for span in spans:
        if span.length > short:
            for first in range(0, span.length, tall):
                tile = query_tile(span, first, min(first + tall, span.length), window)
                groups.append((_group([(span, tile)], tall, window, device), shapes.tall))
    in_order = short == 1 and len(groups) == 1 and [span.start for span in few] == list(range(len(spans)))
    return TiledVisible(tuple(groups), shapes, in_order)


def query_tile(span: Span, first: int, stop: int, window: int | None) -> QueryTile:
    """Returns a tile of some of a span's rows."""
    earliest = 0 if window is None else max(span.context_length + first - window + 1, 0)
    return QueryTile(
        span.start + first, span.start + stop, earliest // KEY_BLOCK, -(-(span.context_length + stop) // KEY_BLOCK)
    )


def _group(
    members: Sequence[tuple[Span, QueryTile]], positions: int, window: int | None, device: torch.device
) -> TileGroup:
    runs: list[tuple[int, int]] = []
    rows, firsts, hidden = [], [], []
    kept: list[int] = []
    kept_rows: list[int] = []
    tile_of: list[int] = []
    for index, (span, tile) in enumerate(members):
        own = list(range(tile.start, tile.stop))
        kept += range(index * positions, index * positions + len(own))
        kept_rows += own
        rows.append(own + own[-1:] * (positions - len(own)))
        blocks = tile.stop_block - tile.first_block
        tile_of += [index] * blocks
        firsts.append((tile.first_block, blocks))
        runs += whole_blocks(span, tile)
        first = tile.first_block * KEY_BLOCK
        at = torch.tensor(rows[-1]).add_(span.context_length - span.start).view(1, -1, 1)
        keys = torch.arange(first, first + blocks * KEY_BLOCK).view(blocks, 1, KEY_BLOCK)
        unseen = keys > at
        hidden.append(unseen if window is None else unseen | (keys <= at - window))
    return TileGroup(
        tuple(runs),
        torch.tensor(rows, device=device),
        torch.tensor(kept, device=device),
        torch.tensor(kept_rows, device=device),
        torch.tensor(tile_of, device=device),
        torch.cat(hidden)[:, None, :, None].to(device),
        _levels(firsts, device),
    )


def whole_blocks(span: Span, tile: QueryTile) -> list[tuple[int, int]]:
    """Returns the slots of a tile's blocks; those of the sequence's first tokens where there are no more.

    What is filled up with is seen by nobody, but it has to be finite: other slots may hold anything.
    """
    stop = min(tile.stop_block * KEY_BLOCK, span.total_length)
    runs = list(cut_runs(_first(span.runs, stop), tile.first_block * KEY_BLOCK))
    missing = tile.stop_block * KEY_BLOCK - stop
    while missing:
        more = _first(span.runs, missing)
        runs += more
        missing -= sum(length for _, length in more)
    return runs


def _first(runs: Runs, tokens: int) -> Runs:
    """Returns the slots of the first tokens, at most so many."""
    taken = []
    for slot, length in runs:
        if tokens <= 0:
            break
        taken.append((slot, min(length, tokens)))
        tokens -= length
    return tuple(taken)


def _levels(firsts: Sequence[tuple[int, int]], device: torch.device) -> tuple[TreeLevel, ...]:
    """Returns the tree over each tile's blocks: neighbours by absolute number are added, one alone goes up as it is.

    Args:
        firsts: Each tile's first block and how many it has; their nodes lie one after the other.
        device: Where index tensors are made.
    """
    levels: list[TreeLevel] = []
    runs = list(firsts)
    while any(count > 1 for _, count in runs):
        left: list[int] = []
        right: list[int] = []
        into: list[int] = []
        following = []
        place = 0
        for first, count in runs:
            start, at = len(left), 0
            while at < count:
                left.append(place + at)
                if (first + at) % 2 == 0 and at + 1 < count:
                    right.append(place + at + 1)
                    into.append(len(left) - 1)
                    at += 1
                at += 1
            following.append((first // 2, len(left) - start))
            place += count
        levels.append(
            TreeLevel(*(torch.tensor(part, dtype=torch.int64, device=device) for part in (left, right, into)))
        )
        runs = following
    return tuple(levels)


def _blocks(part: torch.Tensor) -> torch.Tensor:
    """Returns [1, kv_heads, N · 64, head_dim] as [N, kv_heads, 64, head_dim], contiguous float32."""
    _, kv_heads, tokens, head_dim = part.shape
    by_block = part.view(kv_heads, tokens // KEY_BLOCK, KEY_BLOCK, head_dim).transpose(0, 1)
    return by_block.to(torch.float32, memory_format=torch.contiguous_format).contiguous()
