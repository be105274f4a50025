"""What a rank does with grammars: the first stage compiles, masks and accepts; later stages are told.

Both roles have the same methods, so that the step loop is the same on every rank.
"""

from __future__ import annotations

import logging
from typing import Protocol

from grammar_sync.agreement import Verdict, agree
from grammar_sync.manager import GrammarManager, GrammarRefusal, MasksUnderWay
from grammar_sync.masks import MaskExchange, RowFault, checksums_digest
from grammar_sync.relay import relay_verdict
from pp.link import StageLink
from runtime.plan import DesyncError, StepPlan
from runtime.rank_status import RankStatus
from runtime.sequence import Sequence

_LOG = logging.getLogger(__name__)


class GrammarRole(Protocol):
    """A rank's part in grammars."""

    def add(self, sequence: Sequence) -> None:
        """Begins to compile a new sequence's grammar, if it has one."""

    def agree(self, step: int, waiting: tuple[int, ...], /) -> Verdict:
        """Returns the stage's verdict on the waiting sequences; every rank calls it in the same step."""

    def begin_masks(self, plan: StepPlan) -> None:
        """Begins to fill the masks of a plan's constrained rows, beside the forward pass."""

    def send_masks(self, plan: StepPlan, /) -> tuple[int, ...] | None:
        """Sends the masks that were begun to the last stage; returns each row's checksum, None on later stages."""

    def accept(self, sequence: Sequence, /) -> str | None:
        """Advances a sequence's grammar by its newest token; returns why it refused, or None."""

    def release(self, sequence: Sequence) -> None:
        """Forgets a sequence."""


class FirstStageGrammars:
    """A first-stage rank's part: it compiles by itself and agrees with its stage before anything is scheduled."""

    def __init__(self, manager: GrammarManager, masks: MaskExchange, status: RankStatus) -> None:
        self._manager = manager
        self._masks = masks
        self._status = status
        self._group = status.group
        self._link = status.link
        self._outputs: dict[int, list[int]] = {}
        self._under_way: MasksUnderWay | None = None

    def add(self, sequence: Sequence) -> None:
        """Begins to compile a new sequence's grammar, if it has one."""
        if sequence.grammar is not None:
            self._manager.submit(sequence.sequence_id, sequence.grammar)
            self._outputs[sequence.sequence_id] = sequence.output_token_ids
        if sequence.thinking is not None:
            self._manager.think_first(sequence.sequence_id, sequence.thinking)
            if sequence.grammar is None:
                self._replay(sequence.sequence_id, sequence.output_token_ids)

    def agree(self, step: int, waiting: tuple[int, ...]) -> Verdict:
        """Returns the verdict: ready on every rank of the stage, or failed on any."""
        verdict = agree(self._group, step, self._manager.local_report(waiting), waiting)
        relay_verdict(self._link, verdict)
        self._manager.adopt(verdict.vetted)
        for sequence_id in verdict.ready:
            self._replay(sequence_id, self._outputs.pop(sequence_id))
        return verdict

    def begin_masks(self, plan: StepPlan) -> None:
        """Begins to fill the masks of a plan's constrained rows, in row order."""
        if plan.constrained_rows:
            rows = [row for row in plan.rows if row.constrained]
            self._under_way = self._manager.begin_masks([row.sequence_id for row in rows], [row.draft for row in rows])

    def send_masks(self, plan: StepPlan) -> tuple[int, ...] | None:
        """Sends this rank's vocabulary slice of the masks that were begun; waits for those that are not filled yet.

        Returns the checksum of each whole row.

        Raises:
            DesyncError: No masks were begun for this plan.
        """
        if not plan.constrained_rows:
            return ()
        if self._under_way is None:
            raise DesyncError(
                f"{self._group.name} rank {self._group.rank}, step {plan.step}: no masks were begun",
                rank=self._group.global_rank,
                step=plan.step,
            )
        under_way, self._under_way = self._under_way, None
        filled = self._manager.finish_masks(under_way)
        columns = (under_way.sequence_ids, under_way.guessed, filled.faults, filled.messages)
        for sequence_id, guessed, fault, message in zip(*columns, strict=True):
            if fault is not RowFault.NONE and guessed == 0:
                _LOG.error("step %d: no mask for sequence %d (%s): %s", plan.step, sequence_id, fault.name, message)
        checksums = self._masks.send(plan.constrained_rows, filled.words, filled.faults)
        if not any(filled.faults):
            self._status.note_masks(plan.step, checksums_digest(checksums))
        return checksums

    def accept(self, sequence: Sequence) -> str | None:
        """Advances a sequence's grammar by its newest token; returns why it refused, or None.

        A refusal that this rank alone sees ends the sequence through its next mask.
        """
        if not sequence.is_constrained:
            return None
        try:
            self._manager.accept(sequence.sequence_id, sequence.output_token_ids[-1])
        except GrammarRefusal as refusal:
            _LOG.error("%s", refusal)
            return str(refusal)
        return None

    def release(self, sequence: Sequence) -> None:
        """Forgets a sequence."""
        if sequence.is_constrained:
            self._outputs.pop(sequence.sequence_id, None)
            self._manager.release(sequence.sequence_id)

    def _replay(self, sequence_id: int, token_ids: list[int]) -> None:
        """Starts a sequence behind the output that it came with; one that is refused ends through its next mask."""
        try:
            self._manager.replay(sequence_id, token_ids)
        except GrammarRefusal as refusal:
            _LOG.error("%s", refusal)


class LaterStageGrammars:
    """A later stage's part: it holds neither tokenizer nor compiler and never waits for a compile."""

    def __init__(self, link: StageLink) -> None:
        self._link = link

    def add(self, sequence: Sequence) -> None:
        """Does nothing: the first stage compiles."""

    def agree(self, _step: int, _waiting: tuple[int, ...], /) -> Verdict:
        """Returns the first stage's verdict, after passing it on."""
        return relay_verdict(self._link, None)

    def begin_masks(self, plan: StepPlan) -> None:
        """Does nothing: the first stage fills masks."""

    def send_masks(self, _plan: StepPlan, /) -> tuple[int, ...] | None:
        """Returns None: the first stage sends masks."""
        return None

    def accept(self, _sequence: Sequence, /) -> str | None:
        """Returns None: the first stage accepts."""
        return None

    def release(self, sequence: Sequence) -> None:
        """Does nothing."""
