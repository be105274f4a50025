"""Products of invariant mode by the compiled kernels, which take any number of rows and all units in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from tp.invariant_kernels import InvariantKernels, PackedWeight
from tp.invariant_trial import Kernel, by_definition, one_thread, places_are_equal, random_rows, rare_rows, same_bits
from tp.reduction_tree import ReductionTree

_RANDOM_ROWS = 44
_HEIGHTS = (1, 2, 3, 5, 8, 13, 45)
_CHUNK_STEP = 4


class KernelProduct:
    """``y = x Wᵀ + b`` in float32, rounded to the dtype of ``x`` once.

    Args:
        kernels: Compute it.
        weight: Packed.
        bias: [out] float32, or None.
        chunk: Elements of one chain of additions.
    """

    def __init__(self, kernels: InvariantKernels, weight: PackedWeight, bias: torch.Tensor | None, chunk: int) -> None:
        self._kernels = kernels
        self._weight = weight
        self._bias = bias
        self._chunk = chunk
        self._adds = _all_end(1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a fresh contiguous [T, out]."""
        y = self._kernels.product(x.float(), self._weight, self._bias, adds=self._adds, subtrees=1, chunk=self._chunk)
        return y[0].to(x.dtype)


class KernelUnits:
    """One product for each unit of the input, added up along the tree as far as this rank's units go.

    Args:
        kernels: Compute them.
        weight: Packed; of its input features the last may be padding.
        tree: Which units these are.
        chunk: Elements of one chain of additions.
    """

    def __init__(self, kernels: InvariantKernels, weight: PackedWeight, tree: ReductionTree, chunk: int) -> None:
        self._kernels = kernels
        self._weight = weight
        self._adds = torch.tensor(tree.adds(), dtype=torch.int32)
        self._subtrees = tree.own
        self._chunk = chunk

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [S, T, out] float32 of ``x`` [T, in_local]."""
        x = x.float()
        missing = self._weight.data.shape[1] - x.shape[1]
        if missing:
            x = torch.nn.functional.pad(x, (0, missing))
        return self._kernels.product(x, self._weight, adds=self._adds, subtrees=self._subtrees, chunk=self._chunk)


class _Expected(NamedTuple):
    """What the definition makes of the trial's rows: columns from ``start`` on of one subtree, [rows, columns]."""

    subtree: int
    start: int
    columns: torch.Tensor


class KernelTrial:
    """Finds how the kernels have to cut chains of additions to give the definition's bits, once for each shape.

    Args:
        kernels: That are tried.
        height: Rows of a tile by definition.
    """

    def __init__(self, kernels: InvariantKernels, height: int) -> None:
        self.kernels = kernels
        self._height = height
        self._chunks: dict[tuple[object, ...], int | None] = {}

    @property
    def all_passed(self) -> bool:
        """Whether the kernels compute every shape so far."""
        return None not in self._chunks.values()

    def columns(self, weight: PackedWeight, unit: int, definition: Callable[[int], Kernel]) -> int | None:
        """Returns the chunk for a weight's columns; None when no chunk gives the bits.

        Args:
            weight: Packed.
            unit: Output features of a unit.
            definition: The kernel of the unit that begins at an output feature.
        """
        shape = ("columns", weight.data.dtype, weight.out_features, weight.data.shape[1], unit)
        if shape not in self._chunks:
            rows = _trial_rows(weight.data.shape[1])
            starts = sorted({0, (weight.out_features - 1) // unit * unit})
            expected = [_Expected(0, start, self._by_definition(definition(start), rows)) for start in starts]
            self._chunks[shape] = self._try(weight, 1, rows, expected)
        return self._chunks[shape]

    def units(self, weight: PackedWeight, units: int, definition: Callable[[int], Kernel]) -> int | None:
        """Returns the chunk for the units of a weight's input; None when no chunk gives the bits.

        Args:
            weight: Packed.
            units: How many there are.
            definition: The kernel of a unit.
        """
        shape = ("units", weight.data.dtype, weight.out_features, weight.data.shape[1], units)
        if shape not in self._chunks:
            rows = _trial_rows(weight.data.shape[1])
            by_unit = rows.view(rows.shape[0], units, -1)
            expected = [
                _Expected(one, 0, self._by_definition(definition(one), by_unit[:, one].contiguous()))
                for one in sorted({0, units - 1})
            ]
            self._chunks[shape] = self._try(weight, units, rows, expected)
        return self._chunks[shape]

    def _try(self, weight: PackedWeight, units: int, rows: torch.Tensor, expected: list[_Expected]) -> int | None:
        """Returns the first chunk with which rows in all heights have the bits of the definition."""
        adds = _all_end(units)

        def passes(weight: PackedWeight, expected: Iterable[_Expected], chunk: int, first: int, stop: int) -> bool:
            found = self.kernels.product(rows[first:stop], weight, adds=adds, subtrees=units, chunk=chunk)
            return all(
                same_bits(found[one.subtree, :, one.start : one.start + one.columns.shape[1]], one.columns[first:stop])
                for one in expected
            )

        panel = weight.first_panel()
        of_panel = [one._replace(columns=one.columns[:, : panel.out_features]) for one in expected if one.start == 0]
        for chunk in _chunks(weight.data.shape[1] // units):
            if passes(panel, of_panel, chunk, 0, self._height) and all(
                passes(weight, expected, chunk, 3, 3 + height) for height in _HEIGHTS
            ):
                return chunk
        return None

    def _by_definition(self, kernel: Kernel, rows: torch.Tensor) -> torch.Tensor:
        """Returns what the definition makes of the trial's rows; NaN, which nothing equals, where places matter."""
        with one_thread():
            if places_are_equal(kernel, rows, self._height):
                return by_definition(kernel, rows, self._height)
            return torch.full_like(kernel(rows[: self._height]), torch.nan).repeat(rows.shape[0] // self._height, 1)


def _chunks(length: int) -> list[int]:
    """Returns the chunks that may be tried, the longest first."""
    return [length, *range((length - 1) // _CHUNK_STEP * _CHUNK_STEP, 0, -_CHUNK_STEP)]


def _trial_rows(features: int) -> torch.Tensor:
    return torch.cat((random_rows(_RANDOM_ROWS, features), rare_rows(features)))


def _all_end(units: int) -> torch.Tensor:
    """Returns what has every unit be a subtree of its own."""
    return torch.full((units,), -1, dtype=torch.int32)
