"""What a rank notes of its steps, for others to see.

The step loop writes it, another thread may read it at any time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from pp.link import StageLink
from runtime.engine_statistics import (
    AGREEMENT_SECONDS,
    BATCH_ROWS,
    STEP_SECONDS,
    Histogram,
    RankState,
)
from sampler.sampler import Sampler
from tp.group import TensorParallelGroup

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STATM = Path("/proc/self/statm")
_NS = 1e9
_DIGEST_MASK = (1 << 64) - 1


class StepRecord(Protocol):
    """Told where this rank is, so that somebody else sees it."""

    def begin_step(self, step: int, digest: int, *, is_idle: bool) -> None:
        """Notes that a step begins; ``digest`` is that of all before it."""

    def begin_work(self) -> None:
        """Notes that it is known what the step is to do."""

    def begin_batch(self, tokens: int) -> None:
        """Notes how many tokens the step's batch has."""

    def note_plan(self, step: int, digest: int) -> None:
        """Keeps a digest of the plan of a step and of all before it."""

    def note_masks(self, step: int, digest: int) -> None:
        """Keeps a digest of the grammar masks of a step."""

    def note_audit(self, step: int, digest: int) -> None:
        """Keeps what an audit found before a step."""

    def beat(self) -> None:
        """Notes that this rank gets on."""


class RankStatus:
    """This rank's notes.

    Args:
        group: The rank's stage.
        link: The rank's pipeline.
        sampler: What draws; None but on the last stage.
        record: Told of every step too; None costs nothing.
        clock: The monotonic clock, in nanoseconds.
    """

    def __init__(
        self,
        group: TensorParallelGroup,
        link: StageLink,
        sampler: Sampler | None,
        record: StepRecord | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.batch_rows = Histogram.of(BATCH_ROWS)
        self.step_s = Histogram.of(STEP_SECONDS)
        self.agreement_s = Histogram.of(AGREEMENT_SECONDS)
        self.group = group
        self.link = link
        self._sampler = sampler
        self._record = record
        self._clock = clock
        self._beat = 0
        self._step = 0
        self._digest = 0
        self._step_began_ns = clock()
        self._work_began_ns = 0
        self._waited_before_ns = 0
        self._busy_steps = 0
        self._busy_ns = 0
        self._last_step_ns = 0
        self._wait_ns = 0

    def begin_step(self, step: int, digest: int, *, is_idle: bool = False) -> None:
        """Notes that a step begins.

        Args:
            step: Its number.
            digest: Of all before it.
            is_idle: Whether nothing runs, so that the leader may wait for its clients.
        """
        self._step, self._digest = step, digest
        self._step_began_ns = self._clock()
        if self._record is not None:
            self._record.begin_step(step, digest, is_idle=is_idle)

    def begin_work(self) -> None:
        """Notes that the step's actions are known: what comes now is work."""
        self._work_began_ns = self._clock()
        if self._record is not None:
            self._record.begin_work()
        self._waited_before_ns = self.group.waited_ns + self.link.waited_ns

    def note_plan(self, step: int, digest: int) -> None:
        """Notes a digest of a step's plan and of all before it."""
        if self._record is not None:
            self._record.note_plan(step, digest)

    def note_masks(self, step: int, digest: int) -> None:
        """Notes a digest of the masks that this rank filled for a step; of a step with a fault there is none."""
        if self._record is not None:
            self._record.note_masks(step, digest)

    def note_audit(self, step: int, digest: int) -> None:
        """Notes what an audit found before a step: 0 where all is well."""
        if self._record is not None:
            self._record.note_audit(step, digest)

    def begin_batch(self, tokens: int) -> None:
        """Notes how many tokens the step's batch has."""
        if self._record is not None:
            self._record.begin_batch(tokens)

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """Notes how long an agreement on grammars takes."""
        began_ns = self._clock()
        yield
        self.agreement_s.add((self._clock() - began_ns) / _NS)

    def end_step(self, rows: int, *, is_busy: bool) -> None:
        """Notes that the step ends.

        Args:
            rows: The rows of its plan.
            is_busy: Whether it planned or committed anything.
        """
        if not is_busy:
            return
        took_ns = self._clock() - self._work_began_ns
        if rows:
            self.batch_rows.add(rows)
            self._last_step_ns = took_ns
        self.step_s.add(took_ns / _NS)
        self._busy_steps += 1
        self._busy_ns += took_ns
        self._wait_ns += self.group.waited_ns + self.link.waited_ns - self._waited_before_ns

    def state(self) -> RankState:
        """Returns where this rank is now; any thread may call it, but not two."""
        self._beat += 1
        pages = int(_STATM.read_text(encoding="ascii").split()[1])
        sampler = self._sampler
        return RankState(
            rank=self.link.stage * self.group.size + self.group.rank,
            stage=self.link.stage,
            tp_rank=self.group.rank,
            beat=self._beat,
            step=self._step,
            digest=f"{self._digest & _DIGEST_MASK:016x}",
            step_age_s=(self._clock() - self._step_began_ns) / _NS,
            busy_steps=self._busy_steps,
            busy_s=self._busy_ns / _NS,
            last_step_s=self._last_step_ns / _NS,
            wait_s=self._wait_ns / _NS,
            searches=0 if sampler is None else sampler.searches,
            searched_rows=0 if sampler is None else sampler.searched_rows,
            resident_bytes=pages * _PAGE_BYTES,
        )
