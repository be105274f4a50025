"""What a rank does with grammars: the first stage compiles, masks and accepts; later stages are told.

Both roles have the same methods, so that the step loop is the same on every rank.
"""

from __future__ import annotations

from typing import Protocol

from grammar_sync.agreement import Verdict, agree
from grammar_sync.manager import GrammarManager, GrammarRefusal
from grammar_sync.masks import MaskExchange
from grammar_sync.relay import relay_verdict
from pp.link import StageLink
from runtime.plan import DesyncError, StepPlan
from runtime.sequence import Sequence
from tp.group import TensorParallelGroup


class GrammarRole(Protocol):
    """A rank's part in grammars."""

    def add(self, sequence: Sequence) -> None:
        """Begins to compile a new sequence's grammar, if it has one."""

    def agree(self, step: int, waiting: tuple[int, ...]) -> Verdict:
        """Returns the stage's verdict on the waiting sequences; every rank calls it in the same step."""

    def send_masks(self, plan: StepPlan) -> None:
        """Fills the masks of a plan's constrained rows and sends them to the last stage."""

    def accept(self, sequence: Sequence) -> str | None:
        """Advances a sequence's grammar by its newest token; returns why it refused, or None."""

    def release(self, sequence: Sequence) -> None:
        """Forgets a sequence."""


class FirstStageGrammars:
    """A first-stage rank's part: it compiles by itself and agrees with its stage before anything is scheduled."""

    def __init__(
        self, manager: GrammarManager, masks: MaskExchange, group: TensorParallelGroup, link: StageLink
    ) -> None:
        self._manager = manager
        self._masks = masks
        self._group = group
        self._link = link
        self._refused: set[int] = set()

    def add(self, sequence: Sequence) -> None:
        """Begins to compile a new sequence's grammar, if it has one."""
        if sequence.grammar is not None:
            self._manager.submit(sequence.sequence_id, sequence.grammar)

    def agree(self, step: int, waiting: tuple[int, ...]) -> Verdict:
        """Returns the verdict: ready on every rank of the stage, or failed on any."""
        verdict = agree(self._group, step, self._manager.local_report(waiting), waiting)
        relay_verdict(self._link, verdict)
        for sequence_id in verdict.ready:
            self._manager.start(sequence_id)
        return verdict

    def send_masks(self, plan: StepPlan) -> None:
        """Fills the masks of a plan's constrained rows, in row order; sends this rank's vocabulary slice of them."""
        if not plan.constrained_rows:
            return
        rows = plan.sampling_rows
        sequence_ids = [rows[index].sequence_id for index in plan.constrained_rows]
        stale = self._refused.intersection(sequence_ids)
        if stale:
            raise DesyncError(
                f"{self._group.name} rank {self._group.rank}, step {plan.step}: the grammars of sequences "
                f"{sorted(stale)} refused a token here but not on the leader"
            )
        self._masks.send(plan.constrained_rows, self._manager.fill_masks(sequence_ids))

    def accept(self, sequence: Sequence) -> str | None:
        """Advances a sequence's grammar by its newest token; returns why it refused, or None."""
        if sequence.grammar is None:
            return None
        try:
            self._manager.accept(sequence.sequence_id, sequence.output_token_ids[-1])
        except GrammarRefusal as refusal:
            self._refused.add(sequence.sequence_id)
            return str(refusal)
        return None

    def release(self, sequence: Sequence) -> None:
        """Forgets a sequence."""
        if sequence.grammar is not None:
            self._refused.discard(sequence.sequence_id)
            self._manager.release(sequence.sequence_id)


class LaterStageGrammars:
    """A later stage's part: it holds neither tokenizer nor compiler and never waits for a compile."""

    def __init__(self, link: StageLink) -> None:
        self._link = link

    def add(self, sequence: Sequence) -> None:
        """Does nothing: the first stage compiles."""

    def agree(self, step: int, waiting: tuple[int, ...]) -> Verdict:  # noqa: ARG002
        """Returns the first stage's verdict, after passing it on."""
        return relay_verdict(self._link, None)

    def send_masks(self, plan: StepPlan) -> None:
        """Does nothing: the first stage fills masks."""

    def accept(self, sequence: Sequence) -> str | None:  # noqa: ARG002
        """Returns None: the first stage accepts."""
        return None

    def release(self, sequence: Sequence) -> None:
        """Does nothing."""
