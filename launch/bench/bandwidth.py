"""How fast this machine's memory is, as a copy sees it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np

_BYTES = 1 << 28


def copy_bytes_per_s(threads: int) -> float:
    """Returns the bytes a second that a large copy reads and writes, best of three."""
    source, target = np.ones(_BYTES, dtype=np.uint8), np.zeros(_BYTES, dtype=np.uint8)
    cuts = [_BYTES * index // threads for index in range(threads + 1)]
    parts = [slice(first, stop) for first, stop in pairwise(cuts)]

    def copy(part: slice) -> None:
        target[part] = source[part]

    best_s = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(3):
            started_s = time.perf_counter()
            list(pool.map(copy, parts))
            best_s = min(best_s, time.perf_counter() - started_s)
    return 2 * _BYTES / best_s
