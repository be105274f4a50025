"""The last stage's part of a step: batch assembly, masks, and the tensor-parallel draw."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import torch

from grammar_sync.masks import MaskExchange, RowFault
from runtime.audit import Auditor
from runtime.plan import PlanRow, StepPlan, logit_rows
from runtime.reports import StepReport, TokenReport, prompt_reports, scored_reports, token_reports
from runtime.sequence import Sequence
from sampler.batch import SamplingBatchInfo
from sampler.params import RowSampling
from sampler.sampler import RowReason, Sampler

_UNCONSTRAINED = -1
_REASON_BITS = 8
_REASON_MASK = (1 << _REASON_BITS) - 1
_NO_TOKEN = -1
_REASON_OF = {
    RowFault.NONE: RowReason.NONE,
    RowFault.EMPTY: RowReason.MASK_EMPTY,
    RowFault.REFUSED: RowReason.MASK_REFUSED,
    RowFault.FAILED: RowReason.MASK_FAILED,
    RowFault.LATE: RowReason.MASK_LATE,
}


class SampledStep(NamedTuple):
    """What the last stage makes of a step.

    Attributes:
        token_ids: [B] int64, the id of each sampling row.
        statuses: [B] int64, of each sampling row; see ``row_status``.
        report: What rows asked to know; None when none did.
        audited: [B] int64, what this rank draws by itself; None without an audit.
        masks: The checksum of each constrained row's mask.
    """

    token_ids: torch.Tensor
    statuses: torch.Tensor
    report: StepReport | None
    audited: torch.Tensor | None
    masks: tuple[int, ...] = ()


def row_status(status: int) -> tuple[RowReason, int]:
    """Returns why a row has no token, and the last stage's tensor-parallel rank that saw it (−1 = no single one)."""
    return RowReason(status & _REASON_MASK), (status >> _REASON_BITS) - 1


def has_no_mask(status: int) -> bool:
    """Returns whether a row has no token because a rank had no mask for it."""
    return status & _REASON_MASK >= RowReason.MASK_EMPTY


@dataclass(slots=True)
class _Assembled:
    """A batch's parameters on the device, and how many output tokens of each row they know."""

    sequences: list[Sequence]
    info: SamplingBatchInfo
    known: list[int]


