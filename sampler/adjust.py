"""Changes to the logits of a vocabulary slice before the draw: penalties, bans, bias, mask; all in place, all sparse.

Every change keeps a NaN a NaN and makes a banned +inf one, so that one look at the largest values afterwards still
finds every non-finite logit of the model, banned or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from sampler.params import RowSampling
from sampler.rows import AlignedRows, RowTable, to_device
from sampler.slices import true_places

_NO_ID = -1
_MIN_CAPACITY = 16
_PIECE = 8192


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


class _SliceEntries(AlignedRows):
    """A penalty state's entries whose ids lie in one slice, one after the other; they grow with what rows generate.

    Args:
        state: The state.
        slice_start: The id of the slice's first column.
        width: How many columns it has.
        raises: Whether the entries are those of rows whose repetition penalty is below 1, or of all others.

    Attributes:
        slice_start: As given.
        width: As given.
        place: [n] int64, places in the flattened [B, Vs] logits, distinct.
        additive: [n] float32, what frequency and presence penalty take off each.
        repetition: [n] float32, more than 0.
    """

    place: torch.Tensor
    additive: torch.Tensor
    repetition: torch.Tensor

    def __init__(self, state: PenaltyState, slice_start: int, width: int, *, raises: bool) -> None:
        self.slice_start = slice_start
        self.width = width
        self._raises = raises
        self._rows = (state.repetition.squeeze(1) < 1.0) == raises
        entry, place = _inside(state.ids, slice_start, width, self._rows)
        repetition = state.repetition.expand_as(state.ids).reshape(-1)
        tables = {
            "place": place,
            "additive": state.additive.view(-1).index_select(0, entry),
            "repetition": repetition.index_select(0, entry),
        }
        super().__init__({name: RowTable(values) for name, values in tables.items()})
        # Of each entry of the flattened [B, K] tables, where it is here; −1 where it is not.
        self._index = torch.full((state.ids.numel(),), _NO_ID, device=place.device)
        self._index[entry] = torch.arange(len(entry), device=place.device)

    def change_(self, entry: torch.Tensor, additive: torch.Tensor) -> None:
        """Sets what is taken off entries of the flattened [B, K] tables, if they are here: [N] int64 and float32."""
        index = self._index.index_select(0, entry)
        here = index >= 0
        self.additive[index[here]] = additive[here]

    def add(self, entry: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, state: PenaltyState) -> None:
        """Takes up new entries of the flattened [B, K] tables, if they belong here: [N] int64 each."""
        columns = token_ids - self.slice_start
        here = (columns >= 0) & (columns < self.width) & self._rows[rows]
        entry, rows, columns = entry[here], rows[here], columns[here]
        count = len(self.place)
        self._index[entry] = torch.arange(count, count + len(entry), device=entry.device)
        self.extend(
            {
                "place": rows * self.width + columns,
                "additive": state.additive.view(-1).index_select(0, entry),
                "repetition": state.repetition.view(-1).index_select(0, rows),
            }
        )

    def apply_(self, logits: torch.Tensor) -> None:
        """Applies the penalties to the slice's logits: [B, Vs] float32, contiguous."""
        flat = logits.view(-1)
        if logits.device.type == "cpu":
            self._apply_by_numpy_(flat.numpy())
            return
        values = flat.index_select(0, self.place).sub_(self.additive)
        # z / r where z > 0, else z · r: the smaller of both where r is at least 1.
        chosen = torch.maximum if self._raises else torch.minimum
        flat.index_copy_(0, self.place, chosen(values / self.repetition, values * self.repetition))

    def _apply_by_numpy_(self, logits: npt.NDArray[np.float32]) -> None:
        """Does the same faster on a CPU, in pieces: what was read is written back while it is in the cache."""
        places, additive, repetition = self.place.numpy(), self.additive.numpy(), self.repetition.numpy()
        chosen = np.maximum if self._raises else np.minimum
        with np.errstate(all="ignore"):
            for first in range(0, len(places), _PIECE):
                piece = slice(first, first + _PIECE)
                values = logits.take(places[piece], mode="clip")
                values -= additive[piece]
                divided = values / repetition[piece]
                values *= repetition[piece]
                logits[places[piece]] = chosen(values, divided, out=values)


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
        self._entries: tuple[_SliceEntries, ...] = ()

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
        self._entries = ()

    def merge(self, other: PenaltyState) -> None:
        """Appends the rows of ``other``."""
        super().merge(other)
        self._entries = ()

    def append(self, token_ids: torch.Tensor) -> None:
        """Takes note of one generated id per row; a negative id stands for none.

        Args:
            token_ids: [B] int64.
        """
        taking = self.active & (token_ids >= 0)
        rows = taking.nonzero().squeeze(1)
        if not len(rows):
            return
        used, width = int(self.lengths[rows].max()), self.ids.shape[1]
        if used >= width:
            width = max(2 * width, _MIN_CAPACITY)
            self.widen(("ids", "counts", "additive"), width)
            self._entries = ()
        looked = max(used, 1)
        # No entry is −2: rows that take nothing find nothing.
        wanted = torch.where(taking, token_ids, _NO_ID - 1).unsqueeze(1)
        found = true_places((self.ids[:, :looked] == wanted).flatten())
        known = found // looked
        slots = self.lengths.clone()
        slots[known] = found % looked
        is_new = taking.index_fill_(0, known, 0)
        self.lengths += is_new
        entry = rows * width + slots[rows]
        counts = self.counts.view(-1).index_select(0, entry) + 1.0
        additive = _additive(counts, self.frequency[rows, 0], self.presence[rows, 0])
        for table, values in ((self.ids, token_ids[rows]), (self.counts, counts), (self.additive, additive)):
            table.view(-1)[entry] = values
        new = is_new[rows]
        for at in self._entries:
            at.change_(entry, additive)
            at.add(entry[new], rows[new], token_ids[rows][new], self)

    def apply_(self, logits: torch.Tensor, slice_start: int) -> None:
        """Applies the additive penalties, then the repetition penalty, to a slice's logits.

        Args:
            logits: [B, Vs] float32, contiguous.
            slice_start: The id of the slice's first column.
        """
        width = logits.shape[1]
        if not self._entries or (self._entries[0].slice_start, self._entries[0].width) != (slice_start, width):
            # Found anew only after rows came or went.
            kinds = sorted(set((self.repetition.squeeze(1) < 1.0).tolist()))
            self._entries = tuple(_SliceEntries(self, slice_start, width, raises=raises) for raises in kinds)
        for at in self._entries:
            at.apply_(logits)


def _additive(counts: torch.Tensor, frequency: torch.Tensor, presence: torch.Tensor) -> torch.Tensor:
    """Returns what the additive penalties take off: float32; the arguments broadcast."""
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
