"""The replicated scheduler: a pure function of actions, verdicts and token ids, the same on every rank.

It reads no clock, does no I/O and draws nothing at random; sets and dicts are only iterated in insertion order. Whom a
step runs is decided in ``step_planner``; which KV blocks a sequence has, in ``kv_manager``. A sequence whose grammar is
not agreed ready is not scheduled and delays nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from grammar_sync.agreement import Verdict
from runtime.drafter import Drafter
from runtime.engine_statistics import SchedulerStatistics
from runtime.kv_manager import KVBlockManager
from runtime.messages import ErrorInfo, FinishReason
from runtime.plan import PlanDigest, PlanRow, StepPlan
from runtime.sequence import Sequence, SequenceState
from runtime.step_planner import SchedulerLimits, SequenceQueues, StepPlanner, enqueue


class Scheduler:
    """Every sequence this engine knows, and what runs next."""

    def __init__(self, limits: SchedulerLimits, eos_token_ids: Iterable[int]) -> None:
        self._limits = limits
        self._eos_token_ids = frozenset(eos_token_ids)
        self._sequences: dict[int, Sequence] = {}
        self._waiting_for_grammar: dict[int, Sequence] = {}
        self._waiting: dict[int, Sequence] = {}
        self._running: dict[int, Sequence] = {}
        self._queues = SequenceQueues(self._sequences, self._waiting, self._running)
        self.blocks = KVBlockManager(
            limits.kv_cache_tokens // limits.block_tokens, limits.block_tokens, prefix_cache=limits.prefix_cache
        )
        self._drafter = Drafter(limits.speculation, self._eos_token_ids)
        self._totals = SchedulerStatistics()
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
    def statistics(self) -> SchedulerStatistics:
        """Counts as of now."""
        pool = self.blocks.pool
        return replace(
            self._totals,
            waiting=len(self._waiting),
            running=len(self._running),
            blocks=pool.num_blocks,
            used_blocks=pool.used,
            cached_blocks=pool.cached,
            evicted_blocks=pool.evictions,
            drafted_tokens=self._drafter.drafted,
            accepted_tokens=self._drafter.accepted,
        )

    @property
    def has_work(self) -> bool:
        """Whether a sequence waits or runs, those that wait for a grammar not counted."""
        return bool(self._waiting or self._running)

    def __getitem__(self, sequence_id: int) -> Sequence:
        return self._sequences[sequence_id]

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._sequences

    def add(self, sequence: Sequence) -> None:
        """Takes a new sequence; its id must be larger than all before. One that came with its whole output is ended."""
        self._sequences[sequence.sequence_id] = sequence
        if sequence.state is SequenceState.WAITING_FOR_GRAMMAR:
            self._waiting_for_grammar[sequence.sequence_id] = sequence
        elif sequence.ended is not None:
            sequence.finish(sequence.ended)
        else:
            enqueue(self._waiting, sequence)

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
        """Lets the sequences whose grammar is ready wait for their turn; returns those that ended.

        These are the ones whose grammar failed, and those that came with their whole output.
        """
        ended = []
        for failure in verdict.failed:
            waiting = self._sequences.get(failure.request_id)
            kind = waiting.grammar.kind if waiting is not None and waiting.grammar is not None else None
            error = ErrorInfo("grammar_error", f"{kind}: {failure.message}", kind)
            sequence = self.end(failure.request_id, "error", error)
            if sequence is not None:
                ended.append(sequence)
        for sequence_id in verdict.ready:
            sequence = self._waiting_for_grammar.pop(sequence_id)
            if sequence.ended is not None:
                sequence.finish(sequence.ended)
                ended.append(sequence)
                continue
            sequence.state = SequenceState.WAITING
            enqueue(self._waiting, sequence)
        return ended

    def release_finished(self, step: int) -> list[Sequence]:
        """Forgets the sequences that are finished and not in flight, and frees their KV blocks; returns them.

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
            del self._sequences[sequence.sequence_id]
            self._running.pop(sequence.sequence_id, None)
            self.blocks.free(sequence)
        return released

    def plan(self, step: int) -> StepPlan:
        """Returns what this step runs and marks it as in flight; no rows when nothing can run."""
        self.blocks.begin_plan()
        planner = StepPlanner(step, self._limits, self._queues, self.blocks, self._drafter)
        planner.fill()
        self._totals.prefill_tokens += planner.prefill_tokens
        self._totals.looked_up_tokens += planner.looked_up_tokens
        self._totals.hit_tokens += planner.hit_tokens
        self._totals.preemptions += len(planner.preempted)
        rows, preempted = tuple(planner.rows), tuple(planner.preempted)
        return StepPlan(step, rows, self._digest.update_rows(step, rows, preempted), preempted)

    def commit(self, plan: StepPlan, token_ids: list[int], errors: list[ErrorInfo | None]) -> Iterator[int]:
        """Appends a step's tokens to its sequences, each when the caller asks for it.

        Yields the indices of those that were appended, or were an error, when they are the newest of their sequences:
        not those of sequences that were ended meanwhile, nor those that follow a wrong guess.

        Args:
            plan: A plan that is in flight.
            token_ids: One id for each of ``plan.sampling_rows``.
            errors: What went wrong with each of them, if something did.
        """
        drawn = tuple(zip(plan.sampling_rows, token_ids, errors, strict=True))
        for row in plan.rows:
            self._sequences[row.sequence_id].in_flight = False
        self._digest.update_tokens(plan.step, token_ids, [int(error is not None) for error in errors])
        return self._commit_drawn(drawn)

    def _commit_drawn(self, drawn: tuple[tuple[PlanRow, int, ErrorInfo | None], ...]) -> Iterator[int]:
        start = 0
        while start < len(drawn):
            row = drawn[start][0]
            stop = start + 1 + len(row.draft)
            if self._sequences[row.sequence_id].state is not SequenceState.FINISHED:
                outcomes = [(token_id, error) for _, token_id, error in drawn[start:stop]]
                yield from (start + index for index in self._commit_row(row, outcomes))
            start = stop

    def _commit_row(self, row: PlanRow, outcomes: list[tuple[int, ErrorInfo | None]]) -> Iterator[int]:
        """Appends a row's tokens up to the first that was not guessed right; yields their indices."""
        sequence = self._sequences[row.sequence_id]
        accepted = 0
        for index, (token_id, error) in enumerate(outcomes):
            if error is not None and index == 0:
                # What a computation made that went wrong is for nobody else.
                self.blocks.forget(sequence)
                sequence.finish("error", error)
                yield index
                return
            if error is not None:
                # What fails behind a guess is drawn anew without one: it fails then, or not at all.
                break
            sequence.output_token_ids.append(token_id)
            reason = sequence.reason_to_finish(self._eos_token_ids)
            is_right = index < len(row.draft) and row.draft[index] == token_id
            accepted += is_right
            if reason is not None:
                sequence.finish(reason)
            yield index
            if reason is not None or not is_right:
                break
        if row.draft:
            self._settle_draft(sequence, row, accepted)

    def _settle_draft(self, sequence: Sequence, row: PlanRow, accepted: int) -> None:
        """Keeps of what was computed for a draft what was right; the newest token is not computed in any case."""
        sequence.num_computed = min(row.start + 1 + accepted, sequence.num_tokens - 1)
        self.blocks.computed(sequence, row.start + 1, sequence.num_computed)
        self.blocks.shrink(sequence)
        self._drafter.settle(sequence, len(row.draft), accepted)

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
