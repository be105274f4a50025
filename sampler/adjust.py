"""Changes to the logits of a vocabulary slice before the draw: penalties, bans, bias, mask; all in place, all sparse.

Every change keeps a NaN a NaN and makes a banned +inf one, so that one look at the largest values afterwards still
finds every non-finite logit of the model, banned or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from sampler.params import RowSampling
from sampler.rows import AlignedRows, RowTable, to_device
from sampler.slices import true_places, write_

_NO_ID = -1
_MIN_CAPACITY = 16


class SparseRows(AlignedRows):
    """Ids with a value each, row by row.

    Attributes:
        ids: [B, K] int64, distinct within a row; −1 fills up.
        values: [B, K] float32.
    """

    ids: torch.Tensor
    values: torch.Tensor

    def __init__(self, ids: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__({"ids": RowTable(ids, fill=_NO_ID), "values": RowTable(values)})

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[int, float]], *, device: torch.device) -> SparseRows:
        """Returns the tensors of one mapping from id to value per row."""
        width = max((len(row) for row in rows), default=0)
        ids = [[*row, *[_NO_ID] * (width - len(row))] for row in rows]
        values = [[*row.values(), *[0.0] * (width - len(row))] for row in rows]
        return cls(
            to_device(ids, torch.int64, device).view(len(rows), width),
            to_device(values, torch.float32, device).view(len(rows), width),
        )

    def add_to_(self, logits: torch.Tensor, slice_start: int, active: torch.Tensor | None = None) -> None:
        """Adds the values to a slice's logits.

        Args:
            logits: [B, Vs] float32, contiguous.
            slice_start: The id of the slice's first column.
            active: [B] bool, which rows take part; all when left out.
        """
        entry, place = _inside(self.ids, slice_start, logits.shape[1], active)
        logits.view(-1)[place] += self.values.reshape(-1)[entry]


@dataclass
class _SlicePlaces:
    """Which of a state's entries lie in one slice; its parts grow with the ids that rows generate.

    Attributes:
        slice_start: The id of the slice's first column.
        width: How many columns it has.
        entry: [n] int64, places in the flattened [B, K] tables.
        place: [n] int64, places in the flattened [B, Vs] logits.
        repetition: [n] float32.
    """

    slice_start: int
    width: int
    entry: torch.Tensor
    place: torch.Tensor
    repetition: torch.Tensor


class PenaltyState(AlignedRows):
    """Which ids each row has seen, and how often it generated them.

    The state of a row is a function of its prompt and output ids alone, whatever the history of the batch. What a step
    needs of it is kept up to date token by token, so that a step only gathers and scatters.

    Attributes:
        ids: [B, K] int64, the distinct ids of prompt and output; −1 fills up.
        counts: [B, K] float32, how often each is in the output.
        additive: [B, K] float32, what frequency and presence penalty take off each.
        lengths: [B] int64, how many ids are in use.
        active: [B] bool, whether the row has penalties at all.
        frequency: [B, 1] float32.
        presence: [B, 1] float32.
        repetition: [B, 1] float32.
    """

    ids: torch.Tensor
    counts: torch.Tensor
    additive: torch.Tensor
    lengths: torch.Tensor
    active: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    repetition: torch.Tensor

    def __init__(self, tables: Mapping[str, RowTable]) -> None:
        super().__init__(tables)
        self._places: _SlicePlaces | None = None

    @classmethod
    def from_rows(cls, rows: Sequence[RowSampling], *, device: torch.device) -> PenaltyState:
        """Returns the state after each row's ``prompt_ids`` and ``output_ids``."""
        seen: list[dict[int, float]] = []
        for row in rows:
            counts: dict[int, float] = {}
            if row.params.has_penalties:
                counts = dict.fromkeys(row.prompt_ids, 0.0)
                for token_id in row.output_ids:
                    counts[token_id] = counts.get(token_id, 0.0) + 1.0
            seen.append(counts)
        table = SparseRows.from_rows(seen, device=device)

        def column(values: list[float]) -> torch.Tensor:
            return to_device(values, torch.float32, device).unsqueeze(1)

        frequency = column([row.params.frequency_penalty for row in rows])
        presence = column([row.params.presence_penalty for row in rows])
        return cls(
            {
                "ids": RowTable(table.ids, fill=_NO_ID),
                "counts": RowTable(table.values),
                "additive": RowTable(_additive(table.values, frequency, presence)),
                "lengths": RowTable(to_device([len(counts) for counts in seen], torch.int64, device)),
                "active": RowTable(to_device([row.params.has_penalties for row in rows], torch.bool, device)),
                "frequency": RowTable(frequency),
                "presence": RowTable(presence),
                "repetition": RowTable(column([row.params.repetition_penalty for row in rows])),
            }
        )

    def filter(self, index: torch.Tensor) -> None:
        """Keeps the rows at the indices ``index``, as ``AlignedRows`` does."""
        super().filter(index)
        self._places = None

    def merge(self, other: PenaltyState) -> None:
        """Appends the rows of ``other``."""
        super().merge(other)
        self._places = None

    def append(self, token_ids: torch.Tensor) -> None:
        """Takes note of one generated id per row; a negative id stands for none.

        Args:
            token_ids: [B] int64.
        """
        rows = (self.active & (token_ids >= 0)).nonzero().squeeze(1)
        token_ids = token_ids[rows]
        if not len(rows):
            return
        width = self.ids.shape[1]
        if int(self.lengths[rows].max()) >= width:
            self.widen(("ids", "counts", "additive"), max(2 * width, _MIN_CAPACITY))
            self._places = None
        known = self.ids[rows] == token_ids.unsqueeze(1)
        is_new = ~known.any(dim=1)
        slots = torch.where(is_new, self.lengths[rows], known.to(torch.int8).argmax(dim=1))
        self.ids[rows, slots] = token_ids
        self.counts[rows, slots] += 1.0
        counts = self.counts[rows, slots].unsqueeze(1)
        self.additive[rows, slots] = _additive(counts, self.frequency[rows], self.presence[rows]).squeeze(1)
        self.lengths[rows] += is_new
        self._add_places(rows[is_new], slots[is_new])

    def apply_(self, logits: torch.Tensor, slice_start: int) -> None:
        """Applies the additive penalties, then the repetition penalty, to a slice's logits.

        Args:
            logits: [B, Vs] float32, contiguous.
            slice_start: The id of the slice's first column.
        """
        at = self._places_in(slice_start, logits.shape[1])
        # One gather and one scatter of the logits.
        flat = logits.view(-1)
        values = flat.index_select(0, at.place)
        values -= self.additive.view(-1).index_select(0, at.entry)
        # Exactly one of the two parts is not 0, or both are NaN.
        raised = values.clamp_min(0.0).div_(at.repetition)
        write_(flat, at.place, values.clamp_max_(0.0).mul_(at.repetition).add_(raised))

    def _places_in(self, slice_start: int, width: int) -> _SlicePlaces:
        """Returns which entries lie in a slice; found anew only after rows came or went."""
        at = self._places
        if at is None or (at.slice_start, at.width) != (slice_start, width):
            entry, place = _inside(self.ids, slice_start, width)
            repetition = self.repetition.expand_as(self.ids).reshape(-1).index_select(0, entry)
            at = self._places = _SlicePlaces(slice_start, width, entry, place, repetition)
        return at

    def _add_places(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Takes note of entries that are new, if a slice's are known: [N] int64 each."""
        at = self._places
        if at is None or not len(rows):
            return
        columns = self.ids[rows, slots] - at.slice_start
        inside = (columns >= 0) & (columns < at.width)
        rows, slots, columns = rows[inside], slots[inside], columns[inside]
        at.entry = torch.cat((at.entry, rows * self.ids.shape[1] + slots))
        at.place = torch.cat((at.place, rows * at.width + columns))
        at.repetition = torch.cat((at.repetition, self.repetition[rows, 0]))


def _additive(counts: torch.Tensor, frequency: torch.Tensor, presence: torch.Tensor) -> torch.Tensor:
    """Returns what the additive penalties take off: [B, K] float32 from [B, K], [B, 1] and [B, 1]."""
    return frequency * counts + presence * (counts > 0)


def mask_table(device: torch.device) -> torch.Tensor:
    """Returns what each mask byte adds to its 8 logits: [256, 8] float32, 0 where the bit is set and −inf elsewhere."""
    bits = torch.arange(256, device=device).unsqueeze(1) >> torch.arange(8, device=device)
    return torch.where(bits & 1 == 1, 0.0, float("-inf"))


def apply_mask_(logits: torch.Tensor, mask_words: torch.Tensor, table: torch.Tensor) -> None:
    """Bans the ids whose mask bit is 0.

    Args:
        logits: [R, Vs] float32.
        mask_words: [R, Vs/32] int32, bit t % 32 of word t // 32 = 1 allows id t of the slice.
        table: From ``mask_table``, on the same device.
    """
    mask_bytes = mask_words.contiguous().view(torch.uint8).view(-1)
    if logits.device.type == "cpu":
        # numpy looks up in half the time.
        change = torch.from_numpy(table.numpy().take(mask_bytes.numpy(), axis=0, mode="clip"))
    else:
        change = table.index_select(0, mask_bytes.to(torch.int32))
    logits += change.view(logits.shape)


def allows_other_ids(
    mask_words: torch.Tensor, banned: SparseRows, rows: torch.Tensor, slice_start: int, valid_size: int
) -> torch.Tensor:
    """Returns, per row, whether the mask allows an id of this slice that is not banned: [N] bool.

    Args:
        mask_words: [B, Vs/32] int32.
        banned: The banned ids of all rows.
        rows: [N] int64, the rows in question.
        slice_start: The id of the slice's first column.
        valid_size: How many columns are no padding; the mask bits of padding mean nothing.
    """
    words = mask_words[rows]
    bits = (words.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1
    allowed = bits.view(len(rows), -1)
    allowed[:, valid_size:] = 0
    _, place = _inside(banned.ids[rows], slice_start, allowed.shape[1])
    allowed.view(-1)[place] = 0
    return allowed.any(dim=1)


def _inside(
    ids: torch.Tensor, slice_start: int, width: int, active: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns which of the flattened ids are in the slice, and their places in the flattened logits: [n] int64 each."""
    columns = ids - slice_start
    # What fills up is negative.
    inside = (columns >= 0) & (columns < width)
    if active is not None:
        inside &= active.unsqueeze(1)
    entry = true_places(inside.view(-1))
    columns += torch.arange(len(ids), device=ids.device).unsqueeze(1) * width
    return entry, columns.view(-1).index_select(0, entry)
