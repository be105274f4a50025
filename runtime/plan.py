"""A step's plan: which sequences run, over which of their tokens, and which of them sample."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b


class DesyncError(RuntimeError):
    """This rank is not in step with another: it must not go on.

    Args:
        message: One line that names rank, step and both sides.
        rank: This rank, counted over all stages.
        step: The step in which it shows.
        own: This rank's digest.
        other: The other rank's.
    """

    def __init__(self, message: str, *, rank: int, step: int, own: int | None = None, other: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.step = step
        self.own = own
        self.other = other


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One sequence's part in a step.

    Args:
        sequence_id: Which sequence.
        start: The position of its first token in this step; its context before it is already computed.
        length: How many of its tokens run.
        samples: Whether the last of them yields a new token.
        constrained: Whether that token needs a grammar mask.
        new_blocks: The KV blocks that it got since its last row, in the order of its tokens.
        copied: The block whose contents the one that holds ``start`` begins with, copied before the step; −1 = none.
        scores: Whether each of its tokens tells the logprob of the next token of the prompt.
        reports: Whether the new token's logprobs or support are reported.
        draft: What is guessed to follow the newest token: its ``length`` counts them, each yields a token too.
    """

    sequence_id: int
    start: int
    length: int
    samples: bool
    constrained: bool
    new_blocks: tuple[int, ...] = ()
    copied: int = -1
    scores: bool = False
    reports: bool = False
    draft: tuple[int, ...] = ()


def logit_rows(row: PlanRow) -> int:
    """Returns how many of a row's tokens, from the last one back, need logits."""
    return row.length if row.scores else int(row.samples) + len(row.draft)


@dataclass(frozen=True)
class StepPlan:
    """What a step runs; every rank derives the same plan, and ``digest`` shows it.

    Args:
        step: The step number.
        rows: The sequences that run, in row order.
        preempted: The sequences that gave their KV blocks to others.
        digest: A signed 64-bit digest of this plan and of all plans and committed tokens before it.
    """

    step: int
    rows: tuple[PlanRow, ...]
    digest: int
    preempted: tuple[int, ...] = ()

    @cached_property
    def sampling_rows(self) -> tuple[PlanRow, ...]:
        """The row of each token that the step draws, in order: a row is there once, and once more for each guess."""
        return tuple(row for row in self.rows if row.samples for _ in range(1 + len(row.draft)))

    @cached_property
    def guessed(self) -> tuple[int, ...]:
        """For each of ``sampling_rows`` how many guessed tokens its token follows."""
        return tuple(ahead for row in self.rows if row.samples for ahead in range(1 + len(row.draft)))

    @cached_property
    def constrained_rows(self) -> tuple[int, ...]:
        """The indices within ``sampling_rows`` of the tokens that need a mask."""
        return tuple(index for index, row in enumerate(self.sampling_rows) if row.constrained)

    @cached_property
    def has_reports(self) -> bool:
        """Whether the leader is told more than token ids."""
        return any(row.scores or row.reports for row in self.rows)

    @cached_property
    def is_answered(self) -> bool:
        """Whether the last stage must say something of the step that it can only know when all ranks ran it."""
        return any(row.samples or (row.scores and row.length > 1) for row in self.rows)

    @property
    def num_tokens(self) -> int:
        """How many tokens run."""
        return sum(row.length for row in self.rows)


class PlanDigest:
    """A hash chain over what replicas must agree on."""

    def __init__(self) -> None:
        self._state = blake2b(digest_size=8)

    @property
    def value(self) -> int:
        """The digest so far, as a signed 64-bit integer."""
        return int.from_bytes(self._state.digest(), "little", signed=True)

    def update_rows(self, step: int, rows: tuple[PlanRow, ...], preempted: tuple[int, ...] = ()) -> int:
        """Adds a plan; returns the digest up to it as a signed 64-bit integer."""
        values = [step, len(rows), len(preempted), *preempted]
        for row in rows:
            flags = row.samples | row.constrained << 1 | row.scores << 2 | row.reports << 3
            values += (row.sequence_id, row.start, row.length, flags, row.copied, len(row.new_blocks), *row.new_blocks)
            values += (len(row.draft), *row.draft)
        self._state.update(struct.pack(f"<{len(values)}q", *values))
        return self.value

    def update_tokens(self, step: int, token_ids: list[int], statuses: list[int]) -> None:
        """Adds a step's committed tokens."""
        self._state.update(struct.pack(f"<q{2 * len(token_ids)}q", step, *token_ids, *statuses))
