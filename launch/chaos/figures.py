"""Figures over many cells."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Of some seconds.

    Args:
        count: How many there are.
        p50: Half are at most this.
        p90: Nine in ten are.
        most: All are.
    """

    count: int
    p50: float
    p90: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles | None:
        """Returns those of ``values``; None when there are none."""
        ordered = sorted(values)
        if not ordered:
            return None
        last = len(ordered) - 1
        return cls(count=len(ordered), p50=ordered[last // 2], p90=ordered[-(-9 * last // 10)], most=ordered[-1])

    def sentence(self) -> str:
        """Returns them as words."""
        return f"p50 {self.p50:.2f} s, p90 {self.p90:.2f} s, at most {self.most:.2f} s ({self.count})"


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """How often something was right.

    Args:
        right: Times it was.
        of: Times it could have been.
    """

    right: int
    of: int

    @classmethod
    def count(cls, answers: Sequence[bool | None]) -> Score:
        """Returns how many are true; None = could not have been."""
        given = [answer for answer in answers if answer is not None]
        return cls(right=sum(given), of=len(given))

    def sentence(self) -> str:
        """Returns it as words."""
        return f"{self.right} of {self.of}"
