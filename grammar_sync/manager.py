"""The grammars of a rank's sequences: wanted, compiled, matched token by token. First-stage ranks only."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from grammar_sync.agreed_compiler import AgreedCompiler
from grammar_sync.agreement import LocalReport, VettedForm
from grammar_sync.engines.backend import CompiledGrammar, Matcher, MatcherError
from grammar_sync.fill_pool import FillPool
from grammar_sync.masks import FilledMasks, MaskFiller, PendingMasks, RowFault
from grammar_sync.reasoning import ReasoningMatcher, ReasoningVocabulary, ThinkingState
from grammar_sync.spec import GrammarSpec
from grammar_sync.statistics import GrammarStatistics
from grammar_sync.thinking import ThinkingRules
from grammar_sync.vocabulary import GrammarVocabulary

_SHOWN_TOKENS = 16


class GrammarStateError(RuntimeError):
    """The manager was called out of order: for a sequence that it does not know or that is not at that point."""


class GrammarRefusal(RuntimeError):  # noqa: N818 - it is one sequence's outcome, told to its client, not a rank's error
    """The grammar does not allow a token that its own mask let through, or that follows its end: ends that sequence.

    Args:
        sequence_id: Whose token it is.
        token_id: The token.
        accepted: The tokens before it.
        kind: The grammar's kind.
        terminated: Whether the grammar had already ended.
        problem: What the engine says, if it failed.
    """

    def __init__(
        self,
        sequence_id: int,
        token_id: int,
        accepted: tuple[int, ...],
        *,
        kind: str,
        terminated: bool,
        problem: str = "",
    ) -> None:
        state = "terminated" if terminated else problem or "running"
        super().__init__(
            f"the {kind} grammar of sequence {sequence_id} refuses token {token_id} as output token {len(accepted)} "
            f"(state: {state}; the last tokens: {list(accepted[-_SHOWN_TOKENS:])})"
        )
        self.sequence_id = sequence_id
        self.token_id = token_id
        self.accepted = accepted
        self.terminated = terminated


@dataclass
class _Sequence:
    spec: GrammarSpec | None
    cache_hit: bool
    compiled: CompiledGrammar | None = None
    compile_s: float = 0.0
    thinking: ThinkingRules | None = None
    arrived_s: float = field(default_factory=time.monotonic)
    queue_s: float = 0.0
    matcher: Matcher | None = None
    accepted: list[int] = field(default_factory=list)
    refused: bool = False
    mask_s: float = 0.0
    mask_rows: int = 0

    @property
    def kind(self) -> str:
        return "thinking" if self.spec is None else self.spec.kind


class MasksUnderWay(NamedTuple):
    """Masks that are being filled.

    Attributes:
        sequence_ids: Whose each mask is.
        guessed: How many guessed tokens each mask follows.
        pending: The masks.
    """

    sequence_ids: tuple[int, ...]
    guessed: tuple[int, ...]
    pending: PendingMasks


class GrammarManager:
    """Keeps, for each sequence with a grammar, its compile and its matcher; no method waits for a compile.

    Ids are the caller's, one a sequence: the n choices of a request are n sequences, which share one compile because
    their specs are equal.

    Args:
        vocabulary: The vocabulary of tokens and masks.
        compiler: Follows each sequence's grammar until it is compiled; nobody else may use it.
        reasoning: How the model thinks; None when no sequence can.
        pool: Runs the mask fills; one of its own when left out.
    """

    def __init__(
        self,
        vocabulary: GrammarVocabulary,
        compiler: AgreedCompiler,
        reasoning: ReasoningVocabulary | None = None,
        pool: FillPool | None = None,
    ) -> None:
        self._compiler = compiler
        self._reasoning = reasoning
        self._pool = pool or FillPool()
        self._filler = MaskFiller(vocabulary, self._pool)
        self._sequences: dict[int, _Sequence] = {}

    def submit(self, sequence_id: int, spec: GrammarSpec) -> None:
        """Takes a sequence in and has its grammar compiled.

        Raises:
            GrammarStateError: The id is taken.
        """
        if sequence_id in self._sequences:
            raise GrammarStateError(f"submit: sequence {sequence_id} is there already")
        cache_hit = self._compiler.submit(sequence_id, spec)
        self._sequences[sequence_id] = _Sequence(spec, cache_hit)

    def local_report(self, waiting: Sequence[int]) -> LocalReport:
        """Returns which of the ``waiting`` are ready or failed on this rank, in their order, at this moment.

        Raises:
            GrammarStateError: One was never submitted, or was released.
        """
        known = [self._submitted(sequence_id, "local_report") for sequence_id in waiting]
        report = self._compiler.report(waiting)
        for sequence_id, sequence in zip(waiting, known, strict=True):
            outcome = self._compiler.compiled(sequence_id)
            if outcome is not None:
                sequence.compiled, sequence.compile_s = outcome.compiled, outcome.compile_s
        return report

    def adopt(self, vetted: Sequence[VettedForm]) -> None:
        """Has the forms compiled that the stage agreed on; every rank of the stage calls it with every verdict.

        Raises:
            GrammarStateError: A sequence was never submitted, or was released.
        """
        for form in vetted:
            self._submitted(form.request_id, "adopt").compiled = None
        self._compiler.adopt(vetted)

    def think_first(self, sequence_id: int, rules: ThinkingRules) -> None:
        """Has a sequence think before its grammar begins; one that was not submitted has no grammar and starts at once.

        Raises:
            GrammarStateError: The sequence was started already, or the model has no reasoning markers.
        """
        if self._reasoning is None:
            raise GrammarStateError(f"think_first: sequence {sequence_id} thinks, but the model has no markers")
        sequence = self._sequences.setdefault(sequence_id, _Sequence(None, cache_hit=True))
        if sequence.matcher is not None:
            raise GrammarStateError(f"think_first: sequence {sequence_id} was started already")
        sequence.thinking = rules
        if sequence.spec is None:
            self.start(sequence_id)

    def start(self, sequence_id: int) -> None:
        """Puts a sequence that was reported ready at the start of its grammar, whatever it accepted before.

        Raises:
            GrammarStateError: The sequence is not known, or was not reported ready.
        """
        sequence = self._sequence(sequence_id, "start")
        if sequence.compiled is None and sequence.spec is not None:
            raise GrammarStateError(f"start: the grammar of sequence {sequence_id} was not reported ready")
        if sequence.matcher is None:
            sequence.queue_s = time.monotonic() - sequence.arrived_s
        matcher = None if sequence.compiled is None else sequence.compiled.new_matcher()
        if sequence.thinking is not None and self._reasoning is not None:
            matcher = ReasoningMatcher(ThinkingState(self._reasoning, sequence.thinking), matcher)
        sequence.matcher = matcher
        sequence.refused = False
        sequence.accepted.clear()

    def replay(self, sequence_id: int, token_ids: Iterable[int]) -> None:
        """Starts a sequence and brings it to where it was by the output tokens it had, after preemption or a restart.

        Raises:
            GrammarRefusal: A token is not allowed.
            GrammarStateError: The sequence is not known, or was not reported ready.
        """
        self.start(sequence_id)
        for token_id in token_ids:
            self.accept(sequence_id, token_id)

    def accept(self, sequence_id: int, token_id: int) -> None:
        """Takes a sampled token.

        Raises:
            GrammarRefusal: The grammar does not allow it, or its engine failed; this sequence must end, no other is
                touched. It may be so on this rank alone: until it ends its masks are ``RowFault.REFUSED``.
            GrammarStateError: The sequence is not known, or was not started.
        """
        sequence, matcher = self._started(sequence_id, "accept")
        terminated, problem = matcher.is_terminated(), ""
        try:
            accepted = not terminated and not sequence.refused and matcher.accept(token_id)
        except MatcherError as error:
            accepted, problem = False, str(error)
        if not accepted:
            sequence.refused = True
            history = tuple(sequence.accepted)
            raise GrammarRefusal(
                sequence_id, token_id, history, kind=sequence.kind, terminated=terminated, problem=problem
            )
        sequence.accepted.append(token_id)

    def rollback(self, sequence_id: int, count: int) -> None:
        """Takes back the last ``count`` accepted tokens; 0 does nothing.

        Raises:
            GrammarStateError: The sequence is not known or not started, ``count`` is negative or more than it accepted.
        """
        sequence, matcher = self._started(sequence_id, "rollback")
        if not 0 <= count <= len(sequence.accepted):
            raise GrammarStateError(
                f"rollback: sequence {sequence_id} cannot take back {count} of {len(sequence.accepted)} tokens"
            )
        matcher.rollback(count)
        del sequence.accepted[len(sequence.accepted) - count :]

    def copy_matcher(self, sequence_id: int) -> Matcher:
        """Returns a matcher in the sequence's state that goes its own way, to try tokens on.

        Raises:
            GrammarStateError: The sequence is not known, or was not started.
        """
        return self._started(sequence_id, "copy_matcher")[1].copy()

    def jump_forward(self, sequence_id: int) -> str:
        """Returns the text that must come next in a sequence; empty where nothing is certain.

        Raises:
            GrammarStateError: The sequence is not known, or was not started.
        """
        return self._started(sequence_id, "jump_forward")[1].jump_forward()

    def is_terminated(self, sequence_id: int) -> bool:
        """Returns whether the sequence accepted a stop token: it is finished, and must not be filled any more.

        Raises:
            GrammarStateError: The sequence is not known, or was not started.
        """
        return self._started(sequence_id, "is_terminated")[1].is_terminated()

    def begin_masks(
        self, sequence_ids: Sequence[int], drafts: Sequence[tuple[int, ...]] | None = None
    ) -> MasksUnderWay:
        """Begins to fill the masks of the sequences' next tokens, without waiting.

        Until ``finish_masks`` none of them may be moved on.

        Args:
            sequence_ids: The sequences.
            drafts: What is guessed to come next in each: a mask more for every token. None = nothing.

        Raises:
            GrammarStateError: A sequence is not known, was not started, or has terminated.
        """
        matchers: list[Matcher | None] = []
        for sequence_id in sequence_ids:
            sequence, matcher = self._started(sequence_id, "begin_masks")
            if matcher.is_terminated():
                raise GrammarStateError(f"begin_masks: sequence {sequence_id} has terminated")
            matchers.append(None if sequence.refused else matcher)
        drafts = [()] * len(matchers) if drafts is None else drafts
        places = [
            (sequence_id, guessed)
            for sequence_id, draft in zip(sequence_ids, drafts, strict=True)
            for guessed in range(1 + len(draft))
        ]
        return MasksUnderWay(
            tuple(sequence_id for sequence_id, _ in places),
            tuple(guessed for _, guessed in places),
            self._filler.begin(matchers, drafts),
        )

    def finish_masks(self, under_way: MasksUnderWay) -> FilledMasks:
        """Returns the masks, in the order asked for; waits for them within the deadline of a fill.

        A row whose fill failed or was given up has a fault, and its sequence must end: nothing else of it can be used.
        A fault of a mask that follows a guess is of that guess alone.
        """
        filled = self._filler.finish(under_way.pending)
        columns = (under_way.sequence_ids, under_way.guessed, filled.faults, filled.seconds)
        for sequence_id, guessed, fault, row_s in zip(*columns, strict=True):
            sequence = self._sequence(sequence_id, "finish_masks")
            sequence.mask_s += row_s
            sequence.mask_rows += 1
            sequence.refused |= fault is not RowFault.NONE and guessed == 0
        return filled

    def release(self, sequence_id: int) -> None:
        """Drops a sequence, in whatever state it is.

        Raises:
            GrammarStateError: The sequence is not known.
        """
        sequence = self._sequence(sequence_id, "release")
        del self._sequences[sequence_id]
        if sequence.spec is not None:
            self._compiler.release(sequence_id)

    def statistics(self, sequence_id: int) -> GrammarStatistics:
        """Returns what the sequence's grammar cost so far.

        Raises:
            GrammarStateError: The sequence is not known.
        """
        sequence = self._sequence(sequence_id, "statistics")
        form = None if sequence.spec is None else self._compiler.form(sequence_id)
        return GrammarStatistics(
            cache_hit=sequence.cache_hit,
            compile_s=sequence.compile_s,
            queue_s=sequence.queue_s,
            mask_s=sequence.mask_s,
            mask_rows=sequence.mask_rows,
            engine=None if form is None else form.engine,
            not_enforced=() if form is None else form.not_enforced,
            rewritten=() if form is None else form.rewritten,
        )

    def moved_s(self, sequence_id: int) -> float:
        """Returns when the grammar of a sequence, or one that it waits for, was last seen to get on; monotonic clock.

        Raises:
            GrammarStateError: The sequence was never submitted, or was released.
        """
        self._submitted(sequence_id, "moved_s")
        return self._compiler.moved_s(sequence_id)

    def is_compiled(self, sequence_id: int) -> bool:
        """Returns whether the grammar of a sequence is compiled on this rank.

        Raises:
            GrammarStateError: The sequence was never submitted, or was released.
        """
        self._submitted(sequence_id, "is_compiled")
        return self._compiler.compiled(sequence_id) is not None

    def close(self) -> None:
        """Drops all sequences, lets the filling threads end and closes the compiler."""
        self._sequences.clear()
        self._pool.close()
        self._compiler.close()

    def _sequence(self, sequence_id: int, operation: str) -> _Sequence:
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            raise GrammarStateError(f"{operation}: sequence {sequence_id} is not known")
        return sequence

    def _submitted(self, sequence_id: int, operation: str) -> _Sequence:
        sequence = self._sequence(sequence_id, operation)
        if sequence.spec is None:
            raise GrammarStateError(f"{operation}: sequence {sequence_id} has no grammar")
        return sequence

    def _started(self, sequence_id: int, operation: str) -> tuple[_Sequence, Matcher]:
        sequence = self._sequence(sequence_id, operation)
        if sequence.matcher is None:
            raise GrammarStateError(f"{operation}: sequence {sequence_id} was not started")
        return sequence, sequence.matcher
