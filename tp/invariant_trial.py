"""Trials of invariant mode: whether a faster way to a product gives the bits of its definition."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from tp.tiles import cut_rows

Kernel = Callable[[torch.Tensor], torch.Tensor]
TRIAL_SEED = 20_511
_TINY = 1e-40
_LARGE = 1e30


def random_rows(rows: int, features: int) -> torch.Tensor:
    """Returns the rows of a trial, [rows, features] float32."""
    return torch.randn(rows, features, generator=torch.Generator().manual_seed(TRIAL_SEED))


def rare_rows(features: int) -> torch.Tensor:
    """Returns what random rows lack, [4, features]: rows of zeros of both signs, of subnormal and of large numbers."""
    rows = random_rows(4, features)
    rows[0] = 0.0
    return rows * torch.tensor([[1.0], [-0.0], [_TINY], [_LARGE]])


def by_definition(kernel: Kernel, rows: torch.Tensor, height: int) -> torch.Tensor:
    """Returns what a kernel makes of rows in tiles of one height."""
    return torch.cat([kernel(rows[tile.start : tile.stop]) for tile in cut_rows(rows.shape[0], (height,))])


def places_are_equal(kernel: Kernel, rows: torch.Tensor, height: int) -> bool:
    """Returns whether a row has the same bits in every place of a tile."""
    tile = rows[:height]
    expected = kernel(tile)
    return all(same_bits(kernel(tile.roll(by, 0)), expected.roll(by, 0)) for by in range(1, height))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two float32 tensors of one shape are the same bits; zeros of two signs are not."""
    return torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))


def all_pass(heights: tuple[int, ...], passes: Callable[[int, int], bool]) -> tuple[int, ...]:
    """Returns the heights that pass from either of two rows on."""
    return tuple(height for height in heights if passes(height, 0) and passes(height, 3))


@contextmanager
def one_thread() -> Iterator[None]:
    """Has torch compute in one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
