"""Row tiles of invariant mode: products run in a few fixed heights, whatever the number of rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch.nn import functional

_MOST_WASTE = 32


class Tile(NamedTuple):
    """Rows ``start`` to ``stop`` of a batch, computed as ``height`` rows of which the rest is zero."""

    start: int
    stop: int
    height: int


@lru_cache
def cut_rows(rows: int, heights: tuple[int, ...]) -> tuple[Tile, ...]:
    """Returns the tiles of ``rows`` rows: tall ones first, the last padded to the next height unless that is waste.

    Args:
        rows: How many rows.
        heights: The heights there are, ascending.
    """
    tiles: list[Tile] = []
    start = 0
    while start < rows:
        left = rows - start
        whole = [height for height in heights if height <= left]
        above = [height for height in heights if height >= left]
        pads = bool(above) and (not whole or above[0] - left < _MOST_WASTE)
        height = above[0] if pads else whole[-1]
        stop = min(start + height, rows)
        tiles.append(Tile(start, stop, height))
        start = stop
    return tuple(tiles)


def padded(x: torch.Tensor, tile: Tile) -> torch.Tensor:
    """Returns a tile's rows of ``x`` [T, K], with zero rows up to its height: [height, K]."""
    rows = x[tile.start : tile.stop] if tile.stop - tile.start < x.shape[0] else x
    missing = tile.height - rows.shape[0]
    return functional.pad(rows, (0, 0, 0, missing)) if missing else rows


def in_tiles(
    kernel: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    heights: tuple[int, ...],
    out_shape: tuple[int, ...],
) -> torch.Tensor:
    """Returns what ``kernel`` makes of the rows of ``x`` tile by tile, float32.

    Args:
        kernel: [height, K] to [..., height, N].
        x: [T, K].
        heights: The heights that may be used, ascending.
        out_shape: [..., T, N].
    """
    tiles = cut_rows(x.shape[0], heights)
    if len(tiles) == 1:
        y = kernel(padded(x, tiles[0]))
        return y if tiles[0].height == x.shape[0] else y[..., : x.shape[0], :]
    out = torch.empty(out_shape, dtype=torch.float32, device=x.device)
    for tile in tiles:
        out[..., tile.start : tile.stop, :] = kernel(padded(x, tile))[..., : tile.stop - tile.start, :]
    return out
