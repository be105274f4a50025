"""The tensor-parallel sampler: one token per row from vocabulary slices, exact, at any tp_size.

A step is one pass over the slice (adjust, find the largest values and block masses), one packed all_gather, and for
rows whose draw the gathered facts do not settle: exact search rounds and one small reduction. What is decided about a
row depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import torch

from sampler.batch import SamplingBatchInfo
from sampler.draw import SliceDraw
from sampler.exchange import NON_FINITE, PROCESSOR_FAILED, exchange, in_block_order
from sampler.group import SliceGroup
from sampler.logprobs import LogprobRows, SliceLogprobs
from sampler.philox import uniform_53
from sampler.processor_faults import ProcessorFault, agree_on_faults
from sampler.processors import ProcessorRegistry, ProcessorRunner
from sampler.reader import INFINITE_LOGIT, SliceReader
from sampler.report import LogprobReporter, LogprobRequest
from sampler.slices import VOCABULARY_BLOCKS, SliceShape, blocks_of
from sampler.supports import RowStatus, RowSupport, report_supports
from sampler.truncation import Searched, Step, Supports, Truncated, decide_truncated, search_unsettled

DEFAULT_CANDIDATES = 128
MAX_SUPPORT = 4096
_NONE = float("-inf")


class SamplerError(RuntimeError):
    """The sampler was called with what does not fit together: a fault of the program, not of a client."""


class RowReason(IntEnum):
    """Why a row is INVALID."""

    NONE = 0
    EMPTY_SUPPORT = 1
    NON_FINITE = 2
    PROCESSOR_FAILED = 3
    MASK_EMPTY = 4
    MASK_REFUSED = 5
    MASK_FAILED = 6
    MASK_LATE = 7


@dataclass(frozen=True)
class SampleOutput:
    """One step's tokens, the same on every rank.

    Attributes:
        token_ids: [B] int64; −1 for an INVALID row.
        status: [B] int64, a ``RowStatus`` each: OVERFLOW where a support was asked for and is too large to report.
        reasons: [B] int64, a ``RowReason`` each.
        fault_ranks: [B] int64, the lowest rank of the group that saw the NaN or +inf, whose processor failed or who had
            no mask; −1 where that is not the reason.
        logprobs: One row for each of ``batch.flags.logprob_rows``, in that order; None when there is none. Those of an
            INVALID row mean nothing.
        supports: What could have been drawn, for each of ``batch.flags.support_rows``, in that order.
        failures: Why a logit processor failed, in one line that names it, for each row that ended so.
    """

    token_ids: torch.Tensor
    status: torch.Tensor
    reasons: torch.Tensor
    fault_ranks: torch.Tensor
    logprobs: LogprobRows | None
    supports: list[RowSupport]
    failures: dict[int, str]


@dataclass(frozen=True)
class _Opening:
    """A step after the exchange.

    Attributes:
        step: What every rank knows.
        fault_ranks: [B] int64, as in ``SampleOutput``.
        request: What rows ask about logprobs, if any does.
        gathered: The ranks' answers to it.
        failures: As in ``SampleOutput``.
    """

    step: Step
    fault_ranks: torch.Tensor
    request: LogprobRequest | None
    gathered: torch.Tensor | None
    failures: dict[int, str]


class Sampler:
    """Draws tokens from this rank's vocabulary slice, together with the ranks that hold the others.

    What happens to a row's logits, in the one order there is: logit processors in the request's order; the NaN policy;
    frequency and presence penalty; the stop ids' ban until ``min_tokens``; repetition penalty; logit bias; allowed ids,
    banned ids and bad words; the grammar's mask; temperature; the filters; the draw. Raw logprobs are of the logits
    before the first of these, processed ones of those after the temperature.

    Args:
        group: The ranks; all of them make the same calls in the same order.
        vocab_size: How many ids the model's LM head has; ids from there on are padding and never drawn.
        slice_start: Id of this rank's first column: whole canonical blocks, as even a run as possible.
        block_length: Ids of one of the 64 canonical blocks, a multiple of 32.
        nan_policy: ``error`` ends a row with a NaN or +inf; ``sanitize`` takes NaN as absent and +inf as 1e30.
        candidates: How many of a truncated row's largest values are gathered. The distribution does not depend on it.
        processors: The logit processors that rows may name.

    Attributes:
        searches: Steps so far in which the gathered candidates did not settle every row, so that rounds of reductions
            searched for their supports.
        searched_rows: Those rows.

    Raises:
        SamplerError: ``slice_start`` is not where this rank's blocks begin, or a size makes no sense.
    """

    def __init__(
        self,
        group: SliceGroup,
        *,
        vocab_size: int,
        slice_start: int,
        block_length: int,
        nan_policy: Literal["error", "sanitize"] = "error",
        candidates: int = DEFAULT_CANDIDATES,
        processors: ProcessorRegistry | None = None,
    ) -> None:
        if not 1 <= group.size <= VOCABULARY_BLOCKS:
            raise SamplerError(f"a vocabulary of {VOCABULARY_BLOCKS} blocks cannot be cut over {group.size} ranks")
        if block_length % 32 or not 0 < vocab_size <= VOCABULARY_BLOCKS * block_length or candidates < 1:
            raise SamplerError(f"vocab_size {vocab_size}, block_length {block_length}, candidates {candidates}")
        blocks = blocks_of(group.rank, group.size)
        if slice_start != blocks.start * block_length:
            raise SamplerError(
                f"the slice of rank {group.rank} of {group.size} starts at id {blocks.start * block_length}, "
                f"not {slice_start}"
            )
        width = len(blocks) * block_length
        valid_size = min(max(vocab_size - slice_start, 0), width)
        self.searches = 0
        self.searched_rows = 0
        self._group = group
        self._shape = SliceShape(slice_start, blocks.start, len(blocks), block_length, valid_size)
        self._vocab_size = vocab_size
        self._sanitize = nan_policy == "sanitize"
        self._reader = SliceReader(group, self._shape, sanitize=self._sanitize, candidates=candidates)
        self._logprobs = SliceLogprobs(group, self._shape)
        self._reporter = LogprobReporter(group, self._logprobs, sanitize=self._sanitize)
        registry = ProcessorRegistry({}) if processors is None else processors
        self._processors = ProcessorRunner(registry, group, self._shape, vocab_size)
        self._draw = SliceDraw(group, self._shape)

    def sample(
        self,
        logits: torch.Tensor,
        batch: SamplingBatchInfo,
        positions: Sequence[int],
        mask_words: torch.Tensor | None = None,
        mask_faults: torch.Tensor | None = None,
    ) -> SampleOutput:
        """Returns one token per row; every rank of the group calls it with its own slice.

        Args:
            logits: [B, Vs] float32, this rank's slice of the model's output, padding −inf. Modified in place.
            batch: The rows' parameters.
            positions: For each row, how many tokens its choice has generated so far, which is the index of the token
                drawn now. A restart, another chunking or another batch does not change it.
            mask_words: [B, Vs/32] int32, this rank's words of every row's grammar mask, −1 throughout for a row
                without one; None when no row has one (on all ranks alike).
            mask_faults: [B] int32, a ``RowReason`` from MASK_EMPTY on for a row that has no usable mask here, else 0;
                None when this rank knows of none. Ranks may differ: a row ends with the largest of all ranks' reasons.

        Raises:
            SamplerError: A shape or dtype does not fit the batch.
        """
        opening = self._begin(logits, batch, positions, mask_words, mask_faults=mask_faults)
        step = opening.step
        lowest = torch.full_like(step.facts.maxima, _NONE) if batch.flags.support_rows else None
        token_ids = torch.where(batch.greedy & (step.reasons == 0), step.facts.largest_ids, -1)
        if bool(step.sampled.any()):
            index = torch.as_tensor(positions, dtype=torch.int64, device=logits.device)
            found = self._find_supports(step)
            if lowest is not None:
                _set_floors_(lowest, found.truncated, found.searched)
            self._draw.once_(token_ids, step, found, uniform_53(batch.seeds, batch.choices, index))
        return self._output(opening, token_ids, lowest)

    def draw_many(
        self,
        logits: torch.Tensor,
        batch: SamplingBatchInfo,
        positions: Sequence[int],
        draw_positions: torch.Tensor,
        mask_words: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns what the rows draw at M positions of their streams, all else as at ``positions``: [B, M] int64.

        Every rank of the group calls it. The supports are found once: a draw costs next to nothing. Each is what
        ``sample`` draws there from the same support, bit for bit; −1 for an INVALID row.

        Args:
            logits: As for ``sample``.
            batch: The rows' parameters.
            positions: As for ``sample``: where ``min_tokens`` stands.
            draw_positions: [M] int64, the positions to draw at, the same for all rows.
            mask_words: As for ``sample``.

        Raises:
            SamplerError: A shape or dtype does not fit the batch.
        """
        step = self._begin(logits, batch, positions, mask_words).step
        greedy = torch.where(batch.greedy & (step.reasons == 0), step.facts.largest_ids, -1)
        token_ids = greedy.unsqueeze(1).repeat(1, len(draw_positions))
        if bool(step.sampled.any()):
            uniform = uniform_53(batch.seeds.unsqueeze(1), batch.choices.unsqueeze(1), draw_positions)
            self._draw.many_(token_ids, step, self._find_supports(step), uniform)
        return token_ids

    def score(
        self,
        logits: torch.Tensor,
        batch: SamplingBatchInfo,
        positions: Sequence[int],
        token_ids: torch.Tensor,
        mask_words: torch.Tensor | None = None,
    ) -> SampleOutput:
        """Returns the logprobs of given tokens instead of drawing; everything before the draw is as for ``sample``.

        Args:
            logits: As for ``sample``.
            batch: The rows' parameters; rows that ask for logprobs get them.
            positions: As for ``sample``.
            token_ids: [B] int64, each row's token.
            mask_words: As for ``sample``.

        Raises:
            SamplerError: A shape or dtype does not fit the batch.
        """
        opening = self._begin(logits, batch, positions, mask_words, given_ids=token_ids)
        return self._output(opening, torch.where(opening.step.reasons == 0, token_ids, -1), None)

    def token_logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, *, top_n: int = 0, named_ids: torch.Tensor | None = None
    ) -> LogprobRows:
        """Returns the raw logprobs of given tokens at T positions: of prompts, and of texts to score.

        Every rank of the group calls it with its own slice. NaN throughout a position whose logits the NaN policy
        refuses.

        Args:
            logits: [T, Vs] float32, contiguous, this rank's slice of the model's output, padding −inf. Left as it is.
            token_ids: [T] int64, the token at each position; −1 = none.
            top_n: How many of the most likely ids to report.
            named_ids: [T, m] int64, other ids to report; −1 fills up.
        """
        if self._sanitize:
            logits = logits.nan_to_num(nan=_NONE, posinf=INFINITE_LOGIT, neginf=_NONE)
        return self._logprobs.token_logprobs(logits, token_ids, top_n=top_n, named_ids=named_ids)

    def support(
        self,
        logits: torch.Tensor,
        batch: SamplingBatchInfo,
        positions: Sequence[int],
        mask_words: torch.Tensor | None = None,
    ) -> list[RowSupport]:
        """Returns what ``sample`` would draw from, row by row, assembled from the slices; arguments as for ``sample``.

        For tests and for replaying a row: it gathers whole supports.
        """
        step = self._begin(logits, batch, positions, mask_words).step
        floors = torch.full_like(step.facts.maxima, _NONE)
        truncated = decide_truncated(step)
        _set_floors_(floors, truncated, search_unsettled(self._group, step, truncated, self._shape))
        rows = range(batch.row_count)
        return report_supports(self._group, self._shape.start, step, rows, floors, limit=self._vocab_size)

    def _begin(
        self,
        logits: torch.Tensor,
        batch: SamplingBatchInfo,
        positions: Sequence[int],
        mask_words: torch.Tensor | None,
        *,
        mask_faults: torch.Tensor | None = None,
        given_ids: torch.Tensor | None = None,
    ) -> _Opening:
        """Adjusts the slice, reads it and exchanges what was found."""
        self._check(logits, batch, positions, mask_words)
        asks = bool(batch.flags.logprob_rows)
        kept = self._reporter.keep(logits, batch, masked=mask_words is not None) if asks else None
        failed = self._processors.apply_(logits, batch) if batch.flags.processed_rows else {}
        bans = self._reader.active_bans(batch, positions, mask_words)
        groups, own = self._reader.read_(logits, batch, bans, mask_words)
        if failed:
            own.faults[list(failed)] = PROCESSOR_FAILED
        if mask_faults is not None:
            torch.maximum(own.faults, mask_faults, out=own.faults)
        request = None
        if asks:
            request = self._reporter.request(batch, kept, logits, facts=own, given_ids=given_ids)
        rider = None if request is None else request.table
        exchanged = exchange(self._group, own, rider, block_length=self._shape.block_length)
        facts = exchanged.facts
        empty = torch.where(facts.maxima == _NONE, int(RowReason.EMPTY_SUPPORT), int(RowReason.NONE))
        reasons = torch.where(facts.faults == NON_FINITE, int(RowReason.NON_FINITE), empty)
        reasons = torch.where(facts.faults == PROCESSOR_FAILED, int(RowReason.PROCESSOR_FAILED), reasons)
        reasons = torch.where(facts.faults >= int(RowReason.MASK_EMPTY), facts.faults, reasons)
        step = Step(batch, self._vocab_size, logits, groups, facts, reasons, (reasons == 0) & ~batch.greedy)
        failures = self._failures(reasons, exchanged.fault_ranks, failed) if batch.flags.processed_rows else {}
        return _Opening(step, exchanged.fault_ranks, request, exchanged.rider, failures)

    def _failures(
        self, reasons: torch.Tensor, fault_ranks: torch.Tensor, known: Mapping[int, ProcessorFault]
    ) -> dict[int, str]:
        """Returns why processors failed, and sets the ranks on which they did; where none did nothing is exchanged."""
        ended = [row for row, reason in enumerate(reasons.tolist()) if reason == RowReason.PROCESSOR_FAILED]
        agreed = agree_on_faults(self._group, ended, known, reasons.device) if ended else {}
        for row, (rank, _) in agreed.items():
            fault_ranks[row] = rank
        return {row: why for row, (_, why) in agreed.items()}

    def _output(self, opening: _Opening, token_ids: torch.Tensor, floors: torch.Tensor | None) -> SampleOutput:
        """Returns the step's tokens with what the rows asked to know.

        Args:
            opening: The step.
            token_ids: [B] int64.
            floors: [B] float32, the smallest value in each support; None when no support is to be reported.
        """
        step, logprobs = opening.step, None
        status = torch.where(step.reasons > 0, int(RowStatus.INVALID), int(RowStatus.OK))
        if opening.request is not None and opening.gathered is not None:
            logprobs = self._reporter.answer(opening.request, opening.gathered, step.logits, token_ids)
        supports: list[RowSupport] = []
        if floors is not None:
            rows = step.batch.flags.support_rows
            supports = report_supports(self._group, self._shape.start, step, rows, floors, limit=MAX_SUPPORT)
            for row, support in zip(rows, supports, strict=True):
                status[row] = int(support.status)
        return SampleOutput(token_ids, status, step.reasons, opening.fault_ranks, logprobs, supports, opening.failures)

    def _check(
        self,
        logits: torch.Tensor,
        batch: SamplingBatchInfo,
        positions: Sequence[int],
        mask_words: torch.Tensor | None,
    ) -> None:
        rows, width = batch.row_count, self._shape.width
        if logits.shape != (rows, width) or logits.dtype != torch.float32 or not logits.is_contiguous():
            raise SamplerError(
                f"logits must be contiguous float32 [{rows}, {width}], not {logits.dtype} {list(logits.shape)}"
            )
        if len(positions) != rows:
            raise SamplerError(f"{rows} rows need {rows} positions, not {len(positions)}")
        if mask_words is not None and (mask_words.shape != (rows, width // 32) or mask_words.dtype != torch.int32):
            raise SamplerError(
                f"mask_words must be int32 [{rows}, {width // 32}], not {mask_words.dtype} {list(mask_words.shape)}"
            )

    def _find_supports(self, step: Step) -> Supports:
        """Returns what the sampled rows are drawn from; every rank of the group calls it."""
        truncated = decide_truncated(step)
        searched = search_unsettled(self._group, step, truncated, self._shape)
        self.searches += bool(len(searched.rows))
        self.searched_rows += len(searched.rows)
        unfiltered = (step.sampled & ~step.batch.truncated).nonzero().squeeze(1)
        floors = torch.cat((torch.full_like(unfiltered, _NONE, dtype=torch.float32), searched.thresholds))
        wide = torch.cat((unfiltered, searched.rows))
        return Supports(truncated, searched, wide, floors, self._block_weights(step, unfiltered, searched))

    def _block_weights(self, step: Step, unfiltered: torch.Tensor, searched: Searched) -> torch.Tensor:
        """Returns the supports' block masses relative to the rows' maxima, of all ranks: [N, 64] float64."""
        known = step.logits.new_empty((0, VOCABULARY_BLOCKS), dtype=torch.float64)
        if step.facts.block_masses is not None:
            known = step.block_weights(unfiltered, step.facts.block_masses[unfiltered])
        if not len(searched.rows):
            return known
        largest = len(blocks_of(0, self._group.size))
        padded = torch.nn.functional.pad(searched.masses, (0, largest - self._shape.blocks))
        return torch.cat((known, in_block_order(self._group.all_gather(padded))))


def _set_floors_(floors: torch.Tensor, truncated: Truncated, searched: Searched) -> None:
    """Sets the smallest value in the support of the truncated rows: [B] float32."""
    settled = truncated.decision.settled
    floors[truncated.rows[settled]] = truncated.decision.threshold[settled]
    floors[searched.rows] = searched.thresholds
