"""What many samples of a time come to."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec


class Spread(msgspec.Struct, frozen=True):
    """Milliseconds of many samples.

    Args:
        median_ms: Median.
        p90_ms: 90th percentile.
        p99_ms: 99th percentile.
        min_ms: Smallest.
    """

    median_ms: float
    p90_ms: float
    p99_ms: float
    min_ms: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """Returns the figures of some samples, at least one."""
        ordered = sorted(1000.0 * one for one in seconds)
        last = len(ordered) - 1
        return cls(statistics.median(ordered), ordered[-(-9 * last // 10)], ordered[-(-99 * last // 100)], ordered[0])
