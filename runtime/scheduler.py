"""The replicated scheduler: a pure function of actions, verdicts and token ids, the same on every rank.

It reads no clock, does no I/O and draws nothing at random; sets and dicts are only iterated in insertion order. First
come, first served: sequences that run already go first, then waiting ones while rows, tokens and KV entries last. A
sequence whose grammar is not agreed ready is not scheduled and delays nobody.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from grammar_sync.agreement import Verdict
from runtime.messages import ErrorInfo, FinishReason
from runtime.plan import PlanDigest, PlanRow, StepPlan
from runtime.sequence import Sequence, SequenceState


@dataclass(frozen=True)
class SchedulerLimits:
    """How much may run at once.

    Args:
        max_num_seqs: Sequences that run at once.
        max_batch_tokens: Tokens of one step.
        kv_cache_tokens: KV entries of all running sequences together.
        in_flight_steps: Steps that may be under way at once: one per pipeline stage.
        max_scored_tokens: Prompt tokens of one step whose logprobs are reported: each needs a row of logits.
    """

    max_num_seqs: int
    max_batch_tokens: int
    kv_cache_tokens: int
    in_flight_steps: int
    max_scored_tokens: int = 256


class Scheduler:
    """Every sequence this engine knows, and what runs next."""

    def __init__(self, limits: SchedulerLimits, eos_token_ids: Iterable[int]) -> None:
        self._limits = limits
        self._eos_token_ids = frozenset(eos_token_ids)
        self._sequences: dict[int, Sequence] = {}
        self._waiting_for_grammar: dict[int, Sequence] = {}
        self._waiting: dict[int, Sequence] = {}
        self._running: dict[int, Sequence] = {}
        self._kv_tokens = 0
        self._digest = PlanDigest()

    @property
    def waiting_for_grammar(self) -> tuple[int, ...]:
        """The sequences whose grammar is not agreed yet, in arrival order."""
        return tuple(self._waiting_for_grammar)

    @property
    def digest(self) -> int:
        """A signed 64-bit digest of all that was planned and committed so far."""
        return self._digest.value

    @property
    def has_work(self) -> bool:
        """Whether a sequence waits or runs, those that wait for a grammar not counted."""
        return bool(self._waiting or self._running)

    def __getitem__(self, sequence_id: int) -> Sequence:
        return self._sequences[sequence_id]

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._sequences

    def add(self, sequence: Sequence) -> None:
        """Takes a new sequence; its id must be larger than all before."""
        self._sequences[sequence.sequence_id] = sequence
        queue = self._waiting if sequence.state is SequenceState.WAITING else self._waiting_for_grammar
        queue[sequence.sequence_id] = sequence

    def end(self, sequence_id: int, reason: FinishReason, error: ErrorInfo | None = None) -> Sequence | None:
        """Ends a sequence before its own end; returns it, or None when it is unknown or finished already."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None or sequence.state is SequenceState.FINISHED:
            return None
        sequence.finish(reason, error)
        self._waiting_for_grammar.pop(sequence_id, None)
        self._waiting.pop(sequence_id, None)
        return sequence

    def apply(self, verdict: Verdict) -> list[Sequence]:
        """Lets the sequences whose grammar is ready wait for their turn; returns those whose grammar failed, ended."""
        failed = []
        for failure in verdict.failed:
            waiting = self._sequences.get(failure.request_id)
            kind = waiting.grammar.kind if waiting is not None and waiting.grammar is not None else None
            error = ErrorInfo("grammar_error", f"{kind}: {failure.message}", kind)
            sequence = self.end(failure.request_id, "error", error)
            if sequence is not None:
                failed.append(sequence)
        for sequence_id in verdict.ready:
            sequence = self._waiting_for_grammar.pop(sequence_id)
            sequence.state = SequenceState.WAITING
            self._waiting[sequence_id] = sequence
        if verdict.ready:
            self._waiting = dict(sorted(self._waiting.items()))
        return failed

    def release_finished(self, step: int) -> list[Sequence]:
        """Forgets the sequences that are finished and not in flight; returns them, so that their KV can be freed.

        A sequence whose prefill others share stays until the step in which they can first take it over has ended.
        """
        shared = {sequence.prefill_of for sequence in self._waiting.values()}
        released = [
            sequence
            for sequence in self._sequences.values()
            if sequence.state is SequenceState.FINISHED
            and not sequence.in_flight
            and not (sequence.sequence_id in shared and sequence.prompt_step in (step - 1, step))
        ]
        for sequence in released:
            sequence_id = sequence.sequence_id
            del self._sequences[sequence_id]
            if self._running.pop(sequence_id, None) is not None:
                self._kv_tokens -= sequence.capacity_tokens
        return released

    def plan(self, step: int) -> StepPlan:
        """Returns what this step runs and marks it as in flight; no rows when nothing can run.

        With several steps in flight each takes an even share of the sequences, so that all stages have work.
        """
        limits = self._limits
        active = min(len(self._running) + len(self._waiting), limits.max_num_seqs)
        share = -(-active // limits.in_flight_steps)
        budget, scored_budget = limits.max_batch_tokens, limits.max_scored_tokens
        rows: list[PlanRow] = []
        for sequence in self._candidates(step):
            if len(rows) >= share or budget <= 0:
                break
            scores = sequence.scores_prompt and sequence.num_computed < len(sequence.prompt_token_ids)
            if scores and scored_budget <= 0:
                continue
            row = self._row(step, sequence, min(budget, scored_budget) if scores else budget, scores=scores)
            rows.append(row)
            budget -= row.length
            scored_budget -= row.length if scores else 0
        return StepPlan(step, tuple(rows), self._digest.update_rows(step, tuple(rows)))

    def commit(self, plan: StepPlan, token_ids: list[int], errors: list[ErrorInfo | None]) -> list[int]:
        """Appends a step's tokens to its sampling rows; returns the indices of those that were not ended meanwhile.

        Args:
            plan: A plan that is in flight.
            token_ids: One id for each of ``plan.sampling_rows``.
            errors: What went wrong with each of them, if something did.
        """
        for row in plan.rows:
            self._sequences[row.sequence_id].in_flight = False
        self._digest.update_tokens(plan.step, token_ids, [int(error is not None) for error in errors])
        committed = []
        for index, (row, token_id, error) in enumerate(zip(plan.sampling_rows, token_ids, errors, strict=True)):
            sequence = self._sequences[row.sequence_id]
            if sequence.state is SequenceState.FINISHED:
                continue
            committed.append(index)
            if error is not None:
                sequence.finish("error", error)
                continue
            sequence.output_token_ids.append(token_id)
            reason = sequence.reason_to_finish(self._eos_token_ids)
            if reason is not None:
                sequence.finish(reason)
        return committed

    def finish_scored(self, plan: StepPlan) -> list[Sequence]:
        """Ends the sequences of a committed plan that only wanted their prompt scored and have it; returns them."""
        scored = []
        for row in plan.rows:
            sequence = self._sequences[row.sequence_id]
            whole = row.start + row.length == len(sequence.prompt_token_ids)
            if sequence.max_tokens == 0 and whole and sequence.state is not SequenceState.FINISHED:
                sequence.finish("length")
                scored.append(sequence)
        return scored

    def _candidates(self, step: int) -> Iterable[Sequence]:
        """Yields running sequences that are not in flight, then waiting ones while there is room for them.

        A sequence that shares a prefill which is still under way waits for it and delays nobody.
        """
        for sequence in self._running.values():
            if not sequence.in_flight and sequence.state is SequenceState.RUNNING:
                yield sequence
        for sequence in tuple(self._waiting.values()):
            if len(self._running) >= self._limits.max_num_seqs:
                return
            shared = self._shared_prefill(sequence)
            if shared is not None and (shared.prompt_step is None or shared.prompt_step >= step):
                continue
            if self._kv_tokens + sequence.capacity_tokens > self._limits.kv_cache_tokens:
                return
            yield sequence

    def _shared_prefill(self, sequence: Sequence) -> Sequence | None:
        """Returns the sequence whose prefill this one takes over, if it is there and will be computed or was."""
        shared = None if sequence.prefill_of is None else self._sequences.get(sequence.prefill_of)
        if shared is None or (shared.state is SequenceState.FINISHED and shared.prompt_step is None):
            return None
        return shared

    def _row(self, step: int, sequence: Sequence, budget: int, *, scores: bool) -> PlanRow:
        fork_of = -1
        if sequence.state is SequenceState.WAITING:
            shared = self._shared_prefill(sequence)
            if shared is not None:
                # The last prompt token runs again: its logits are what this sequence draws its first token from.
                fork_of, sequence.num_computed = shared.sequence_id, len(sequence.prompt_token_ids) - 1
            del self._waiting[sequence.sequence_id]
            self._running[sequence.sequence_id] = sequence
            self._kv_tokens += sequence.capacity_tokens
            sequence.state = SequenceState.RUNNING
        start = sequence.num_computed
        length = min(sequence.num_tokens - start, budget)
        sequence.num_computed = start + length
        sequence.in_flight = True
        if sequence.prompt_step is None and sequence.num_computed >= len(sequence.prompt_token_ids):
            sequence.prompt_step = step
        samples = sequence.num_computed == sequence.num_tokens and sequence.max_tokens > 0
        return PlanRow(
            sequence_id=sequence.sequence_id,
            start=start,
            length=length,
            samples=samples,
            constrained=samples and sequence.is_constrained,
            fork_of=fork_of,
            scores=scores,
            reports=samples and (sequence.params.has_logprobs or sequence.params.return_support),
        )
