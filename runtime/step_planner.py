"""Who runs in a step: decodes beside chunks of prompts, within a budget of rows, tokens and KV blocks.

Part of the replicated scheduler, a pure function of its state. Decodes go first, those that waited longest before the
others; of the token budget a quarter is kept for prompts as long as some wait. Prompts are served in order of rank
(priority, then arrival). When blocks run out, the sequence of the lowest rank gives up its own and waits again; it
computes them anew later. The sequence of the highest rank can so always run to its end.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.drafter import Drafter
from runtime.kv_budget import KV_BLOCK_TOKENS
from runtime.kv_manager import Admission, KVBlockManager
from runtime.plan import PlanRow
from runtime.sequence import Sequence, SequenceState
from runtime.speculation import SpeculationLimits

_PREFILL_PART = 4
_MOST_DOUBLINGS = 3


@dataclass(frozen=True)
class SchedulerLimits:
    """How much may run at once.

    Args:
        max_num_seqs: Sequences that run at once.
        max_batch_tokens: Tokens of one step.
        kv_cache_tokens: KV entries of all running sequences together; a part of a block is not used.
        in_flight_steps: Steps that may be under way at once: one per pipeline stage.
        max_scored_tokens: Prompt tokens of one step whose logprobs are reported: each needs a row of logits.
        block_tokens: KV entries of a block.
        prefix_cache: Whether a sequence may reuse KV entries that another one computed for the same tokens.
        speculation: How many tokens are guessed.
    """

    max_num_seqs: int
    max_batch_tokens: int
    kv_cache_tokens: int
    in_flight_steps: int
    max_scored_tokens: int = 256
    block_tokens: int = KV_BLOCK_TOKENS
    prefix_cache: bool = True
    speculation: SpeculationLimits = field(default_factory=SpeculationLimits)


@dataclass(slots=True)
class SequenceQueues:
    """The sequences that a step can be made of, by id, each in order of rank.

    Attributes:
        known: All sequences, in order of arrival.
        waiting: Those that have no KV blocks.
        running: Those that have.
    """

    known: dict[int, Sequence]
    waiting: dict[int, Sequence]
    running: dict[int, Sequence]


def enqueue(queue: dict[int, Sequence], sequence: Sequence) -> None:
    """Puts a sequence into a queue, in its place by rank."""
    behind = bool(queue) and next(reversed(queue.values())).rank > sequence.rank
    queue[sequence.sequence_id] = sequence
    if behind:
        ordered = sorted(queue.values(), key=lambda one: one.rank)
        queue.clear()
        queue.update((one.sequence_id, one) for one in ordered)


class StepPlanner:
    """The plan of one step in the making.

    Args:
        step: Which step.
        limits: How much may run.
        queues: What could run; sequences are moved between them.
        blocks: Gives and takes KV blocks.
        drafter: Guesses tokens.
    """

    def __init__(
        self, step: int, limits: SchedulerLimits, queues: SequenceQueues, blocks: KVBlockManager, drafter: Drafter
    ) -> None:
        self._step = step
        self._limits = limits
        self._queues = queues
        self._blocks = blocks
        self._drafter = drafter
        active = min(len(queues.running) + len(queues.waiting), limits.max_num_seqs)
        # With several steps in flight each takes an even share of the sequences, so that all stages have work.
        self._max_rows = -(-active // limits.in_flight_steps)
        self._budget = limits.max_batch_tokens
        self._scored_budget = limits.max_scored_tokens
        self._draft_budget = 0
        self._short = False
        self.rows: list[PlanRow] = []
        self.preempted: list[int] = []
        self.prefill_tokens = 0
        self.looked_up_tokens = 0
        self.hit_tokens = 0

    def fill(self) -> None:
        """Plans the step's rows."""
        ready = [one for one in self._queues.running.values() if self._is_ready(one)]
        prefills = [one for one in ready if one.num_tokens - one.num_computed > 1]
        decodes = [one for one in ready if one.num_tokens - one.num_computed == 1]
        decodes.sort(key=lambda one: (one.priority, one.last_step, one.sequence_id))
        kept_tokens = kept_rows = 0
        if prefills or self._queues.waiting:
            kept_tokens = max(self._budget // _PREFILL_PART, min(self._budget - 1, 1))
            kept_rows = min(self._max_rows - 1, 1)
        self._draft_budget = self._drafter.budget(self._budget - kept_tokens - len(decodes))
        first = min(self._budget - kept_tokens, self._max_rows - kept_rows)
        for sequence in decodes[:first]:
            self._decode(sequence)
        for sequence in prefills:
            if self._is_ready(sequence):
                self._run(sequence)
        if not self._short and not self.preempted:
            self._admit()
        for sequence in decodes[first:]:
            self._decode(sequence)

    @property
    def _is_full(self) -> bool:
        return len(self.rows) >= self._max_rows or self._budget <= 0

    @staticmethod
    def _is_ready(sequence: Sequence) -> bool:
        return sequence.state is SequenceState.RUNNING and not sequence.in_flight

    def _decode(self, sequence: Sequence) -> None:
        """Runs a sequence's newest token if there is room for it, at the expense of those of a lower rank."""
        if self._is_full or not self._is_ready(sequence):
            return
        while not self._blocks.grow(sequence):
            victim = self._victim(sequence)
            if victim is None:
                self._short = True
                return
            self._preempt(victim)
        self._run(sequence, draft=self._draft(sequence))

    def _draft(self, sequence: Sequence) -> tuple[int, ...]:
        """Returns what is guessed of a decoding sequence, as far as there are blocks for it that nobody misses."""
        draft = self._drafter.draft(sequence, self._draft_budget)
        if draft:
            draft = draft[: self._blocks.grow_ahead(sequence, len(draft), len(self._queues.running))]
        self._draft_budget -= len(draft)
        return draft

    def _victim(self, needy: Sequence) -> Sequence | None:
        """Returns the sequence of the lowest rank, below ``needy``, that is not in flight nor in this plan."""
        for sequence in reversed(self._queues.running.values()):
            if sequence.rank <= needy.rank:
                return None
            if self._is_ready(sequence):
                return sequence
        return None

    def _preempt(self, sequence: Sequence) -> None:
        queues = self._queues
        self._blocks.free(sequence)
        sequence.preempt()
        self.preempted.append(sequence.sequence_id)
        del queues.running[sequence.sequence_id]
        enqueue(queues.waiting, sequence)

    def _admit(self) -> None:
        """Admits waiting sequences in order of rank; one that has no room holds back those behind it.

        One whose beginning another sequence is just computing waits for that and holds back nobody.
        """
        queues = self._queues
        for sequence in tuple(queues.waiting.values()):
            if self._is_full or len(queues.running) >= self._limits.max_num_seqs:
                return
            if self._scores(sequence) and self._scored_budget <= 0:
                continue
            parent = self._shared_prefill(sequence)
            if self._waits(sequence, parent):
                continue
            headroom = self._headroom(sequence)
            admission: Admission | None
            if parent is None:
                admission = self._blocks.admit(sequence, headroom)
            else:
                admission = self._blocks.fork(parent, sequence, headroom)
            if admission is None:
                return
            del queues.waiting[sequence.sequence_id]
            enqueue(queues.running, sequence)
            sequence.state = SequenceState.RUNNING
            self.looked_up_tokens += sequence.num_tokens
            self.hit_tokens += sequence.num_computed
            self._run(sequence, admission.copied)

    def _headroom(self, sequence: Sequence) -> int:
        """Returns how many blocks must be left: one for each that runs, more for one that was preempted before."""
        return len(self._queues.running) << min(sequence.preemptions, _MOST_DOUBLINGS)

    def _shared_prefill(self, sequence: Sequence) -> Sequence | None:
        """Returns the sequence whose prefill this one takes over, if it is there and will be computed or was."""
        if sequence.prefill_of is None or sequence.output_token_ids:
            return None
        shared = self._queues.known.get(sequence.prefill_of)
        if shared is None or (shared.state is SequenceState.FINISHED and shared.prompt_step is None):
            return None
        return shared

    def _waits(self, sequence: Sequence, parent: Sequence | None) -> bool:
        if parent is not None:
            return parent.prompt_step is None or parent.prompt_step >= self._step
        computing = self._blocks.waits_for(sequence)
        other = None if computing is None else self._queues.known.get(computing)
        return other is not None and other.state is SequenceState.RUNNING and other.rank < sequence.rank

    @staticmethod
    def _scores(sequence: Sequence) -> bool:
        """Returns whether the sequence's next tokens tell logprobs of prompt tokens that were not told before."""
        if not sequence.scores_prompt:
            return False
        return sequence.num_scored <= sequence.num_computed < len(sequence.prompt_token_ids)

    def _run(self, sequence: Sequence, copied: int = -1, draft: tuple[int, ...] = ()) -> None:
        """Adds a row of a sequence that has its blocks, if there is room for it.

        Args:
            sequence: Which.
            copied: As in ``PlanRow``.
            draft: As in ``PlanRow``; there is room for it in any case.
        """
        scores = self._scores(sequence)
        if self._is_full or (scores and self._scored_budget <= 0):
            return
        start, prompt_length = sequence.num_computed, len(sequence.prompt_token_ids)
        length = min(sequence.num_tokens - start, self._budget)
        if scores:
            length = min(length, self._scored_budget)
            sequence.num_scored = start + length
            self._scored_budget -= length
        elif sequence.scores_prompt and start < sequence.num_scored < prompt_length:
            length = min(length, sequence.num_scored - start)
        length += len(draft)
        self._budget -= length
        self.prefill_tokens += 0 if start >= prompt_length and sequence.num_tokens - start == 1 else length
        sequence.num_computed = start + length
        sequence.in_flight = True
        sequence.last_step = self._step
        if sequence.prompt_step is None and sequence.num_computed >= prompt_length:
            sequence.prompt_step = self._step
        self._blocks.computed(sequence, start, min(sequence.num_computed, sequence.num_tokens))
        samples = sequence.num_computed >= sequence.num_tokens and sequence.max_tokens > 0
        row = PlanRow(
            sequence_id=sequence.sequence_id,
            start=start,
            length=length,
            samples=samples,
            constrained=samples and sequence.is_constrained,
            new_blocks=self._blocks.table(sequence.sequence_id).announce(),
            copied=copied,
            scores=scores,
            reports=samples and sequence.params.has_logprobs,
            draft=draft,
        )
        self.rows.append(row)
