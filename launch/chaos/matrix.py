"""How many cells of a fault matrix are run, and which of them by name."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Literal

Matrix = Literal["quick", "pairwise", "full"]
"""``quick``: each kind once; ``pairwise``: any two values together; ``full``: every combination that can be."""


def is_named(name: str, patterns: Sequence[str]) -> bool:
    """Returns whether a cell's name fits one of ``patterns``, or there are none."""
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
