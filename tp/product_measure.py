"""Times the modes of a product on this machine, for a choice that all ranks then share."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from tp.products import Product, ProductFactory, ProductMode

_ROWS = (1, 8, 32)
_WEIGHTS = 4
_MOST_ELEMENTS = 1 << 24
_MIN_ROUNDS, _MAX_ROUNDS = 2, 8
_LIMIT_S = 0.5
# What is expected to be faster has to be this much slower before it is given up: noise must not change results.
_MARGIN = 1.25


def onednn_supports(dtype: torch.dtype) -> bool:
    """Returns whether this process can compute products of ``dtype`` with oneDNN."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call] # torch says no type
    if not (available and torch.backends.mkldnn.enabled):
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001 - the op has no public name
    return dtype is torch.float32


def measure_products(
    out_features: int, in_features: int, dtypes: tuple[torch.dtype, ...]
) -> dict[tuple[torch.dtype, ProductMode], float]:
    """Returns the seconds that products take in each dtype and mode this process has, best of a few turns each.

    Summed over 1, 8 and 32 rows; one turn goes through several weights, so that they do not all stay in a cache.

    Args:
        out_features: Rows of the weights; fewer are taken of large ones.
        in_features: Columns of the weights.
        dtypes: Which dtypes.
    """
    out_features = max(min(out_features, _MOST_ELEMENTS // in_features), 1)
    contestants: dict[tuple[torch.dtype, ProductMode], list[Product]] = {}
    inputs = {dtype: [torch.ones(rows, in_features, dtype=dtype) for rows in _ROWS] for dtype in dtypes}
    for dtype in dtypes:
        weights = [torch.full((out_features, in_features), 0.5, dtype=dtype) for _ in range(_WEIGHTS)]
        for mode in ProductMode:
            if mode is ProductMode.PLAIN or onednn_supports(dtype):
                contestants[dtype, mode] = [ProductFactory(mode).make(weight) for weight in weights]
    best = {(key, rows): float("inf") for key in contestants for rows in _ROWS}
    started_s = time.perf_counter()
    for turn in range(_MAX_ROUNDS):
        if turn >= _MIN_ROUNDS and time.perf_counter() - started_s > _LIMIT_S:
            break
        for key, products in contestants.items():
            for rows, x in zip(_ROWS, inputs[key[0]], strict=True):
                before_s = time.perf_counter()
                for product in products:
                    product(x)
                best[key, rows] = min(best[key, rows], time.perf_counter() - before_s)
    return {key: sum(best[key, rows] for rows in _ROWS) for key in contestants}


def faster_mode(seconds: Mapping[tuple[torch.dtype, ProductMode], float], dtype: torch.dtype) -> ProductMode:
    """Returns oneDNN's mode unless it is missing, or clearly slower."""
    plain, onednn = (seconds.get((dtype, mode)) for mode in (ProductMode.PLAIN, ProductMode.ONEDNN))
    if onednn is None or (plain is not None and onednn > _MARGIN * plain):
        return ProductMode.PLAIN
    return ProductMode.ONEDNN


def bfloat16_pays(seconds: Mapping[tuple[torch.dtype, ProductMode], float]) -> bool:
    """Returns whether products in bfloat16 are not clearly slower than in float32, each in its faster mode."""
    narrow, wide = (seconds[dtype, faster_mode(seconds, dtype)] for dtype in (torch.bfloat16, torch.float32))
    return narrow <= _MARGIN * wide
