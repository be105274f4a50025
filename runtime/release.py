"""One agreed step late: nothing that a step committed leaves the leader before all ranks are known to have the same.

Ranks compare digests of all before a step as the step begins, and a step only comes to its end when every rank passed
that. So what was committed in a step may leave when a later step has come to its end. Where none is about to, an extra
round takes its place (``runtime.consensus``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from runtime.held_outputs import HeldOutputs
from runtime.messages import EngineMessage, Finished, PromptInfo, TokenDelta
from runtime.output_check import CheckJob
from runtime.plan import StepPlan


class _Late(NamedTuple):
    """A message, the step that it is of, and for a finished output what is to be checked of it."""

    step: int
    message: PromptInfo | TokenDelta | Finished
    sequence_id: int = -1
    job: CheckJob | None = None


class ReleaseClock:
    """Which steps told the leader's client something that is not agreed yet; equal on all ranks."""

    def __init__(self) -> None:
        self._told: deque[int] = deque()

    @property
    def is_pending(self) -> bool:
        """Whether anything waits to be agreed."""
        return bool(self._told)

    def tell(self, step: int) -> None:
        """Notes that ``step``, which is not smaller than the one told of before, has something to say."""
        if not self._told or self._told[-1] != step:
            self._told.append(step)

    def agree(self, before_step: int) -> None:
        """Notes that all ranks had the same in all steps before ``before_step``."""
        while self._told and self._told[0] < before_step:
            self._told.popleft()

    def needs_round(self, step: int, under_way: Iterable[StepPlan]) -> bool:
        """Returns whether something of a step before ``step`` waits, and no step under way can show that it is agreed.

        Args:
            step: The current one.
            under_way: The plans that are not committed, the current step's among them.
        """
        shown = max((plan.step for plan in under_way if plan.is_answered), default=0)
        return any(shown <= told < step for told in self._told)


class LateMessages:
    """The leader's messages about sequences, in order, until they are agreed.

    Args:
        held: Holds finished outputs back for longer, until they are checked; None when nobody checks.
    """

    def __init__(self, held: HeldOutputs | None) -> None:
        self._held = held
        self._step = 0
        self._waiting: deque[_Late] = deque()

    def begin_step(self, step: int) -> None:
        """Takes the step that messages are of from now on."""
        self._step = step

    def add(self, message: PromptInfo | TokenDelta) -> None:
        """Takes a message of the current step."""
        self._waiting.append(_Late(self._step, message))

    def finish(self, sequence_id: int, finished: Finished, job: CheckJob | None) -> None:
        """Takes the end of a sequence's output in the current step, and what is to be checked of it, if anything."""
        self._waiting.append(_Late(self._step, finished, sequence_id, job))

    def agreed(self, before_step: int) -> list[EngineMessage]:
        """Returns the messages of all steps before ``before_step`` that need no check; the others' checks begin."""
        ready: list[EngineMessage] = []
        while self._waiting and self._waiting[0].step < before_step:
            late = self._waiting.popleft()
            if self._held is not None and late.job is not None and isinstance(late.message, Finished):
                self._held.hold(late.sequence_id, late.message, late.job)
            else:
                ready.append(late.message)
        return ready
