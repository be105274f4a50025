"""Whose next tokens are guessed, and how far a guess may reach. Part of the replicated scheduler."""

from __future__ import annotations

from runtime.sequence import Sequence
from runtime.speculation import PromptLookup, SpeculationLimits


class Drafter:
    """Makes the drafts of a scheduler's sequences.

    Args:
        limits: How much is guessed.
        eos_token_ids: What ends an output: nothing is guessed behind it, nor itself.

    Attributes:
        drafted: Guessed tokens that were checked so far, those of sequences that ended meanwhile left out.
        accepted: Those of them that were right.
    """

    def __init__(self, limits: SpeculationLimits, eos_token_ids: frozenset[int]) -> None:
        self._limits = limits
        self._eos_token_ids = eos_token_ids
        self.drafted = 0
        self.accepted = 0

    def budget(self, idle_tokens: int) -> int:
        """Returns how many tokens a step may guess that has ``idle_tokens`` of its budget left."""
        if self._limits.draft_tokens == 0:
            return 0
        return max(min(self._limits.step_tokens, idle_tokens), 0)

    def draft(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """Returns at most ``most`` tokens that may follow those of a sequence whose newest one is about to run.

        Nothing is guessed for the first token of an output, whose row may still score the prompt, nor where logit
        processors would be asked about outputs that may never be.
        """
        # The newest token yields one without any guess.
        most = min(most, sequence.max_tokens - len(sequence.output_token_ids) - 1)
        if most <= 0 or not sequence.output_token_ids or sequence.params.logit_processors:
            return ()
        if sequence.lookup is None:
            sequence.lookup = PromptLookup(self._limits.draft_tokens)
        draft = sequence.lookup.draft(sequence.prompt_token_ids + sequence.output_token_ids, most)
        for at, token_id in enumerate(draft):
            if sequence.is_stop(token_id, self._eos_token_ids):
                return draft[:at]
        return draft

    def settle(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Takes note of how many tokens of a sequence's draft were right, after they were committed."""
        self.drafted += drafted
        self.accepted += accepted
        if sequence.lookup is not None:
            sequence.lookup.settle(drafted, accepted, sequence.num_tokens)
