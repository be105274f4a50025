"""The step loop: the same lines on every rank.

intake → agree → schedule → masks → forward → sample → share ids → commit → settle → emit

What is emitted leaves the leader one step later, when all ranks are known to have had the same: see ``release``.

What differs between ranks is which objects they were given: the leader's intake has a source and its sink a client,
the first stage's grammar role compiles, the last stage has a sampling part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch

from pp.link import StageLink, Tag
from runtime.batch import Chunk, ForwardBatch, pack
from runtime.consensus import Consensus
from runtime.grammar_role import GrammarRole
from runtime.intake import Intake, Patience
from runtime.kv_cache import PagedKVCache
from runtime.messages import Action, AddSequence, EndSequence, ErrorInfo, StopRanks
from runtime.model import DecoderStage
from runtime.plan import DesyncError, StepPlan, logit_rows
from runtime.rank_status import RankStatus
from runtime.release import ReleaseClock
from runtime.reports import ReportExchange, StepReport, TokenReport
from runtime.row_errors import WHY_NO_TOKEN
from runtime.sampling import SampledStep, SamplingPart, row_status
from runtime.scheduler import Scheduler
from runtime.sequence import Sequence
from runtime.token_share import SharedTokens, TokenShare
from sampler.sampler import RowReason
from tp.group import TensorParallelGroup

_NO_ROWS = SharedTokens([], [])
_WHY_NO_MASK = {
    RowReason.MASK_EMPTY: "allows no token here",
    RowReason.MASK_REFUSED: "refused a token that its mask allowed",
    RowReason.MASK_FAILED: "failed in its engine while its mask was filled",
    RowReason.MASK_LATE: "took too long to fill its mask",
}


class OutputSink(Protocol):
    """Who hears of tokens and ends; the leader's sink tells the client, once they are agreed."""

    def begin_step(self, step: int) -> None:
        """Takes the step that what it hears from now on belongs to."""

    def agreed(self, before_step: int) -> None:
        """Notes that all ranks had the same in all steps before ``before_step``: what it heard in them may be told."""

    def working_at(self, sequence_ids: Iterable[int]) -> None:
        """Takes which sequences the ranks work at from now on; none of them may come to an end by it."""

    def grammars_ready(self, sequence_ids: tuple[int, ...]) -> None:
        """Notes that grammars were agreed ready."""

    def prompt(self, sequence: Sequence, reports: list[TokenReport]) -> None:
        """Takes what is reported of the next tokens of a sequence's prompt."""

    def token(self, sequence: Sequence, report: TokenReport | None) -> None:
        """Takes a sequence's newest token, what is reported of it, and its end, if it has come to it."""

    def refused(self, sequence: Sequence, message: str) -> None:
        """Takes note that a grammar refused a sequence's newest token."""

    def ended(self, sequence: Sequence) -> None:
        """Takes note of a sequence that an action or a verdict ended."""

    def flush(self) -> None:
        """Sends what has gathered."""


class SilentSink:
    """The sink of every rank but the leader."""

    def begin_step(self, step: int) -> None:
        """Does nothing."""

    def agreed(self, before_step: int) -> None:
        """Does nothing."""

    def working_at(self, sequence_ids: Iterable[int]) -> None:
        """Does nothing."""

    def grammars_ready(self, sequence_ids: tuple[int, ...]) -> None:
        """Does nothing."""

    def prompt(self, sequence: Sequence, reports: list[TokenReport]) -> None:
        """Does nothing."""

    def token(self, sequence: Sequence, report: TokenReport | None) -> None:
        """Does nothing."""

    def refused(self, sequence: Sequence, message: str) -> None:
        """Does nothing."""

    def ended(self, sequence: Sequence) -> None:
        """Does nothing."""

    def flush(self) -> None:
        """Does nothing."""


