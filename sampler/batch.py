"""The sampling parameters of a batch's rows as row-aligned tensors, and host flags that say what can be skipped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sampler.adjust import PenaltyState, SparseRows
from sampler.params import RowSampling

_SIGN = 1 << 63
# Up to here top_p after top_k is decided by the candidates, but for ties across the cut.
_FEW = 64


@dataclass(frozen=True)
class BatchFlags:
    """What any row of a batch asks for; a function of the rows alone, so the same on every rank.

    ``needs_mass`` says for each row whether the mass of its whole vocabulary is needed.
    """

    all_greedy: bool
    any_greedy: bool
    any_truncated: bool
    has_penalties: bool
    has_bias: bool
    has_min_tokens: bool
    needs_mass: tuple[bool, ...]

    @classmethod
    def of(cls, rows: Sequence[RowSampling]) -> BatchFlags:
        """Returns the flags of ``rows``."""
        params = [row.params for row in rows]
        return cls(
            all_greedy=all(one.is_greedy for one in params),
            any_greedy=any(one.is_greedy for one in params),
            any_truncated=any(_is_truncated(row) for row in rows),
            has_penalties=any(one.has_penalties for one in params),
            has_bias=any(bool(one.logit_bias) for one in params),
            has_min_tokens=any(bool(_banned(row)) for row in rows),
            needs_mass=tuple(_needs_mass(row) for row in rows),
        )


class SamplingBatchInfo:
    """Row-aligned sampling state of one batch, on one device.

    What nobody asked for is None. Rows keep their order; ``filter`` and ``merge`` move every part together, and give
    what building from the same rows (with their output so far) gives.

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
    """

    def __init__(self, rows: Sequence[RowSampling], *, device: torch.device) -> None:
        self.rows = list(rows)
        self.device = device
        self.flags = BatchFlags.of(self.rows)
        params = [row.params for row in self.rows]

        def tensor(values: list[int] | list[float] | list[bool], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        self.greedy = tensor([one.is_greedy for one in params], torch.bool)
        self.truncated = tensor([_is_truncated(row) for row in self.rows], torch.bool)
        self.temperature = tensor([1.0 if one.is_greedy else one.temperature for one in params], torch.float64)
        self.top_k = tensor([max(one.top_k, 0) for one in params], torch.int64)
        self.top_p = tensor([one.top_p for one in params], torch.float64)
        self.min_p = tensor([one.min_p for one in params], torch.float64)
        self.top_k_first = tensor([one.filter_order == "top_k_first" for one in params], torch.bool)
        self.seeds = tensor([row.seed - 2 * _SIGN if row.seed >= _SIGN else row.seed for row in self.rows], torch.int64)
        self.choices = tensor([row.choice for row in self.rows], torch.int64)
        self.penalties = PenaltyState.from_rows(self.rows, device=device) if self.flags.has_penalties else None
        self.bias = self._bias() if self.flags.has_bias else None
        self.banned = self._banned() if self.flags.has_min_tokens else None

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
        self.rows = [self.rows[index] for index in keep]
        index = torch.tensor(keep, dtype=torch.int64, device=self.device)
        for name in _ROW_TENSORS:
            setattr(self, name, getattr(self, name)[index])
        self.flags = BatchFlags.of(self.rows)
        self.penalties = self.penalties if self.flags.has_penalties else None
        self.bias = self.bias if self.flags.has_bias else None
        self.banned = self.banned if self.flags.has_min_tokens else None
        for part in (self.penalties, self.bias, self.banned):
            if part is not None:
                part.filter(index)

    def merge(self, other: SamplingBatchInfo) -> None:
        """Appends the rows of ``other``, which is not to be used any more."""
        if self.penalties is not None or other.penalties is not None:
            mine = self.penalties or PenaltyState.from_rows(self.rows, device=self.device)
            mine.merge(other.penalties or PenaltyState.from_rows(other.rows, device=self.device))
            self.penalties = mine
        if self.bias is not None or other.bias is not None:
            mine_bias = self.bias or self._bias()
            mine_bias.merge(other.bias or other._bias())
            self.bias = mine_bias
        if self.banned is not None or other.banned is not None:
            mine_banned = self.banned or self._banned()
            mine_banned.merge(other.banned or other._banned())
            self.banned = mine_banned
        self.rows = [*self.rows, *other.rows]
        for name in _ROW_TENSORS:
            setattr(self, name, torch.cat((getattr(self, name), getattr(other, name))))
        self.flags = BatchFlags.of(self.rows)

    def append_tokens(self, token_ids: torch.Tensor) -> None:
        """Takes note of the ids that were committed, one per row; a negative id stands for none.

        Args:
            token_ids: [B] int64.
        """
        if self.penalties is not None:
            self.penalties.append(token_ids.to(self.device))

    def rows_below_min_tokens(self, positions: Sequence[int]) -> list[int]:
        """Returns the rows whose stop ids are banned at these positions (tokens generated so far)."""
        if not self.flags.has_min_tokens:
            return []
        return [
            index
            for index, (row, position) in enumerate(zip(self.rows, positions, strict=True))
            if _banned(row) and position < row.params.min_tokens
        ]

    def _bias(self) -> SparseRows:
        return SparseRows.from_rows([row.params.logit_bias or {} for row in self.rows], device=self.device)

    def _banned(self) -> SparseRows:
        return SparseRows.from_rows([_banned(row) for row in self.rows], device=self.device)


_ROW_TENSORS = (
    "greedy",
    "truncated",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "top_k_first",
    "seeds",
    "choices",
)


def _is_truncated(row: RowSampling) -> bool:
    params = row.params
    return not params.is_greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)


def _needs_mass(row: RowSampling) -> bool:
    params = row.params
    few = params.filter_order == "top_k_first" and 0 < params.top_k <= _FEW
    return not params.is_greedy and (not _is_truncated(row) or (params.top_p < 1 and not few))


def _banned(row: RowSampling) -> dict[int, float]:
    return dict.fromkeys(row.stop_ids, float("-inf")) if row.params.min_tokens > 0 else {}
