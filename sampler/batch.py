"""The sampling parameters of a batch's rows as row-aligned tensors, and host flags that say what can be skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from sampler.adjust import PenaltyState, SparseRows
from sampler.bans import completing_ids, long_bad_words, restrict_, static_bans
from sampler.params import RowSampling
from sampler.rows import RowTable, to_device

_SIGN = 1 << 63
# Up to here top_p after top_k is decided by the candidates, but for ties across the cut.
_FEW = 64


@dataclass(frozen=True)
class BatchFlags:
    """What any row of a batch asks for; a function of the rows alone, so the same on every rank.

    Attributes:
        needs_mass: For each row, whether the mass of its whole vocabulary is needed.
        restricted_rows: Rows with allowed ids.
        has_bans: Whether a row never draws some ids.
        bad_word_rows: Rows with bad words of several tokens.
        processed_rows: Rows with logit processors.
        logprob_rows: Rows whose logprobs are reported.
        raw_logprobs: For each of them, whether of the model's output.
        changed_logits: For each of them, whether its own parameters change the logits of the model's output.
        needs_raw_mass: For each row of the batch, whether its raw logprobs need a mass that the draw does not.
        top_logprobs: The largest number of most likely ids that a row wants to know.
        has_named: Whether a row names ids whose logprobs it wants to know.
        support_rows: Rows whose support is reported.
    """

    all_greedy: bool
    any_greedy: bool
    any_truncated: bool
    has_penalties: bool
    has_bias: bool
    has_min_tokens: bool
    needs_mass: tuple[bool, ...]
    restricted_rows: tuple[int, ...]
    has_bans: bool
    bad_word_rows: tuple[int, ...]
    processed_rows: tuple[int, ...]
    logprob_rows: tuple[int, ...]
    raw_logprobs: tuple[bool, ...]
    changed_logits: tuple[bool, ...]
    needs_raw_mass: tuple[bool, ...]
    top_logprobs: int
    has_named: bool
    support_rows: tuple[int, ...]

    @classmethod
    def of(cls, rows: Sequence[RowSampling]) -> BatchFlags:
        """Returns the flags of ``rows``."""
        params = [row.params for row in rows]
        logprob_rows = _places(one.has_logprobs for one in params)
        return cls(
            all_greedy=all(one.is_greedy for one in params),
            any_greedy=any(one.is_greedy for one in params),
            any_truncated=any(_is_truncated(row) for row in rows),
            has_penalties=any(one.has_penalties for one in params),
            has_bias=any(bool(one.logit_bias) for one in params),
            has_min_tokens=any(bool(_banned(row)) for row in rows),
            needs_mass=tuple(_needs_mass(row) for row in rows),
            restricted_rows=_places(one.allowed_token_ids is not None for one in params),
            has_bans=any(bool(static_bans(row)) for row in rows),
            bad_word_rows=_places(bool(long_bad_words(row)) for row in rows),
            processed_rows=_places(bool(one.logit_processors) for one in params),
            logprob_rows=logprob_rows,
            raw_logprobs=tuple(params[place].logprobs_mode == "raw" for place in logprob_rows),
            changed_logits=tuple(_changes_logits(rows[place]) for place in logprob_rows),
            needs_raw_mass=tuple(_needs_raw_mass(row) for row in rows),
            top_logprobs=max((one.logprobs or 0 for one in params), default=0),
            has_named=any(bool(one.logprob_token_ids) for one in params),
            support_rows=_places(one.return_support for one in params),
        )

    @property
    def keeps_output(self) -> bool:
        """Whether a row's ids to draw depend on its output beyond penalties."""
        return bool(self.bad_word_rows or self.processed_rows)