@dataclass(frozen=True)
class EngineParts:
    """What a rank's engine is made of.

    Args:
        group: The rank's stage.
        link: The rank's pipeline.
        intake: How it learns what to do.
        scheduler: The replicated scheduler.
        grammars: Its part in grammars.
        stage: Its layers.
        cache: Their KV cache.
        tokens: How ids reach all ranks.
        reports: How what requests ask to know reaches the leader.
        sampling: How the last stage samples; None on the others.
        sink: Who hears of tokens.
        status: What is noted of its steps.
        consensus: How it compares itself with the others.
    """

    group: TensorParallelGroup
    link: StageLink
    intake: Intake
    scheduler: Scheduler
    grammars: GrammarRole
    stage: DecoderStage
    cache: PagedKVCache
    tokens: TokenShare
    reports: ReportExchange
    sampling: SamplingPart | None
    sink: OutputSink
    status: RankStatus
    consensus: Consensus


@dataclass(frozen=True)
class _Flight:
    """A step whose tokens are not committed yet.

    ``shared`` and ``report`` are known on the last stage only; ``masks`` has the checksums of its masks on the first.
    """

    plan: StepPlan
    shared: SharedTokens | None
    report: StepReport | None
    masks: tuple[int, ...] | None = None


class RankEngine:
    """One rank's engine.

    Args:
        parts: What it is made of.
        in_flight_steps: How many steps may be under way at once: one per stage.
    """

    def __init__(self, parts: EngineParts, in_flight_steps: int) -> None:
        self._parts = parts
        self._depth = in_flight_steps
        self._in_flight: deque[_Flight] = deque()
        self._clock = ReleaseClock()
        self._step = 0

    @property
    def status(self) -> RankStatus:
        """What is noted of its steps."""
        return self._parts.status

    @property
    def scheduler(self) -> Scheduler:
        """The replicated scheduler, to look at."""
        return self._parts.scheduler

    def run(self) -> None:
        """Runs steps until the leader stops the ranks; every rank calls it."""
        with torch.inference_mode():
            while self.step():
                pass
        self._parts.link.drain()

    def step(self) -> bool:
        """Runs one step; returns whether there is a next one."""
        parts = self._parts
        self._begin_step()
        digest = parts.scheduler.digest
        patience = self._patience()
        parts.status.begin_step(self._step, digest, is_idle=patience is not Patience.NONE)
        actions = parts.intake.exchange(patience, digest)
        parts.status.begin_work()
        goes_on = self._apply(actions)
        self._release()
        self._agree()
        plan = parts.scheduler.plan(self._step)
        self._tell_work(plan)
        if self._clock.needs_round(self._step, (plan, *(flight.plan for flight in self._in_flight))):
            self._confirm()
        is_busy = bool(plan.rows or self._in_flight)
        if plan.rows:
            self._in_flight.append(self._launch(plan))
        while self._must_commit(plan, goes_on=goes_on):
            self._commit(self._in_flight.popleft())
        self._release()
        if self._clock.is_pending and (parts.consensus.is_alone or not goes_on):
            self._confirm()
        parts.sink.flush()
        parts.status.end_step(len(plan.rows), is_busy=is_busy)
        return goes_on

    def _begin_step(self) -> None:
        self._step += 1
        self._parts.group.begin_step(self._step)
        self._parts.link.begin_step(self._step, self._depth)
        self._parts.sink.begin_step(self._step)

    def _patience(self) -> Patience:
        scheduler = self._parts.scheduler
        if self._in_flight or scheduler.has_work or self._clock.is_pending:
            return Patience.NONE
        return Patience.BRIEF if scheduler.waiting_for_grammar else Patience.LONG

    def _apply(self, actions: list[Action]) -> bool:
        """Applies the leader's actions in order; returns whether the ranks go on."""
        scheduler, grammars, sink = self._parts.scheduler, self._parts.grammars, self._parts.sink
        for action in actions:
            match action:
                case AddSequence():
                    sequence = Sequence.from_action(action)
                    scheduler.add(sequence)
                    grammars.add(sequence)
                    if sequence.finish_reason is not None:
                        self._clock.tell(self._step)
                        sink.ended(sequence)
                case EndSequence():
                    ended = scheduler.end(action.sequence_id, action.finish_reason, action.error)
                    if ended is not None:
                        self._clock.tell(self._step)
                        sink.ended(ended)
                case StopRanks():
                    return False
        return True

    def _agree(self) -> None:
        """Agrees on grammars when one waits; all ranks know from the replicated queue whether one does."""
        scheduler = self._parts.scheduler
        if not scheduler.waiting_for_grammar:
            return
        self._tell_work()
        with self._parts.status.agreeing():
            verdict = self._parts.grammars.agree(self._step, scheduler.waiting_for_grammar)
        for sequence in scheduler.apply(verdict):
            self._clock.tell(self._step)
            self._parts.sink.ended(sequence)
        self._parts.sink.grammars_ready(verdict.ready)

    def _tell_work(self, *planned: StepPlan) -> None:
        """Tells the sink who waits for a grammar, is in a step under way, or is in one that is about to begin."""
        plans = chain(planned, (flight.plan for flight in self._in_flight))
        rows = (row.sequence_id for plan in plans for row in plan.rows)
        self._parts.sink.working_at(chain(self._parts.scheduler.waiting_for_grammar, rows))

    def _launch(self, plan: StepPlan) -> _Flight:
        """Runs this rank's part of a plan, up to the sampled ids on the last stage."""
        parts, link = self._parts, self._parts.link
        parts.status.begin_batch(plan.num_tokens)
        parts.status.note_plan(plan.step, plan.digest)
        parts.consensus.check_plan(plan)
        parts.grammars.begin_masks(plan)
        hidden = self._hidden(plan)
        parts.group.begin_forward(plan.num_tokens)
        output = parts.consensus.kept(parts.stage.forward(self._forward_batch(plan), hidden, parts.cache))
        parts.group.end_forward()
        if parts.sampling is None:
            link.send_tensor(output, link.stage + 1, Tag.HIDDEN)
            return _Flight(plan, None, None, parts.grammars.send_masks(plan))
        parts.grammars.send_masks(plan)
        sequences = [parts.scheduler[row.sequence_id] for row in plan.rows]
        sampled = parts.sampling.sample(plan, sequences, parts.stage.logits(output), output)
        parts.reports.send(sampled.report)
        if not plan.sampling_rows:
            return _Flight(plan, _NO_ROWS, sampled.report)
        shared = parts.tokens.publish(plan, sampled.token_ids, sampled.statuses, sampled.masks)
        self._check_draw(plan, sampled, shared)
        parts.sampling.audit(plan, sampled, shared.token_ids)
        return _Flight(plan, shared, sampled.report)

    def _must_commit(self, plan: StepPlan, *, goes_on: bool) -> bool:
        return bool(self._in_flight) and (len(self._in_flight) == self._depth or not plan.rows or not goes_on)

    def _commit(self, flight: _Flight) -> None:
        """Commits the oldest step in flight: ids into sequences, grammars forward, tokens to the sink."""
        parts, plan = self._parts, flight.plan
        shared, report = flight.shared, flight.report
        if shared is None:
            shared = parts.tokens.receive(plan, flight.masks) if plan.sampling_rows else _NO_ROWS
            report = parts.reports.receive(plan, has_failures=any(map(_is_processor_failure, shared.statuses)))
        if plan.is_answered:
            self._agreed(plan.step)
        if plan.sampling_rows or plan.has_reports:
            self._clock.tell(self._step)
        for index, tokens in report.prompts.items() if report is not None else ():
            parts.sink.prompt(parts.scheduler[plan.rows[index].sequence_id], tokens)
        token_ids, statuses = shared
        failures = {} if report is None else report.failures
        errors = [
            self._error(plan.step, parts.scheduler[row.sequence_id], status, failures.get(index))
            for index, (row, status) in enumerate(zip(plan.sampling_rows, statuses, strict=True))
        ]
        for index in parts.scheduler.commit(plan, token_ids, errors):
            sequence = parts.scheduler[plan.sampling_rows[index].sequence_id]
            refusal = None if sequence.error is not None else parts.grammars.accept(sequence)
            if refusal is None:
                parts.sink.token(sequence, None if report is None else report.tokens.get(index))
            else:
                parts.sink.refused(sequence, refusal)
        for sequence in parts.scheduler.finish_scored(plan):
            self._clock.tell(self._step)
            parts.sink.ended(sequence)

    def _agreed(self, before_step: int) -> None:
        self._clock.agree(before_step)
        self._parts.sink.agreed(before_step)

    def _confirm(self) -> None:
        """Has all ranks confirm that they had the same so far; what the sink heard until now may be told."""
        self._parts.consensus.confirm(self._parts.scheduler.digest)
        self._agreed(self._step + 1)

    def _check_draw(self, plan: StepPlan, sampled: SampledStep, shared: SharedTokens) -> None:
        """Returns if this rank of the last stage drew what its rank 0 did: all of them draw from the same numbers.

        Raises:
            DesyncError: It did not.
        """
        group = self._parts.group
        own, statuses = sampled.token_ids.tolist(), sampled.statuses.tolist()
        if group.size > 1 and (own, statuses) != (shared.token_ids, shared.statuses):
            raise DesyncError(
                f"draw at stage {self._parts.link.stage} rank {group.rank} of {group.name}, step {plan.step}: rank 0 "
                f"has (ids, statuses) {(shared.token_ids, shared.statuses)}, this rank {(own, statuses)}",
                rank=group.global_rank,
                step=plan.step,
            )

    def _error(self, step: int, sequence: Sequence, status: int, failure: str | None) -> ErrorInfo | None:
        """Returns what a row's status means; why a processor failed only the leader and the last stage can tell."""
        reason, tp_rank = row_status(status)
        if reason is RowReason.NONE:
            return None
        size, last = self._parts.group.size, self._parts.link.size - 1
        if reason in _WHY_NO_MASK:
            kind = sequence.grammar.kind if sequence.grammar is not None else "thinking"
            position = len(sequence.output_token_ids)
            message = (
                f"the {kind} grammar {_WHY_NO_MASK[reason]} (step {step}, rank {tp_rank}, output token {position})"
            )
            return ErrorInfo("grammar_error", message, kind)
        rank = f", rank {last * size + tp_rank}" if tp_rank >= 0 else ""
        return ErrorInfo("sampling_error", f"step {step}, stage {last}{rank}: {failure or WHY_NO_TOKEN[reason]}")

    def _release(self) -> None:
        parts = self._parts
        for sequence in parts.scheduler.release_finished(self._step):
            parts.grammars.release(sequence)

    def _hidden(self, plan: StepPlan) -> torch.Tensor | None:
        link = self._parts.link
        if link.is_first:
            return None
        stage = self._parts.stage
        shape = (plan.num_tokens, stage.config.hidden_size)
        return link.receive_tensor(link.stage - 1, Tag.HIDDEN, shape=shape, dtype=stage.dtype)

    def _forward_batch(self, plan: StepPlan) -> ForwardBatch:
        """Returns the plan's tokens as one batch, after the copies of KV blocks that they need."""
        scheduler, cache = self._parts.scheduler, self._parts.cache
        chunks, copies = [], []
        for row in plan.rows:
            table = scheduler.blocks.table(row.sequence_id)
            if row.copied >= 0:
                copies.append((row.copied, table.blocks[row.start // cache.block_tokens]))
            token_ids = [*scheduler[row.sequence_id].token_ids(row.start, row.length - len(row.draft)), *row.draft]
            chunks.append(Chunk(row.sequence_id, token_ids, row.start, logit_rows(row), table))
        cache.copy(copies)
        return pack(chunks, cache.block_tokens, self._parts.stage.device)


def _is_processor_failure(status: int) -> bool:
    return row_status(status)[0] is RowReason.PROCESSOR_FAILED
