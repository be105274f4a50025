"""Logprobs from vocabulary slices: of selected ids, of the most likely ones, of named ones; one definition for all.

The logprob of id i is (z_i − max) / T − log Σ exp((z − max) / T), the sum taken from the masses of the 64 canonical
blocks. Sampling, prompt positions and scoring all come here, so prefill and decode agree bit for bit on the same
logits, whatever the tp_size, the batch and the row. What the ranks exchange grows with the rows and the ids asked for,
never with the vocabulary. A banned id has −inf.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from sampler.exchange import in_block_order
from sampler.group import SliceGroup
from sampler.slices import (
    GROUP_LENGTH,
    BlockParts,
    SliceShape,
    block_masses,
    blocks_of,
    folded_sum,
    lane_maxima,
    largest_places,
)

LOGPROB_FLOOR = -9999.0
_NO_ID = -1
_LAST = torch.iinfo(torch.int32).max
_NONE = float("-inf")
_TILE_ELEMENTS = 1 << 18


def finite_logprob(logprob: float) -> float:
    """Returns a logprob as JSON can hold it: −9999.0 for everything smaller, −inf included, and for NaN."""
    return logprob if logprob > LOGPROB_FLOOR else LOGPROB_FLOOR


@dataclass(frozen=True)
class LogprobRows:
    """Logprobs of N rows, the same on every rank; NaN throughout a row with a NaN or +inf, or with every id banned.

    Attributes:
        token_ids: [N] int64, the ids that were drawn or given; −1 in a row without one.
        logprobs: [N] float64, theirs.
        top_ids: [N, n] int64, the most likely ids, equally likely ones by ascending id; −1 where the vocabulary ends.
        top_logprobs: [N, n] float64, theirs.
        named_ids: [N, m] int64, the ids asked for by name; −1 fills up.
        named_logprobs: [N, m] float64, theirs.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor
    named_ids: torch.Tensor
    named_logprobs: torch.Tensor


@dataclass(frozen=True)
class RowsToRead:
    """Rows of a slice whose logprobs are asked for.

    Attributes:
        logits: [R, Vs] float32, contiguous.
        rows: [N] int64, which of them are asked for, ascending.
        temperature: [N] float64.
        parts: The largest values of their blocks' parts; None = not known.
        masses: [N, nb] float32, block masses that are known already; None = of no row.
        known: [N] bool, the rows whose masses are known; None = of no row.
    """

    logits: torch.Tensor
    rows: torch.Tensor
    temperature: torch.Tensor
    parts: BlockParts | None = None
    masses: torch.Tensor | None = None
    known: torch.Tensor | None = None

    def knowing(self, masses: torch.Tensor, known: torch.Tensor) -> RowsToRead:
        """Returns the same rows with the block masses of some: [N, nb] float32 and [N] bool."""
        if self.masses is not None and self.known is not None:
            masses, known = torch.where(known.unsqueeze(1), masses, self.masses), known | self.known
        return replace(self, masses=masses, known=known)

    def take(self, index: torch.Tensor) -> RowsToRead:
        """Returns some of the rows that are asked for."""
        parts = None if self.parts is None else self.parts.take(index)
        masses, known = (None if table is None else table[index] for table in (self.masses, self.known))
        return RowsToRead(self.logits, self.rows[index], self.temperature[index], parts, masses, known)


