"""What a sequence's grammar cost. Needs neither torch nor a grammar engine."""

from __future__ import annotations

import msgspec


class GrammarStatistics(msgspec.Struct, frozen=True):
    """What a sequence's grammar cost on this rank.

    Attributes:
        cache_hit: Whether the outcome of the compile was there when the sequence came.
        compile_s: Seconds of the compile, whoever asked for it first; 0 while it is under way or when it failed.
        queue_s: Seconds from the sequence's arrival until all ranks of the stage were ready, the compile among them.
        mask_s: Seconds of filling this sequence's mask rows.
        mask_rows: How many mask rows were filled.
    """

    cache_hit: bool
    compile_s: float
    queue_s: float
    mask_s: float
    mask_rows: int
