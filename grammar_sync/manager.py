"""The grammars of a rank's sequences: wanted, compiled, matched token by token. First-stage ranks only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from grammar_sync.agreement import GrammarFailure, LocalReport
from grammar_sync.backend import CompiledGrammar, Matcher
from grammar_sync.compiler import Failed, GrammarCompiler, Pending, Ready
from grammar_sync.masks import MaskFiller
from grammar_sync.spec import GrammarSpec
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
        terminated: Whether the grammar had already ended.
    """

    def __init__(self, sequence_id: int, token_id: int, accepted: tuple[int, ...], *, terminated: bool) -> None:
        state = "terminated" if terminated else "running"
        super().__init__(
            f"the grammar of sequence {sequence_id} refuses token {token_id} as output token {len(accepted)} "
            f"(state: {state}; the last tokens: {list(accepted[-_SHOWN_TOKENS:])})"
        )
        self.sequence_id = sequence_id
        self.token_id = token_id
        self.accepted = accepted
        self.terminated = terminated


class GrammarStatistics(msgspec.Struct, frozen=True):
    """What a sequence's grammar cost on this rank.

    Attributes:
        cache_hit: Whether the outcome of the compile was there when the sequence came.
        compile_s: Seconds of the compile, whoever asked for it first; 0 while it is under way or when it failed.
        mask_s: Seconds of filling this sequence's mask rows.
        mask_rows: How many mask rows were filled.
    """

    cache_hit: bool
    compile_s: float
    mask_s: float
    mask_rows: int


@dataclass
class _Sequence:
    spec: GrammarSpec
    cache_hit: bool
    compiled: CompiledGrammar | None = None
    compile_s: float = 0.0
    matcher: Matcher | None = None
    accepted: list[int] = field(default_factory=list)
    mask_s: float = 0.0
    mask_rows: int = 0


class GrammarManager:
    """Keeps, for each sequence with a grammar, its compile and its matcher; no method waits for a compile.

    Ids are the caller's, one a sequence: the n choices of a request are n sequences, which share one compile because
    their specs are equal.

    Args:
        vocabulary: The vocabulary of tokens and masks.
        compiler: Compiles; this manager counts in it who wants what, so nobody else may use it.
    """

    def __init__(self, vocabulary: GrammarVocabulary, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._filler = MaskFiller(vocabulary)
        self._sequences: dict[int, _Sequence] = {}

    def submit(self, sequence_id: int, spec: GrammarSpec) -> None:
        """Takes a sequence in and has its grammar compiled.

        Raises:
            GrammarStateError: The id is taken.
        """
        if sequence_id in self._sequences:
            raise GrammarStateError(f"submit: sequence {sequence_id} is there already")
        self._compiler.submit(spec)
        cache_hit = not isinstance(self._compiler.poll(spec), Pending)
        self._sequences[sequence_id] = _Sequence(spec, cache_hit)

    def local_report(self, waiting: Sequence[int]) -> LocalReport:
        """Returns which of the ``waiting`` are ready or failed on this rank, in their order, at this moment.

        Raises:
            GrammarStateError: One was never submitted, or was released.
        """
        ready: list[int] = []
        failed: list[GrammarFailure] = []
        for sequence_id in waiting:
            sequence = self._sequence(sequence_id, "local_report")
            match self._compiler.poll(sequence.spec):
                case Ready(compiled, compile_s):
                    sequence.compiled, sequence.compile_s = compiled, compile_s
                    ready.append(sequence_id)
                case Failed(message):
                    failed.append(GrammarFailure(sequence_id, message))
                case Pending():
                    continue
        return LocalReport(tuple(ready), tuple(failed))

    def start(self, sequence_id: int) -> None:
        """Puts a sequence that was reported ready at the start of its grammar, whatever it accepted before.

        Raises:
            GrammarStateError: The sequence is not known, or was not reported ready.
        """
        sequence = self._sequence(sequence_id, "start")
        if sequence.compiled is None:
            raise GrammarStateError(f"start: the grammar of sequence {sequence_id} was not reported ready")
        sequence.matcher = sequence.compiled.new_matcher()
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
            GrammarRefusal: The grammar does not allow it; this sequence must end, no other is touched.
            GrammarStateError: The sequence is not known, or was not started.
        """
        sequence, matcher = self._started(sequence_id, "accept")
        terminated = matcher.is_terminated()
        if terminated or not matcher.accept(token_id):
            raise GrammarRefusal(sequence_id, token_id, tuple(sequence.accepted), terminated=terminated)
        sequence.accepted.append(token_id)

    def is_terminated(self, sequence_id: int) -> bool:
        """Returns whether the sequence accepted a stop token: it is finished, and must not be filled any more.

        Raises:
            GrammarStateError: The sequence is not known, or was not started.
        """
        return self._started(sequence_id, "is_terminated")[1].is_terminated()

    def fill_masks(self, sequence_ids: Sequence[int]) -> torch.Tensor:
        """Returns the masks of the sequences' next tokens, int32 [R, mask_words] on the CPU, in the order given.

        Raises:
            GrammarStateError: A sequence is not known, was not started, or has terminated.
        """
        started = [self._started(sequence_id, "fill_masks") for sequence_id in sequence_ids]
        for sequence_id, (_, matcher) in zip(sequence_ids, started, strict=True):
            if matcher.is_terminated():
                raise GrammarStateError(f"fill_masks: sequence {sequence_id} has terminated")
        masks, seconds = self._filler.fill([matcher for _, matcher in started])
        for (sequence, _), row_s in zip(started, seconds, strict=True):
            sequence.mask_s += row_s
            sequence.mask_rows += 1
        return masks

    def release(self, sequence_id: int) -> None:
        """Drops a sequence, in whatever state it is.

        Raises:
            GrammarStateError: The sequence is not known.
        """
        sequence = self._sequence(sequence_id, "release")
        del self._sequences[sequence_id]
        self._compiler.discard(sequence.spec)

    def statistics(self, sequence_id: int) -> GrammarStatistics:
        """Returns what the sequence's grammar cost so far.

        Raises:
            GrammarStateError: The sequence is not known.
        """
        sequence = self._sequence(sequence_id, "statistics")
        return GrammarStatistics(sequence.cache_hit, sequence.compile_s, sequence.mask_s, sequence.mask_rows)

    def close(self) -> None:
        """Drops all sequences and closes the compiler."""
        self._sequences.clear()
        self._compiler.close()

    def _sequence(self, sequence_id: int, operation: str) -> _Sequence:
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            raise GrammarStateError(f"{operation}: sequence {sequence_id} is not known")
        return sequence

    def _started(self, sequence_id: int, operation: str) -> tuple[_Sequence, Matcher]:
        sequence = self._sequence(sequence_id, operation)
        if sequence.matcher is None:
            raise GrammarStateError(f"{operation}: sequence {sequence_id} was not started")
        return sequence, sequence.matcher