class SamplingBatchInfo:
    """Row-aligned sampling state of one batch, on one device.

    What nobody asked for is None. Rows keep their order; ``filter`` and ``merge`` move every part together, and give
    what building from the same rows (with their output so far) gives. Tensors are views of buffers that keep their
    addresses as long as the batch does not outgrow them.

    Attributes:
        rows: The rows as they joined the batch.
        flags: What any row asks for.
        temperature: [B] float64; 1 for greedy rows.
        top_k: [B] int64; 0 = off.
        top_p: [B] float64; 1 = off.
        min_p: [B] float64; 0 = off.
        top_k_first: [B] bool.
        greedy: [B] bool.
        truncated: [B] bool, rows that are not greedy and have a filter.
        seeds: [B] int64, bit patterns of unsigned seeds.
        choices: [B] int64.
        penalties: Tokens seen, or None.
        bias: What is added to the logits, or None.
        banned: −inf for the ids banned until ``min_tokens``, or None.
        bans: −inf for the ids never drawn, or None.
        allowed: The only ids drawn, for rows that have such, or None.
        named: Ids whose logprobs are reported, or None.
        output_ids: For each row the tokens generated so far, empty where bad words and processors do not ask; or None.
    """

    greedy: torch.Tensor
    truncated: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    top_k_first: torch.Tensor
    seeds: torch.Tensor
    choices: torch.Tensor
    penalties: PenaltyState | None
    bias: SparseRows | None
    banned: SparseRows | None
    bans: SparseRows | None
    allowed: SparseRows | None
    named: SparseRows | None

    def __init__(self, rows: Sequence[RowSampling], *, device: torch.device) -> None:
        self.rows = list(rows)
        self.device = device
        self.flags = BatchFlags.of(self.rows)
        self._tables = {name: RowTable(values) for name, values in _columns(self.rows, device).items()}
        self._publish()
        self.penalties = PenaltyState.from_rows(self.rows, device=device) if self.flags.has_penalties else None
        for name, asks in _asked(self.flags).items():
            setattr(self, name, _sparse(name, self.rows, device) if asks else None)
        self.output_ids = _outputs(self.rows) if self.flags.keeps_output else None

    @classmethod
    def from_rows(cls, rows: Sequence[RowSampling], *, device: torch.device | str = "cpu") -> SamplingBatchInfo:
        """Returns the state of ``rows``, each with the output it has so far."""
        return cls(rows, device=torch.device(device))

    @property
    def row_count(self) -> int:
        """How many rows the batch has."""
        return len(self.rows)

    def filter(self, keep: Sequence[int]) -> None:
        """Keeps the rows at the indices ``keep``, in that order.

        Raises:
            IndexError: An index is not a row.
        """
        index = to_device(list(keep), torch.int64, self.device)
        if any(not 0 <= place < len(self.rows) for place in keep):
            raise IndexError(f"rows {list(keep)} of a batch of {len(self.rows)}")
        self.rows = [self.rows[place] for place in keep]
        for table in self._tables.values():
            table.filter(index)
        self._publish()
        self.flags = BatchFlags.of(self.rows)
        self.penalties = self.penalties if self.flags.has_penalties else None
        if self.penalties is not None:
            self.penalties.filter(index)
        for name, asks in _asked(self.flags).items():
            part = getattr(self, name) if asks else None
            if part is not None:
                part.filter(index)
            setattr(self, name, part)
        kept = self.output_ids if self.flags.keeps_output else None
        self.output_ids = None if kept is None else [kept[place] for place in keep]

    def merge(self, other: SamplingBatchInfo) -> None:
        """Appends the rows of ``other``, which is not to be used any more."""
        if self.penalties is not None or other.penalties is not None:
            mine = self.penalties or PenaltyState.from_rows(self.rows, device=self.device)
            mine.merge(other.penalties or PenaltyState.from_rows(other.rows, device=self.device))
            self.penalties = mine
        for name in _SPARSE:
            part, joining = getattr(self, name), getattr(other, name)
            if part is not None or joining is not None:
                part = part or _sparse(name, self.rows, self.device)
                part.merge(joining or _sparse(name, other.rows, self.device))
                setattr(self, name, part)
        if self.output_ids is not None or other.output_ids is not None:
            self.output_ids = [*(self.output_ids or _outputs(self.rows)), *(other.output_ids or _outputs(other.rows))]
        self.rows = [*self.rows, *other.rows]
        for name, table in self._tables.items():
            table.extend(getattr(other, name))
        self._publish()
        self.flags = BatchFlags.of(self.rows)

    def append_tokens(self, token_ids: torch.Tensor) -> None:
        """Takes note of the ids that were committed, one per row; a negative id stands for none.

        Args:
            token_ids: [B] int64; on the CPU where a row has bad words or processors, lest it is waited for.
        """
        if self.penalties is not None:
            self.penalties.append(token_ids.to(self.device))
        if self.output_ids is not None:
            for row, output_ids, token_id in zip(self.rows, self.output_ids, token_ids.tolist(), strict=True):
                if token_id >= 0 and _keeps_output(row):
                    output_ids.append(token_id)

    def ban_(self, logits: torch.Tensor, slice_start: int) -> None:
        """Bans, in a slice's logits, what the rows never draw: ids not allowed, banned ids, ends of bad words.

        Args:
            logits: [B, Vs] float32, contiguous.
            slice_start: The id of the slice's first column.
        """
        if self.allowed is not None:
            restrict_(logits, self.allowed, self.flags.restricted_rows, slice_start)
        if self.bans is not None:
            self.bans.add_to_(logits, slice_start)
        if self.flags.bad_word_rows and self.output_ids is not None:
            asking = set(self.flags.bad_word_rows)
            ends = [
                completing_ids(long_bad_words(row), output_ids) if place in asking else {}
                for place, (row, output_ids) in enumerate(zip(self.rows, self.output_ids, strict=True))
            ]
            if any(ends):
                SparseRows.from_rows(ends, device=self.device).add_to_(logits, slice_start)

    def rows_below_min_tokens(self, positions: Sequence[int]) -> list[int]:
        """Returns the rows whose stop ids are banned at these positions (tokens generated so far)."""
        if not self.flags.has_min_tokens:
            return []
        return [
            index
            for index, (row, position) in enumerate(zip(self.rows, positions, strict=True))
            if _banned(row) and position < row.params.min_tokens
        ]

    def _publish(self) -> None:
        for name, table in self._tables.items():
            setattr(self, name, table.view)


