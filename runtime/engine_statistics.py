"""What the engine counts, as the leader tells it to the client from time to time. Needs no torch."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import msgspec

from grammar_sync.vetting.protocol import VettingCounters

STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
AGREEMENT_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
BATCH_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Histogram(msgspec.Struct):
    """How many values fell between bounds.

    Args:
        bounds: Upper bounds, ascending; a value that equals one is below it.
        counts: How many values fell below each bound and above the one before, and at last above all.
        total: The sum of all values.
    """

    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0

    @classmethod
    def of(cls, bounds: tuple[float, ...]) -> Histogram:
        """Returns an empty one."""
        return cls(bounds, [0] * (len(bounds) + 1))

    def add(self, value: float) -> None:
        """Counts a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def copy(self) -> Histogram:
        """Returns one that stays as it is."""
        return Histogram(self.bounds, list(self.counts), self.total)


@dataclass(slots=True)
class SchedulerStatistics:
    """What was planned so far, and where the KV blocks are; equal on all ranks.

    Attributes:
        waiting: Sequences that wait for rows, tokens or blocks.
        running: Sequences that have KV blocks.
        blocks: KV blocks of the pool.
        used_blocks: Those that a sequence refers to.
        cached_blocks: Those that none refers to, kept for what they hold; the rest is free.
        evicted_blocks: How often a cached block was given to another content.
        prefill_tokens: Tokens run that were not the newest one of a sequence's output.
        looked_up_tokens: Tokens of admitted sequences.
        hit_tokens: Those of them whose KV entries were there.
        preemptions: How often a sequence's blocks were taken from it.
        drafted_tokens: Guessed tokens that were checked.
        accepted_tokens: Those of them that were right.
    """

    waiting: int = 0
    running: int = 0
    blocks: int = 0
    used_blocks: int = 0
    cached_blocks: int = 0
    evicted_blocks: int = 0
    prefill_tokens: int = 0
    looked_up_tokens: int = 0
    hit_tokens: int = 0
    preemptions: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class CheckCounters(msgspec.Struct):
    """How many finished outputs came out of their check how."""

    valid: int = 0
    violation: int = 0
    unchecked: int = 0


class RankState(msgspec.Struct, frozen=True):
    """Where a rank is; times are its own since it started.

    Args:
        rank: Global rank.
        stage: Its pipeline stage.
        tp_rank: Its rank within the stage.
        beat: Grows by one each time the rank says this.
        step: The step it is in.
        digest: Of all it had planned and committed before that step, as 16 hexadecimal digits.
        step_age_s: How long ago it began the step.
        busy_steps: Steps that ran something, the latest not among them while it runs.
        busy_s: Their seconds, those of waiting for the leader's word left out.
        last_step_s: The seconds of the last one that had rows.
        wait_s: Seconds of ``busy_s`` in collectives and in waiting for other stages.
        searches: Steps in which the sampler had to search for supports; 0 but on the last stage.
        searched_rows: The rows that it searched for.
        resident_bytes: Memory that the process has.
    """

    rank: int
    stage: int
    tp_rank: int
    beat: int
    step: int
    digest: str
    step_age_s: float
    busy_steps: int
    busy_s: float
    last_step_s: float
    wait_s: float
    searches: int
    searched_rows: int
    resident_bytes: int


class HeardRank(msgspec.Struct, frozen=True):
    """A rank's state as the leader knows it.

    Args:
        state: What it said last.
        heard_age_s: How long ago the leader heard something new of it.
        skew_s: By how much it comes later to each collective of a step than the first rank of its stage, on average
            lately; 0 for the first.
    """

    state: RankState
    heard_age_s: float
    skew_s: float


class EngineStatistics(msgspec.Struct, frozen=True, tag="statistics"):
    """Leader → client: what the engine counted since it started, about once a second.

    Args:
        scheduler: What was planned, and where KV blocks are.
        waiting_for_grammar: Sequences whose grammar is not agreed yet.
        block_tokens: KV entries of a block.
        batch_rows: Rows of the steps that ran something.
        step_s: Their seconds.
        agreement_s: Seconds of each agreement on grammars, the wait for the slowest rank among them.
        vetting: What became of grammars.
        grammar_cache_bytes: Compiled grammars that the leader keeps.
        checks: What became of the checks of finished outputs; None when there are none.
        ranks: Every rank that was heard of, in order.
    """

    scheduler: SchedulerStatistics
    waiting_for_grammar: int
    block_tokens: int
    batch_rows: Histogram
    step_s: Histogram
    agreement_s: Histogram
    vetting: VettingCounters
    grammar_cache_bytes: int
    checks: CheckCounters | None
    ranks: list[HeardRank]
