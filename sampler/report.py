"""What rows ask to know beside their token: logprobs and supports. Rows that do not ask cost nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sampler.batch import SamplingBatchInfo
from sampler.exchange import SliceFacts
from sampler.group import SliceGroup
from sampler.logprobs import Distributions, LogprobRows, RowsToRead, SliceLogprobs
from sampler.reader import INFINITE_LOGIT

_NONE = float("-inf")


@dataclass(frozen=True)
class KeptRows:
    """Copies of the model's output, for rows whose raw logprobs are asked for and whose logits are about to change.

    Attributes:
        logits: [K, Vs] float32.
        places: [K] int64, their places among the rows that ask for logprobs.
    """

    logits: torch.Tensor
    places: torch.Tensor


@dataclass(frozen=True)
class LogprobRequest:
    """What a step's rows ask for, and this rank's answer.

    Attributes:
        rows: [N] int64, the rows that ask.
        kept: Rows whose logits were copied; None when none was.
        temperature: [N] float64; 1 for raw logprobs.
        given_ids: [N] int64, ids known before the draw; None when they are to be drawn.
        named_ids: [N, m] int64.
        top_n: The largest number of most likely ids asked for.
        table: This rank's table, to be gathered.
    """

    rows: torch.Tensor
    kept: KeptRows | None
    temperature: torch.Tensor
    given_ids: torch.Tensor | None
    named_ids: torch.Tensor
    top_n: int
    table: torch.Tensor


class LogprobReporter:
    """Answers, for one rank, what a batch's rows ask about logprobs.

    Args:
        group: The ranks; all make the same calls in the same order.
        reader: This rank's part in logprobs.
        sanitize: Whether NaN is taken as absent and +inf as 1e30 in the model's output.
    """

    def __init__(self, group: SliceGroup, reader: SliceLogprobs, *, sanitize: bool) -> None:
        self._group = group
        self._reader = reader
        self._sanitize = sanitize

    def keep(self, logits: torch.Tensor, batch: SamplingBatchInfo, *, masked: bool) -> KeptRows | None:
        """Returns copies of what the step is about to change; None when no raw logprob depends on it.

        Args:
            logits: [B, Vs] float32, the model's output.
            batch: The rows' parameters.
            masked: Whether there are grammar masks.
        """
        flags = batch.flags
        asks = zip(flags.raw_logprobs, flags.changed_logits, strict=True)
        places = [place for place, (raw, changed) in enumerate(asks) if raw and (changed or masked)]
        if not places:
            return None
        index = torch.tensor([flags.logprob_rows[place] for place in places], device=logits.device)
        kept = logits[index]
        if self._sanitize:
            kept.nan_to_num_(nan=_NONE, posinf=INFINITE_LOGIT, neginf=_NONE)
        return KeptRows(kept, torch.tensor(places, device=logits.device))

    def request(
        self,
        batch: SamplingBatchInfo,
        kept: KeptRows | None,
        logits: torch.Tensor,
        *,
        facts: SliceFacts,
        given_ids: torch.Tensor | None,
    ) -> LogprobRequest:
        """Returns what the rows ask for and this rank's answer, before the draw.

        Args:
            batch: The rows' parameters; at least one row asks.
            kept: From ``keep``.
            logits: [B, Vs] float32, after all changes.
            facts: Of this rank's slice.
            given_ids: [B] int64, ids that are known already; None when they are to be drawn.
        """
        flags, device = batch.flags, logits.device
        rows = torch.tensor(flags.logprob_rows, device=device)
        raw = torch.tensor(flags.raw_logprobs, device=device)
        temperature = torch.where(raw, 1.0, batch.temperature[rows])
        named_ids = rows.new_empty((len(rows), 0)) if batch.named is None else batch.named.ids[rows]
        given = None if given_ids is None else given_ids[rows]
        ids = named_ids if given is None else torch.cat((given.unsqueeze(1), named_ids), dim=1)
        parts = facts.parts
        if parts is not None and len(rows) < batch.row_count:
            parts = parts.take(rows)
        changed = RowsToRead(logits, rows, temperature, parts)
        if facts.block_masses is not None:
            # The draw's masses serve where it has them at the same temperature.
            known = torch.tensor(flags.needs_mass, device=device)[rows] & (temperature == batch.temperature[rows])
            changed = changed.knowing(facts.block_masses[rows], known)
        if facts.raw_masses is not None:
            changed = changed.knowing(facts.raw_masses[rows], torch.tensor(flags.needs_raw_mass, device=device)[rows])
        if kept is None:
            table = self._reader.read(changed, flags.top_logprobs, ids)
        else:
            table = self._read_both(changed, kept, flags.top_logprobs, ids)
        return LogprobRequest(rows, kept, temperature, given, named_ids, flags.top_logprobs, table)

    def answer(
        self, request: LogprobRequest, gathered: torch.Tensor, logits: torch.Tensor, token_ids: torch.Tensor
    ) -> LogprobRows:
        """Returns the logprobs of the rows that asked; one small reduction where ids were drawn.

        Args:
            request: From ``request``.
            gathered: [size, N, width] int32, the ranks' tables.
            logits: [B, Vs] float32, after all changes.
            token_ids: [B] int64, the ids drawn or given.
        """
        found: Distributions = self._reader.merge(gathered, request.temperature, request.top_n)
        if request.given_ids is not None:
            return found.report(request.given_ids, found.values[:, 0], request.named_ids, found.values[:, 1:])
        drawn = token_ids[request.rows]
        values = self._reader.values_at(logits, request.rows, drawn.unsqueeze(1)).squeeze(1)
        if request.kept is not None:
            places = request.kept.places
            own_rows = torch.arange(len(places), device=places.device)
            values[places] = self._reader.values_at(request.kept.logits, own_rows, drawn[places].unsqueeze(1)).squeeze(
                1
            )
        return found.report(drawn, self._group.all_reduce_max_(values), request.named_ids, found.values)

    def _read_both(self, changed: RowsToRead, kept: KeptRows, top_n: int, ids: torch.Tensor) -> torch.Tensor:
        """Returns the table of rows of which some were kept: these from their copies, the rest as they are now."""
        places = kept.places
        own_rows = torch.arange(len(places), device=places.device)
        raw = self._reader.read(RowsToRead(kept.logits, own_rows, changed.temperature[places]), top_n, ids[places])
        table = raw.new_empty((len(changed.rows), raw.shape[1]))
        table[places] = raw
        others = torch.ones(len(changed.rows), dtype=torch.bool, device=places.device)
        others[places] = False
        rest = others.nonzero().squeeze(1)
        table[rest] = self._reader.read(changed.take(rest), top_n, ids[rest])
        return table
