"""What a sequence's grammar cost and what is to be known of it. Needs neither torch nor a grammar engine."""

from __future__ import annotations

import msgspec

from grammar_sync.engines.prepared import Engine, Finding


class GrammarStatistics(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a sequence's grammar cost on this rank, and what its client should know about it.

    Attributes:
        cache_hit: Whether the outcome of the compile was there when the sequence came.
        compile_s: Seconds of the compile, whoever asked for it first; 0 while it is under way or when it failed.
        queue_s: Seconds from the sequence's arrival until all ranks of the stage were ready, the compile among them.
        mask_s: Seconds of filling this sequence's mask rows.
        mask_rows: How many mask rows were filled.
        engine: What compiled it; None for thinking alone, or before its form is known.
        not_enforced: What the output may violate.
        rewritten: Where it allows less than was asked for, or says it in another way.
    """

    cache_hit: bool
    compile_s: float
    queue_s: float
    mask_s: float
    mask_rows: int
    engine: Engine | None = None
    not_enforced: tuple[Finding, ...] = ()
    rewritten: tuple[Finding, ...] = ()