@dataclass(frozen=True)
class Distributions:
    """What all ranks know about the distributions of N rows.

    Attributes:
        maxima: [N] float64.
        log_mass: [N] float64, log Σ exp((z − max) / T).
        temperature: [N] float64.
        top_ids: [N, n] int64.
        top_values: [N, n] float32, logits.
        values: [N, K] float32, logits of the ids asked for.
    """

    maxima: torch.Tensor
    log_mass: torch.Tensor
    temperature: torch.Tensor
    top_ids: torch.Tensor
    top_values: torch.Tensor
    values: torch.Tensor

    def logprobs(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the logprobs of logits: [N, K] float64 from [N, K] float32; NaN where a row has no distribution."""
        shifted = (values.to(torch.float64) - self.maxima.unsqueeze(1)) / self.temperature.unsqueeze(1)
        return shifted - self.log_mass.unsqueeze(1)

    def report(
        self, token_ids: torch.Tensor, values: torch.Tensor, named_ids: torch.Tensor, named: torch.Tensor
    ) -> LogprobRows:
        """Returns the logprobs of ids with these logits.

        Args:
            token_ids: [N] int64.
            values: [N] float32, their logits.
            named_ids: [N, m] int64.
            named: [N, m] float32, their logits.
        """
        return LogprobRows(
            token_ids,
            self.logprobs(values.unsqueeze(1)).squeeze(1),
            self.top_ids,
            self.logprobs(self.top_values),
            named_ids,
            self.logprobs(named),
        )


class SliceLogprobs:
    """One rank's part in logprobs.

    Args:
        group: The ranks; all make the same calls in the same order.
        shape: Where this rank's slice lies.
    """

    def __init__(self, group: SliceGroup, shape: SliceShape) -> None:
        self._group = group
        self._shape = shape
        self._blocks = max(len(blocks_of(rank, group.size)) for rank in range(group.size))

    def token_logprobs(
        self,
        logits: torch.Tensor,
        token_ids: torch.Tensor,
        *,
        top_n: int = 0,
        named_ids: torch.Tensor | None = None,
    ) -> LogprobRows:
        """Returns the raw logprobs of given ids at T positions, without a draw: prompt logprobs and scores.

        Every rank of the group calls it with its own slice; one all_gather.

        Args:
            logits: [T, Vs] float32, contiguous, this rank's slice of the model's output, padding −inf. Left as it is.
            token_ids: [T] int64, the id at each position; −1 = none.
            top_n: How many of the most likely ids to report.
            named_ids: [T, m] int64, other ids to report; −1 fills up.
        """
        count = len(token_ids)
        if named_ids is None:
            named_ids = token_ids.new_empty((count, 0))
        rows = torch.arange(count, device=logits.device)
        temperature = torch.ones(count, dtype=torch.float64, device=logits.device)
        ids = torch.cat((token_ids.unsqueeze(1), named_ids), dim=1)
        own = self.read(RowsToRead(logits, rows, temperature), top_n, ids)
        found = self.merge(self._group.all_gather(own), temperature, top_n)
        return found.report(token_ids, found.values[:, 0], named_ids, found.values[:, 1:])

    def read(self, source: RowsToRead, top_n: int, ids: torch.Tensor) -> torch.Tensor:
        """Returns this rank's table about N rows: [N, 2 · blocks + 2 n + K] int32, to be gathered and merged.

        Args:
            source: The rows.
            top_n: How many of the most likely ids are asked for.
            ids: [N, K] int64, ids whose logits are asked for.
        """
        parts = self._lanes(source) if source.parts is None else source.parts
        maxima = parts.maxima.amax(dim=-1)
        padding = (0, self._blocks - self._shape.blocks)
        per_block = [torch.nn.functional.pad(table, padding) for table in (maxima, self._masses(source, maxima))]
        top_ids, top_values = self._top(source, parts, maxima, top_n)
        values = self.values_at(source.logits, source.rows, ids)
        return torch.cat([*(table.view(torch.int32) for table in (*per_block, top_values, values)), top_ids], dim=1)

    def merge(self, gathered: torch.Tensor, temperature: torch.Tensor, top_n: int) -> Distributions:
        """Returns what the ranks' tables say together, the same bits at any tp_size.

        Args:
            gathered: [size, N, width] int32, from ``read``.
            temperature: [N] float64.
            top_n: As for ``read``.
        """
        blocks, floats = self._blocks, gathered.view(torch.float32)
        block_maxima = in_block_order(floats[:, :, :blocks]).to(torch.float64)
        masses = in_block_order(floats[:, :, blocks : 2 * blocks]).to(torch.float64)
        maxima = block_maxima.amax(dim=1)
        weights = ((block_maxima - maxima.unsqueeze(1)) / temperature.unsqueeze(1)).exp_().mul_(masses)
        top, rest = 2 * blocks, 2 * blocks + top_n
        last = gathered.shape[2] - top_n
        top_ids, top_values = _best(gathered[:, :, last:], floats[:, :, top:rest])
        values = floats[:, :, rest:last].amax(dim=0)
        return Distributions(maxima, folded_sum(weights).log(), temperature, top_ids, top_values, values)

    def values_at(self, logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Returns the logits of ids in this slice, −inf for others: [N, K] float32.

        Args:
            logits: [R, Vs] float32.
            rows: [N] int64, the row of each run of ids.
            ids: [N, K] int64.
        """
        columns = ids - self._shape.start
        inside = (ids >= 0) & (columns >= 0) & (columns < self._shape.width)
        return torch.where(inside, logits[rows.unsqueeze(1), torch.where(inside, columns, 0)], _NONE)

    def _tiles(self, source: RowsToRead) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yields runs of the rows asked for that fit the cache, with their logits: [R, Vs] float32."""
        count, every_row = len(source.rows), len(source.rows) == len(source.logits)
        step = max(1, _TILE_ELEMENTS // self._shape.width) if source.logits.device.type == "cpu" else max(count, 1)
        # A batch's rows ascend: as many as there are means all of them.
        for first in range(0, count, step):
            tile = slice(first, min(first + step, count))
            yield tile, source.logits[tile] if every_row else source.logits[source.rows[tile]]

    def _lanes(self, source: RowsToRead) -> BlockParts:
        """Returns the largest values of the lanes of the rows asked for."""
        lanes = source.logits.new_empty((len(source.rows), self._shape.blocks, GROUP_LENGTH))
        for tile, logits in self._tiles(source):
            lane_maxima(logits, self._shape.blocks, lanes[tile])
        return BlockParts(lanes, lanes=True)

    def _masses(self, source: RowsToRead, maxima: torch.Tensor) -> torch.Tensor:
        """Returns the block masses of the rows asked for: [N, nb] float32."""
        if source.masses is not None and source.known is not None:
            missing = (~source.known).nonzero().squeeze(1)
            if not len(missing):
                return source.masses
            masses = source.masses.clone()
            masses[missing] = self._masses(replace(source, parts=None, masses=None).take(missing), maxima[missing])
            return masses
        masses = torch.empty_like(maxima)
        inverse = (1.0 / source.temperature).to(torch.float32)
        for tile, logits in self._tiles(source):
            masses[tile] = block_masses(logits, maxima[tile], inverse[tile])
        return masses

    def _top(
        self, source: RowsToRead, parts: BlockParts, maxima: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the ids of this slice's ``count`` largest values and these, best first: [N, count] int32, float32."""
        if not count or not len(maxima):
            nothing = maxima.new_empty((len(maxima), count))
            return nothing.to(torch.int32), nothing
        # One more than asked for: where it equals the last one, other ids with that value may have been left out.
        found, found_columns = self._largest(source, parts, maxima, count + 1)
        columns, order = found_columns.sort(dim=1)
        values, order = found.gather(1, order).sort(dim=1, descending=True, stable=True)
        columns = columns.gather(1, order)
        tied = (values[:, count - 1] == values[:, count]).nonzero().squeeze(1).tolist()
        columns, values = columns[:, :count].contiguous(), values[:, :count].contiguous()
        for place in tied:
            above = int((values[place] > values[place, -1]).sum())
            logits = source.logits[int(source.rows[place]), : self._shape.valid_size]
            equal = (logits == values[place, -1]).nonzero().squeeze(1)[: count - above]
            columns[place, above:] = _LAST - self._shape.start
            columns[place, above : above + len(equal)] = equal
        return (columns + self._shape.start).to(torch.int32), values

    def _largest(
        self, source: RowsToRead, parts: BlockParts, maxima: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``count`` largest values and their columns, unordered: [N, count] float32 and int64; −inf fills up.

        They lie in the parts with the largest maxima, and these in the blocks with the largest maxima. Which of several
        equal values at the cut come is left open.
        """
        block = _most_places(maxima, count)
        part = _most_places(in_blocks := parts.in_blocks(block), count)
        per_block = in_blocks.shape[1] // block.shape[1]
        columns = parts.columns(block.gather(1, part // per_block), part % per_block, self._shape.block_length)
        place = columns + source.rows.unsqueeze(1) * self._shape.width
        members = source.logits.view(-1).index_select(0, place.view(-1)).view_as(place)
        found = _most_places(members, count)
        values, columns = members.gather(1, found), columns.gather(1, found)
        missing = (0, count - values.shape[1])
        return torch.nn.functional.pad(values, missing, value=_NONE), torch.nn.functional.pad(columns, missing)


def _most_places(values: torch.Tensor, count: int) -> torch.Tensor:
    """Returns where each row's ``count`` largest values are, or all of them when there are no more: [N, K] int64."""
    rows, width = values.shape
    if width <= count:
        return torch.arange(width, device=values.device).expand(rows, width)
    return largest_places(values, count)


def _best(ids: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the n best of all ranks' best, each [size, N, n] → [N, n]: int64 ids and float32 values."""
    size, rows, count = values.shape
    if size == 1:
        best_ids = ids[0].to(torch.int64)
        return torch.where(best_ids == _LAST, _NO_ID, best_ids), values[0]
    every_id = ids.transpose(0, 1).reshape(rows, size * count)
    every_value = values.transpose(0, 1).reshape(rows, size * count)
    every_id, order = every_id.sort(dim=1, stable=True)
    best, order = every_value.gather(1, order).sort(dim=1, descending=True, stable=True)
    best_ids = every_id.gather(1, order)[:, :count].to(torch.int64)
    return torch.where(best_ids == _LAST, _NO_ID, best_ids), best[:, :count]