def _columns(rows: Sequence[RowSampling], device: torch.device) -> dict[str, torch.Tensor]:
    """Returns the parameters that are one number a row."""
    params = [row.params for row in rows]
    values: dict[str, tuple[torch.dtype, list[bool] | list[int] | list[float]]] = {
        "greedy": (torch.bool, [one.is_greedy for one in params]),
        "truncated": (torch.bool, [_is_truncated(row) for row in rows]),
        "temperature": (torch.float64, [1.0 if one.is_greedy else one.temperature for one in params]),
        "top_k": (torch.int64, [max(one.top_k, 0) for one in params]),
        "top_p": (torch.float64, [one.top_p for one in params]),
        "min_p": (torch.float64, [one.min_p for one in params]),
        "top_k_first": (torch.bool, [one.filter_order == "top_k_first" for one in params]),
        "seeds": (torch.int64, [row.seed - 2 * _SIGN if row.seed >= _SIGN else row.seed for row in rows]),
        "choices": (torch.int64, [row.choice for row in rows]),
    }
    return {name: to_device(column, dtype, device) for name, (dtype, column) in values.items()}


def _banned(row: RowSampling) -> dict[int, float]:
    return dict.fromkeys(row.stop_ids, float("-inf")) if row.params.min_tokens > 0 else {}


# The parts that are ids with values, and where a row's come from.
_SPARSE: dict[str, Callable[[RowSampling], Mapping[int, float]]] = {
    "bias": lambda row: row.params.logit_bias or {},
    "banned": _banned,
    "bans": static_bans,
    "allowed": lambda row: dict.fromkeys(row.params.allowed_token_ids or (), 0.0),
    "named": lambda row: dict.fromkeys(row.params.logprob_token_ids, 0.0),
}


def _asked(flags: BatchFlags) -> dict[str, bool]:
    """Returns which of the sparse parts a batch has."""
    return {
        "bias": flags.has_bias,
        "banned": flags.has_min_tokens,
        "bans": flags.has_bans,
        "allowed": bool(flags.restricted_rows),
        "named": flags.has_named,
    }


def _sparse(name: str, rows: Sequence[RowSampling], device: torch.device) -> SparseRows:
    return SparseRows.from_rows([_SPARSE[name](row) for row in rows], device=device)


def _needs_raw_mass(row: RowSampling) -> bool:
    params = row.params
    known = _needs_mass(row) and params.temperature == 1
    return params.has_logprobs and params.logprobs_mode == "raw" and not _changes_logits(row) and not known


def _changes_logits(row: RowSampling) -> bool:
    params = row.params
    sparse = params.logit_bias or params.banned_token_ids or row.bad_words_token_ids or params.min_tokens
    whole = params.has_penalties or params.logit_processors or params.allowed_token_ids is not None
    return bool(sparse or whole)


def _keeps_output(row: RowSampling) -> bool:
    return bool(row.params.logit_processors or long_bad_words(row))


def _outputs(rows: Sequence[RowSampling]) -> list[list[int]]:
    return [list(row.output_ids) if _keeps_output(row) else [] for row in rows]


def _places(asks: Iterable[bool]) -> tuple[int, ...]:
    return tuple(place for place, one in enumerate(asks) if one)


def _is_truncated(row: RowSampling) -> bool:
    params = row.params
    return not params.is_greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)


def _needs_mass(row: RowSampling) -> bool:
    params = row.params
    few = params.filter_order == "top_k_first" and 0 < params.top_k <= _FEW
    return not params.is_greedy and (not _is_truncated(row) or (params.top_p < 1 and not few))