class SamplingPart:
    """Samples the rows of a plan from this rank's vocabulary slice; every rank of the last stage has one.

    Parameters go to the device once and stay there: as long as the same sequences sample together only their new tokens
    are added; when sequences leave or join, the rows that stay are kept.

    Args:
        sampler: Draws over the stage's slices.
        masks: Where grammar masks arrive.
        eos_token_ids: What ends an output; banned while ``min_tokens`` is not reached.
        in_flight_steps: How many batches alternate: one per step in flight.
        device: This rank's device.
        auditor: Checks the draws; None without an audit.
    """

    def __init__(
        self,
        sampler: Sampler,
        masks: MaskExchange,
        *,
        eos_token_ids: frozenset[int],
        in_flight_steps: int,
        device: torch.device,
        auditor: Auditor | None = None,
    ) -> None:
        self._auditor = auditor
        self._sampler = sampler
        self._masks = masks
        self._eos_token_ids = eos_token_ids
        self._device = device
        self._slots: list[_Assembled | None] = [None] * in_flight_steps

    def sample(
        self,
        plan: StepPlan,
        sequences: Rows[Sequence],
        logits: torch.Tensor,
        hidden: torch.Tensor | None = None,
    ) -> SampledStep:
        """Returns what comes of a plan's rows; all ranks of the stage call it.

        Args:
            plan: The step's plan.
            sequences: The sequence of each of its rows.
            logits: [L, Vs] float32, this rank's slice, of every token that samples or scores; overwritten.
            hidden: [L, D], what they were computed from; needed by the audit.
        """
        sampling: list[Sequence] = []
        sampling_at: list[int] = []
        prompts: dict[int, list[TokenReport]] = {}
        at = 0
        for index, (row, sequence) in enumerate(zip(plan.rows, sequences, strict=True)):
            stop = at + logit_rows(row)
            if row.scores:
                prompts[index] = self._score(row, sequence, logits[at:stop])
            if row.samples:
                drawn = 1 + len(row.draft)
                sampling += [sequence] * drawn
                sampling_at += range(stop - drawn, stop)
            at = stop
        if not sampling:
            none = torch.empty(0, dtype=torch.int64)
            return SampledStep(none, none, StepReport({}, prompts) if prompts else None, None)
        drawn_rows = torch.tensor(sampling_at, device=logits.device)
        if len(sampling_at) < at:
            logits = logits[drawn_rows]
        mask_words, mask_faults, checksums = self._received_masks(plan)
        positions = [
            len(sequence.output_token_ids) + guessed for sequence, guessed in zip(sampling, plan.guessed, strict=True)
        ]
        info = self._batch(plan, sampling)
        audited = None
        if self._auditor is not None and hidden is not None:
            audited = self._auditor.draw(hidden[drawn_rows], info, positions, mask_words)
        output = self._sampler.sample(logits, info, positions, mask_words, mask_faults)
        if audited is not None:
            # Another rank's missing mask cannot be seen in the masks alone.
            audited = torch.where(output.reasons >= int(RowReason.MASK_EMPTY), _NO_TOKEN, audited)
        statuses = output.reasons | (output.fault_ranks + 1) << _REASON_BITS
        tokens = token_reports(output, [sequence.params for sequence in sampling]) if plan.has_reports else {}
        report = StepReport(tokens, prompts, output.failures) if plan.has_reports or output.failures else None
        return SampledStep(output.token_ids, statuses, report, audited, checksums)

    def audit(self, plan: StepPlan, sampled: SampledStep, agreed: list[int]) -> None:
        """Checks the ids that the stage agreed on against what this rank drew by itself, if there is an audit.

        Raises:
            AuditError: They differ.
        """
        if self._auditor is not None and sampled.audited is not None:
            self._auditor.compare(plan, sampled.audited, agreed)

    def _score(self, row: PlanRow, sequence: Sequence, logits: torch.Tensor) -> list[TokenReport]:
        """Returns the reports of the prompt tokens that follow the row's tokens."""
        following = sequence.prompt_token_ids[row.start + 1 : row.start + row.length + 1]
        if not following:
            return []
        top_n = sequence.params.prompt_logprobs or 0
        logits = logits[: len(following)]
        token_ids = torch.tensor(following, dtype=torch.int64, device=logits.device)
        is_score = sequence.max_tokens == 0
        if not is_score or sequence.params.logprobs_mode == "raw":
            # The prompt of a request that generates is told of without the ids that it names for its output.
            named = sequence.params.logprob_token_ids if is_score else ()
            named_ids = token_ids.new_tensor(named).expand(len(following), -1) if named else None
            found = self._sampler.token_logprobs(logits, token_ids, top_n=top_n, named_ids=named_ids)
            return prompt_reports(found, top_n)
        first = len(sequence.prompt_token_ids) - sequence.forced_output_tokens
        places = range(row.start + 1, row.start + 1 + len(following))
        rows = [self._row_at(sequence, place, first) for place in places]
        info = SamplingBatchInfo.from_rows(rows, device=self._device)
        return scored_reports(
            self._sampler.score(logits, info, [max(place - first, 0) for place in places], token_ids), following, top_n
        )

    def _row_at(self, sequence: Sequence, place: int, first: int) -> RowSampling:
        """Returns the row that draws a scored sequence's token at ``place``, were those from ``first`` on generated."""
        token_ids, params = sequence.prompt_token_ids, sequence.params
        return RowSampling(
            params=msgspec.structs.replace(params, logprobs=params.prompt_logprobs),
            seed=sequence.seed,
            stop_ids=self._banned_until_min_tokens(sequence),
            bad_words_token_ids=sequence.bad_words_token_ids,
            prompt_ids=token_ids[: min(place, first)],
            output_ids=token_ids[first:place],
        )

    def _received_masks(self, plan: StepPlan) -> tuple[torch.Tensor | None, torch.Tensor | None, tuple[int, ...]]:
        """Returns every sampling row's mask, [B, Vs / 32] int32, and fault, [B] int32; None where there is none.

        A fault is given as a ``RowReason``; it may be this rank's alone. At last come the masks' checksums.
        """
        if not plan.constrained_rows:
            return None, None, ()
        received = self._masks.receive(plan.constrained_rows)
        rows, constrained = len(plan.sampling_rows), list(plan.constrained_rows)
        words = torch.full((rows, received.words.shape[1]), _UNCONSTRAINED, dtype=torch.int32)
        words[constrained] = received.words
        if not received.faults.any():
            return words.to(self._device), None, received.checksums
        faults = torch.zeros(rows, dtype=torch.int32)
        reasons = [int(_REASON_OF[RowFault(fault)]) for fault in received.faults.tolist()]
        faults[constrained] = torch.tensor(reasons, dtype=torch.int32)
        return words.to(self._device), faults.to(self._device), received.checksums

    def _batch(self, plan: StepPlan, sampling: Rows[Sequence]) -> SamplingBatchInfo:
        """Returns the parameters of a plan's sampling rows, each as if all that it follows had been drawn."""
        if not any(plan.guessed):
            return self._assembled(plan.step % len(self._slots), sampling)
        places = zip(plan.sampling_rows, plan.guessed, sampling, strict=True)
        rows = [self._sampling_row(sequence, row.draft[:guessed]) for row, guessed, sequence in places]
        return SamplingBatchInfo.from_rows(rows, device=self._device)

    def _assembled(self, slot: int, sequences: Rows[Sequence]) -> SamplingBatchInfo:
        """Returns the parameters of ``sequences``, row for row, with their penalty state up to date."""
        old = self._slots[slot]
        new = self._build(sequences) if old is None else self._rearranged(old, sequences)
        self._add_new_tokens(new, sequences)
        self._slots[slot] = new
        return new.info

    def _rearranged(self, old: _Assembled, sequences: Rows[Sequence]) -> _Assembled:
        """Returns ``old`` without the rows that left and with those that joined after them.

        A row that sampled elsewhere meanwhile, in another slot, has more than one new token and joins afresh.
        """
        row_of = {
            sequence.sequence_id: row
            for row, (sequence, known) in enumerate(zip(old.sequences, old.known, strict=True))
            if len(sequence.output_token_ids) - known <= 1
        }
        kept = [sequence for sequence in sequences if sequence.sequence_id in row_of]
        joined = list(sequences[len(kept) :])
        if not kept or any(sequence.sequence_id in row_of for sequence in joined):
            return self._build(sequences)
        rows = [row_of[sequence.sequence_id] for sequence in kept]
        if rows == list(range(len(old.sequences))) and not joined:
            return old
        info, known = old.info, [old.known[row] for row in rows]
        info.filter(rows)
        if joined:
            added = self._build(joined)
            info.merge(added.info)
            known += added.known
        return _Assembled(list(sequences), info, known)

    def _build(self, sequences: Rows[Sequence]) -> _Assembled:
        rows = [self._sampling_row(sequence) for sequence in sequences]
        info = SamplingBatchInfo.from_rows(rows, device=self._device)
        return _Assembled(list(sequences), info, [len(sequence.output_token_ids) for sequence in sequences])

    def _sampling_row(self, sequence: Sequence, draft: tuple[int, ...] = ()) -> RowSampling:
        """Returns the row that draws what follows a sequence's tokens and ``draft``."""
        return RowSampling(
            params=sequence.params,
            seed=sequence.seed,
            choice=sequence.choice,
            stop_ids=self._banned_until_min_tokens(sequence),
            bad_words_token_ids=sequence.bad_words_token_ids,
            prompt_ids=sequence.prompt_token_ids,
            output_ids=(*sequence.output_token_ids, *draft),
        )

    def _banned_until_min_tokens(self, sequence: Sequence) -> tuple[int, ...]:
        if sequence.params.min_tokens == 0:
            return ()
        return tuple(sorted(self._eos_token_ids.union(sequence.params.stop_token_ids)))

    def _add_new_tokens(self, assembled: _Assembled, sequences: Rows[Sequence]) -> None:
        """Adds the token that each row was committed since it last sampled; a row that just joined knows all of its."""
        newest = [_NO_TOKEN] * len(sequences)
        for row, sequence in enumerate(sequences):
            if len(sequence.output_token_ids) > assembled.known[row]:
                newest[row] = sequence.output_token_ids[-1]
                assembled.known[row] = len(sequence.output_token_ids)
        if any(token_id != _NO_TOKEN for token_id in newest):
            assembled.info.append_tokens(torch.tensor(newest, dtype=torch.int64))
