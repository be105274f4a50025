"""Tensor-parallel ranks as threads of one process: a slice group whose collectives meet at a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import torch

from sampler.batch import SamplingBatchInfo
from sampler.logprobs import LogprobRows
from sampler.params import RowSampling
from sampler.processors import ProcessorRegistry
from sampler.sampler import SampleOutput, Sampler
from sampler.supports import RowSupport
from tp.partition import VocabularyBlocks

T = TypeVar("T")


class _Meeting:
    """Where the collectives of the ranks meet; one rank runs at a time, for ranks at once would fight for the GIL.

    A rank runs until it has brought its part to a collective, then the next one does. When it is its turn again, all
    have brought theirs.
    """

    def __init__(self, size: int) -> None:
        # What was brought to each collective, by rank.
        self.collectives: list[list[tuple[str, torch.Tensor]]] = []
        self.failed = False
        self._turns = [threading.Semaphore(int(rank == 0)) for rank in range(size)]
        self._ended: set[int] = set()

    def wait_for_turn(self, rank: int) -> None:
        """Returns when ``rank`` may go on."""
        assert self._turns[rank].acquire(timeout=60), "the other ranks do not go on"

    def pass_turn(self, rank: int) -> None:
        """Lets the next rank go on that has not ended."""
        size = len(self._turns)
        following = [(rank + step) % size for step in range(1, size + 1)]
        for other in following:
            if other not in self._ended:
                self._turns[other].release()
                return

    def leave(self, rank: int, *, failed: bool) -> None:
        """Ends ``rank``; when it failed, the others fail at their next collective."""
        self.failed |= failed
        self._ended.add(rank)
        self.pass_turn(rank)


class _OtherRankFailedError(Exception):
    """What ends the ranks beside one that failed."""


@dataclass
class SimulatedRank:
    """One rank's view of the group; notes the bytes of every collective."""

    rank: int
    size: int
    meeting: _Meeting
    payload_bytes: list[tuple[str, int]] = field(default_factory=list)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._meet("all_gather", tensor))

    def all_reduce_max_(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(torch.stack(self._meet("all_reduce", tensor)).amax(dim=0))

    def all_reduce_sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(torch.stack(self._meet("all_reduce", tensor)).sum(dim=0))

    def _meet(self, name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        number = len(self.payload_bytes)
        self.payload_bytes.append((name, tensor.numel() * tensor.element_size()))
        if number == len(self.meeting.collectives):
            self.meeting.collectives.append([])
        brought = self.meeting.collectives[number]
        brought.append((name, tensor.clone()))
        self.meeting.pass_turn(self.rank)
        self.meeting.wait_for_turn(self.rank)
        if self.meeting.failed:
            raise _OtherRankFailedError
        kinds = {(name, part.shape, part.dtype) for name, part in brought}
        assert (len(brought), len(kinds)) == (self.size, 1), "the ranks are out of step"
        return [part for _, part in brought]


def run_simulated(size: int, function: Callable[[SimulatedRank], T]) -> list[T]:
    """Returns what ``function(rank)`` returned on each of ``size`` ranks."""
    meeting = _Meeting(size)

    def run(rank: int) -> T:
        failed = True
        try:
            meeting.wait_for_turn(rank)
            result = function(SimulatedRank(rank, size, meeting))
            failed = False
        finally:
            meeting.leave(rank, failed=failed)
        return result

    if size == 1:
        return [run(0)]
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        errors = [future.exception() for future in futures]
        for error in sorted((error for error in errors if error), key=lambda e: isinstance(e, _OtherRankFailedError)):
            raise error
        return [future.result() for future in futures]


def padded_logits(logits: Sequence[Sequence[float]] | torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Returns whole-vocabulary logits padded with −inf to whole blocks: [B, 64 · block length]."""
    whole = torch.as_tensor(logits, dtype=torch.float32)
    padding = VocabularyBlocks(vocab_size).padded_size - vocab_size
    return torch.nn.functional.pad(whole, (0, padding), value=float("-inf"))


def mask_of(allowed: Sequence[Sequence[int] | None], vocab_size: int) -> torch.Tensor:
    """Returns mask words, −1 for rows of None: [B, words] int32; bits of padding ids are 1, as engines leave them."""
    blocks = VocabularyBlocks(vocab_size)
    bits = torch.ones((len(allowed), blocks.padded_size), dtype=torch.int64)
    for row, ids in enumerate(allowed):
        if ids is not None:
            bits[row, :vocab_size] = 0
            bits[row, list(ids)] = 1
    words = (bits.view(len(allowed), -1, 32) << torch.arange(32)).sum(dim=-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def assert_same_output(one: SampleOutput, other: SampleOutput) -> None:
    """Fails unless two outputs are equal bit for bit."""
    for name in ("token_ids", "status", "reasons", "fault_ranks"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert (one.logprobs is None) == (other.logprobs is None)
    if one.logprobs is not None and other.logprobs is not None:
        assert_same_logprobs(one.logprobs, other.logprobs)
    assert len(one.supports) == len(other.supports)
    for mine, theirs in zip(one.supports, other.supports, strict=True):
        assert mine.status is theirs.status
        for name in ("ids", "probabilities", "logprobs"):
            assert torch.equal(getattr(mine, name), getattr(theirs, name)), name


def assert_same_logprobs(one: LogprobRows, other: LogprobRows, rows: Sequence[int] | None = None) -> None:
    """Fails unless ``other`` equals ``one``, or some rows of it, bit for bit."""
    for name in LogprobRows.__dataclass_fields__:
        expected, got = getattr(one, name), getattr(other, name)
        expected = expected if rows is None else expected[list(rows)]
        # NaN equals NaN here.
        if expected.is_floating_point():
            expected, got = expected.view(torch.int64), got.view(torch.int64)
        assert torch.equal(expected, got), name


class SlicedSampler:
    """The sampler of every rank of one simulated group, called with whole-vocabulary logits."""

    def __init__(
        self,
        size: int,
        vocab_size: int,
        *,
        nan_policy: Literal["error", "sanitize"] = "error",
        candidates: int = 128,
        processors: ProcessorRegistry | None = None,
    ) -> None:
        self.size = size
        self.vocab_size = vocab_size
        self.nan_policy: Literal["error", "sanitize"] = nan_policy
        self.candidates = candidates
        self.processors = processors
        self.payload_bytes: list[tuple[str, int]] = []

    def sample(
        self,
        logits: torch.Tensor,
        rows: Sequence[RowSampling],
        positions: Sequence[int],
        mask_words: torch.Tensor | None = None,
    ) -> SampleOutput:
        """Returns rank 0's output after checking that all ranks have the same."""

        def call(
            sampler: Sampler, own: torch.Tensor, batch: SamplingBatchInfo, words: torch.Tensor | None
        ) -> SampleOutput:
            return sampler.sample(own, batch, positions, words)

        outputs = self._run(logits, rows, mask_words, call)
        for output in outputs[1:]:
            assert_same_output(outputs[0], output)
        return outputs[0]

    def draw_many(
        self,
        logits: torch.Tensor,
        rows: Sequence[RowSampling],
        positions: Sequence[int],
        draw_positions: Sequence[int],
        mask_words: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns rank 0's draws at many positions after checking that all ranks have the same."""

        def call(
            sampler: Sampler, own: torch.Tensor, batch: SamplingBatchInfo, words: torch.Tensor | None
        ) -> torch.Tensor:
            return sampler.draw_many(own, batch, positions, torch.tensor(draw_positions), words)

        outputs = self._run(logits, rows, mask_words, call)
        assert all(torch.equal(output, outputs[0]) for output in outputs)
        return outputs[0]

    def score(
        self,
        logits: torch.Tensor,
        rows: Sequence[RowSampling],
        positions: Sequence[int],
        token_ids: Sequence[int],
        mask_words: torch.Tensor | None = None,
    ) -> SampleOutput:
        """Returns rank 0's scores of given tokens after checking that all ranks have the same."""

        def call(
            sampler: Sampler, own: torch.Tensor, batch: SamplingBatchInfo, words: torch.Tensor | None
        ) -> SampleOutput:
            return sampler.score(own, batch, positions, torch.tensor(token_ids), words)

        outputs = self._run(logits, rows, mask_words, call)
        for output in outputs[1:]:
            assert_same_output(outputs[0], output)
        return outputs[0]

    def token_logprobs(self, logits: torch.Tensor, token_ids: Sequence[int], top_n: int = 0) -> LogprobRows:
        """Returns rank 0's raw logprobs of given tokens."""

        def call(
            sampler: Sampler, own: torch.Tensor, batch: SamplingBatchInfo, words: torch.Tensor | None
        ) -> LogprobRows:
            return sampler.token_logprobs(own, torch.tensor(token_ids), top_n=top_n)

        return self._run(logits, [], None, call)[0]

    def support(
        self,
        logits: torch.Tensor,
        rows: Sequence[RowSampling],
        positions: Sequence[int],
        mask_words: torch.Tensor | None = None,
    ) -> list[RowSupport]:
        """Returns rank 0's supports."""

        def call(
            sampler: Sampler, own: torch.Tensor, batch: SamplingBatchInfo, words: torch.Tensor | None
        ) -> list[RowSupport]:
            return sampler.support(own, batch, positions, words)

        return self._run(logits, rows, mask_words, call)[0]

    def _run(
        self,
        logits: torch.Tensor,
        rows: Sequence[RowSampling],
        mask_words: torch.Tensor | None,
        call: Callable[[Sampler, torch.Tensor, SamplingBatchInfo, torch.Tensor | None], T],
    ) -> list[T]:
        blocks = VocabularyBlocks(self.vocab_size)
        whole = padded_logits(logits, self.vocab_size) if logits.shape[1] == self.vocab_size else logits

        def run(group: SimulatedRank) -> T:
            own = blocks.slice_of(group.rank, group.size)
            sampler = Sampler(
                group,
                vocab_size=self.vocab_size,
                slice_start=own.start,
                block_length=own.block_length,
                nan_policy=self.nan_policy,
                candidates=self.candidates,
                processors=self.processors,
            )
            words = None if mask_words is None else mask_words[:, own.words]
            batch = SamplingBatchInfo.from_rows(rows)
            result = call(sampler, whole[:, own.start : own.stop].clone(), batch, words)
            if group.rank == 0:
                self.payload_bytes = group.payload_bytes
            return result

        return run_simulated(self.size, run)
