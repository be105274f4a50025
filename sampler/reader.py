"""One pass over a rank's own slice: adjust the logits, find what the ranks exchange."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sampler.adjust import allows_other_ids, apply_mask_, mask_table
from sampler.batch import SamplingBatchInfo
from sampler.exchange import NON_FINITE, SliceFacts
from sampler.greedy import masked_largest
from sampler.group import SliceGroup
from sampler.slices import (
    GROUP_LENGTH,
    BlockParts,
    SliceShape,
    block_masses,
    first_largest,
    group_maxima,
    lane_maxima,
    largest_in_blocks,
    largest_values,
)

_TILE_ELEMENTS = 1 << 18
INFINITE_LOGIT = 1e30
_NONE = float("-inf")


class SliceReader:
    """Reads one rank's slice.

    Args:
        group: The ranks, for the one thing they must agree on before reading.
        shape: Where the slice lies.
        sanitize: Whether NaN is taken as absent and +inf as 1e30, instead of ending the row.
        candidates: How many of the largest values of a truncated row to find.
    """

    def __init__(self, group: SliceGroup, shape: SliceShape, *, sanitize: bool, candidates: int) -> None:
        self._group = group
        self._shape = shape
        self._sanitize = sanitize
        self._candidates = candidates
        self._mask_tables: dict[torch.device, torch.Tensor] = {}

    def active_bans(
        self, batch: SamplingBatchInfo, positions: Sequence[int], mask_words: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Returns which rows' stop ids are banned, [B] bool; None when none are.

        A grammar that allows nothing but stop ids wins over min_tokens; whether it does is agreed by one reduction,
        made only when a batch has both.
        """
        rows = batch.rows_below_min_tokens(positions)
        if not rows or batch.banned is None:
            return None
        active = torch.zeros(batch.row_count, dtype=torch.bool, device=batch.device)
        index = torch.tensor(rows, device=batch.device)
        if mask_words is None:
            active[index] = True
        else:
            others = allows_other_ids(mask_words, batch.banned, index, self._shape.start, self._shape.valid_size)
            active[index] = self._group.all_reduce_max_(others.to(torch.int32)) > 0
        return active

    def read_(
        self,
        logits: torch.Tensor,
        batch: SamplingBatchInfo,
        bans: torch.Tensor | None,
        mask_words: torch.Tensor | None,
    ) -> tuple[torch.Tensor, SliceFacts]:
        """Adjusts the logits in place and returns what there is to know about this slice.

        Rows go tile by tile, so that what one stage wrote is still in the cache for the next.

        Args:
            logits: [B, Vs] float32.
            batch: The rows' parameters.
            bans: From ``active_bans``.
            mask_words: [B, Vs/32] int32, or None.

        Returns:
            The largest value of each run of 32 ids, [B, Vs/32] float32, or [B, 0] when no row truncates; and what the
            ranks exchange.
        """
        rows, shape, flags = batch.row_count, self._shape, batch.flags
        self._adjust_(logits, batch, bans)
        if flags.all_greedy and not flags.logprob_rows and not flags.support_rows:
            return logits.new_empty((rows, 0)), self._read_greedy(logits, mask_words)
        groups = logits.new_empty((rows, shape.width // 32 if flags.any_truncated else 0))
        masses = logits.new_zeros((rows, shape.blocks)) if any(flags.needs_mass) else None
        # Logits that nothing changes are the model's output: its masses are taken while they are in the cache.
        raw = logits.new_zeros((rows, shape.blocks)) if mask_words is None and any(flags.needs_raw_mass) else None
        inverse_temperature = (1.0 / batch.temperature).to(torch.float32)
        block_maxima = logits.new_empty((rows, shape.blocks))
        lanes = None
        if flags.logprob_rows and not flags.any_truncated:
            lanes = logits.new_empty((rows, shape.blocks * GROUP_LENGTH))
        step = max(1, _TILE_ELEMENTS // shape.width) if logits.device.type == "cpu" else max(rows, 1)
        for first in range(0, rows, step):
            tile = slice(first, min(first + step, rows))
            if mask_words is not None:
                apply_mask_(logits[tile], mask_words[tile], self._mask_table(logits.device))
            if flags.any_truncated:
                groups[tile] = group_maxima(logits[tile])
                block_maxima[tile] = groups[tile].view(-1, shape.blocks, shape.block_length // 32).amax(dim=-1)
            else:
                kept = None if lanes is None else lanes[tile].view(-1, shape.blocks, GROUP_LENGTH)
                block_maxima[tile] = lane_maxima(logits[tile], shape.blocks, kept).amax(dim=-1)
            if masses is not None and any(flags.needs_mass[tile]):
                masses[tile] = block_masses(logits[tile], block_maxima[tile], inverse_temperature[tile])
            if raw is not None and any(flags.needs_raw_mass[tile]):
                raw[tile] = block_masses(logits[tile], block_maxima[tile], torch.ones_like(inverse_temperature[tile]))
        bad = ~(block_maxima.amax(dim=1) < float("inf"))
        for table, neutral in ((groups, _NONE), (block_maxima, _NONE), (masses, 0.0), (lanes, _NONE)):
            if table is not None:
                table.masked_fill_(bad.unsqueeze(1), neutral)
        largest = first_largest(logits, block_maxima) if flags.any_greedy else torch.zeros_like(batch.seeds)
        values, ids = self._truncated_candidates(logits, groups, batch, bad) if flags.any_truncated else (None, None)
        found = lanes if not flags.any_truncated else groups if flags.logprob_rows else None
        facts = SliceFacts(
            block_maxima.amax(dim=1),
            largest + shape.start,
            bad.to(torch.int32) * NON_FINITE,
            None if flags.all_greedy else block_maxima,
            masses,
            values,
            ids,
            raw,
            None if found is None else BlockParts(found.view(rows, shape.blocks, -1), lanes is not None),
        )
        return groups, facts

    def _truncated_candidates(
        self, logits: torch.Tensor, groups: torch.Tensor, batch: SamplingBatchInfo, bad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the largest values of the truncated rows, R of B, and their ids over the whole vocabulary.

        Args:
            logits: [B, Vs] float32, adjusted.
            groups: [B, Vs/32] float32, the maxima of runs of 32 ids.
            batch: The rows' parameters.
            bad: [B] bool, rows with a value that is not finite: they have no candidates.

        Returns:
            float32 [R, C] and int64 [R, C].
        """
        truncated = batch.truncated.nonzero().squeeze(1)
        values, ids = largest_values(logits, groups[truncated], truncated, self._candidates)
        return torch.where(bad[truncated].unsqueeze(1), _NONE, values), ids + self._shape.start

    def _read_greedy(self, logits: torch.Tensor, mask_words: torch.Tensor | None) -> SliceFacts:
        """Returns what there is to know when only the largest allowed values count; the mask is not applied.

        Args:
            logits: [B, Vs] float32.
            mask_words: [B, Vs/32] int32, or None.
        """
        block_maxima = largest_in_blocks(logits, self._shape.blocks)
        bad = ~(block_maxima.amax(dim=1) < float("inf"))
        block_maxima.masked_fill_(bad.unsqueeze(1), _NONE)
        if mask_words is None:
            maxima, columns = block_maxima.amax(dim=1), first_largest(logits, block_maxima)
        else:
            maxima, columns = masked_largest(logits, block_maxima, mask_words, self._mask_table(logits.device))
            maxima.masked_fill_(bad, _NONE)
        ids = columns.masked_fill(bad, 0) + self._shape.start
        return SliceFacts(maxima, ids, bad.to(torch.int32) * NON_FINITE, None, None, None, None)

    def _adjust_(self, logits: torch.Tensor, batch: SamplingBatchInfo, bans: torch.Tensor | None) -> None:
        """Applies everything that changes logits but the mask, which comes last, in the one order there is."""
        start = self._shape.start
        if self._sanitize:
            logits.nan_to_num_(nan=_NONE, posinf=INFINITE_LOGIT, neginf=_NONE)
        if batch.penalties is not None:
            batch.penalties.apply_(logits, start)
        if bans is not None and batch.banned is not None:
            batch.banned.add_to_(logits, start, active=bans)
        if batch.bias is not None:
            batch.bias.add_to_(logits, start)
        batch.ban_(logits, start)

    def _mask_table(self, device: torch.device) -> torch.Tensor:
        if device not in self._mask_tables:
            self._mask_tables[device] = mask_table(device)
        return self._mask_tables[device]
