"""Products of invariant mode: the bits of a row and column do not depend on how many rows or columns there are.

By definition a product is computed for one tile of a few rows and one canonical unit of the weight, in one thread, in
float32. Kernels compiled for this machine, whole runs of units and taller tiles are faster. They are used where a trial
with random rows, made once for each shape of weight as the model is loaded, gives the bits of the definition in every
height that will ever be run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch.nn import functional

from tp.invariant_kernels import InvariantKernels, PackedWeight
from tp.invariant_trial import (
    TRIAL_SEED,
    Kernel,
    all_pass,
    by_definition,
    one_thread,
    places_are_equal,
    random_rows,
    same_bits,
)
from tp.kernel_products import KernelProduct, KernelTrial, KernelUnits
from tp.products import Product
from tp.reduction_tree import ReductionTree
from tp.tiles import in_tiles

_LEAST_FEATURES = 16
_TRIAL_PAIRS = 21


class TileShapes(NamedTuple):
    """The heights of row tiles, ascending: ``base`` by definition, the others where a trial allows them."""

    base: int
    columns: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    batched: tuple[int, ...] = ()


CPU_TILES = TileShapes(
    8, (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256), (2, 4, 8, 16, 24, 32, 48, 64), (4, 8, 16, 32, 64, 128)
)
DEVICE_TILES = TileShapes(64)


class Subtrees(Protocol):
    """Sums over a rank's input slice, unit by unit."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sums of this rank's subtrees, [S, T, out] float32, of ``x`` [T, in_local]."""


class InvariantProduct:
    """``y = x Wᵀ + b`` in float32, rounded to the dtype of ``x`` once.

    Attributes:
        heights: That tiles may have, ascending.

    Args:
        kernels: [height, in] to [height, some of out], float32; their results side by side are the product.
        out_features: Of all together.
        bias: [out] float32, or None.
        heights: That tiles may have, ascending.
    """

    def __init__(
        self, kernels: list[Kernel], out_features: int, bias: torch.Tensor | None, heights: tuple[int, ...]
    ) -> None:
        self._kernels = kernels
        self._out_features = out_features
        self._bias = bias
        self.heights = heights

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a fresh contiguous [T, out]."""
        shape = (x.shape[0], self._out_features)
        y = in_tiles(self._tile, x.float(), self.heights, shape)
        if self._bias is not None:
            y = y + self._bias
        return y.to(x.dtype).contiguous()

    def _tile(self, rows: torch.Tensor) -> torch.Tensor:
        if len(self._kernels) == 1:
            return self._kernels[0](rows)
        return torch.cat([kernel(rows) for kernel in self._kernels], dim=1)


class InvariantUnits:
    """One float32 product for each unit of the input, added up along the tree as far as this rank's units go.

    Args:
        weights: [U, unit, out] float32, of this rank's units; the last may end in zeros.
        tree: Which units these are.
        heights: That tiles may have.
        together: Whether all units run as one batch, or one by one.
    """

    def __init__(self, weights: torch.Tensor, tree: ReductionTree, heights: tuple[int, ...], *, together: bool) -> None:
        self._weights = weights
        self._tree = tree
        self._heights = heights
        self._together = together

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [S, T, out] float32 of ``x`` [T, in_local]."""
        units, length, out_features = self._weights.shape
        x = x.float()
        if x.shape[1] < units * length:
            x = functional.pad(x, (0, units * length - x.shape[1]))
        return in_tiles(self._tile, x, self._heights, (self._tree.own, x.shape[0], out_features))

    def _tile(self, rows: torch.Tensor) -> torch.Tensor:
        units, length, _ = self._weights.shape
        by_unit = rows.view(rows.shape[0], units, length).transpose(0, 1)
        if self._together:
            return self._tree.reduce(torch.bmm(by_unit, self._weights))
        singly = [torch.bmm(by_unit[one : one + 1], self._weights[one : one + 1]) for one in range(units)]
        return self._tree.reduce(torch.cat(singly))


class BatchedProduct:
    """Products of many pairs of small matrices of one shape, float32.

    Args:
        heights: Rows that the first of a pair may have, ascending.
        together: Whether all pairs run as one batch, or one by one.
    """

    def __init__(self, heights: tuple[int, ...], *, together: bool) -> None:
        self.heights = heights
        self._together = together

    def __call__(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Returns [B, height, N] of [B, height, K] and [B, K, N]."""
        if self._together:
            return torch.bmm(left, right)
        return torch.cat([torch.bmm(left[at : at + 1], right[at : at + 1]) for at in range(left.shape[0])])


class InvariantProductFactory:
    """Makes the products of a rank and tries each shape once.

    Args:
        device: This rank's device.
        onednn: Whether float32 products on the CPU go through oneDNN; the same on every rank.
        kernels: Compiled for this machine, which are used where they give the same bits; None when there are none.
    """

    def __init__(self, device: torch.device, *, onednn: bool, kernels: InvariantKernels | None = None) -> None:
        self._on_cpu = device.type == "cpu"
        self._onednn = onednn and self._on_cpu
        self._tiles = CPU_TILES if self._on_cpu else DEVICE_TILES
        self.kernels = kernels if self._on_cpu else None
        self._kernel_trial = None if self.kernels is None else KernelTrial(self.kernels, CPU_TILES.base)
        self._tried: dict[tuple[object, ...], tuple[int, ...]] = {}

    @property
    def all_merged(self) -> bool:
        """Whether every shape so far passed its trial in the height of the definition."""
        return self._on_cpu and all(self._tiles.base in heights for heights in self._tried.values())

    @property
    def all_compiled(self) -> bool:
        """Whether the compiled kernels compute every product with a weight so far."""
        return self._kernel_trial is not None and self._kernel_trial.all_passed

    def make(
        self, weight: torch.Tensor, bias: torch.Tensor | None, unit: int, *, parts: int = 1, shared: bool = False
    ) -> Product:
        """Returns the product with the columns of some units.

        Args:
            weight: [out, in], contiguous.
            bias: [out], or None.
            unit: Output features of a unit.
            parts: Of how many weights of one length these rows are; the last unit of each may be shorter.
            shared: Whether someone else reads the weight too.
        """
        bias = None if bias is None else bias.float()
        wide = weight.float()
        if self._kernel_trial is not None:
            packed = PackedWeight(weight, self._kernel_trial.kernels.width)
            chunk = self._kernel_trial.columns(packed, unit, lambda start: self._unit_kernel(wide, start, unit))
            if chunk is not None:
                return KernelProduct(self._kernel_trial.kernels, packed, bias, chunk)
        merged = self._kernel(wide, shared=shared and wide is weight)
        shape = ("columns", *wide.shape, unit, shared)
        if heights := self._passed(shape, lambda: self._try_columns(wide, merged, unit)):
            return InvariantProduct([merged], wide.shape[0], bias, heights)
        by_unit = [one for part in wide.chunk(parts) for one in torch.split(part, unit)]
        kernels = [self._kernel(one.contiguous(), shared=False) for one in by_unit]
        return InvariantProduct(kernels, wide.shape[0], bias, (self._tiles.base,))

    def make_units(self, weight: torch.Tensor, unit: int, tree: ReductionTree) -> Subtrees:
        """Returns the products with the rows of this rank's units.

        Args:
            weight: [out, in_local]; its columns are the units of ``tree.run``, the last may be shorter.
            unit: Input features of a unit.
            tree: How they are summed.
        """
        missing = len(tree.run) * unit - weight.shape[1]
        weight = functional.pad(weight, (0, missing)) if missing else weight
        wide = weight.float()
        weights = wide.t().reshape(len(tree.run), unit, wide.shape[0]).contiguous()
        if self._kernel_trial is not None and len(tree.run):
            packed = PackedWeight(weight, self._kernel_trial.kernels.width)
            chunk = self._kernel_trial.units(packed, len(tree.run), lambda one: _row_kernel(weights[one : one + 1]))
            if chunk is not None:
                return KernelUnits(self._kernel_trial.kernels, packed, tree, chunk)
        shape = ("rows", *weights.shape)
        if heights := self._passed(shape, lambda: _try_rows(weights)):
            return InvariantUnits(weights, tree, heights, together=True)
        return InvariantUnits(weights, tree, (self._tiles.base,), together=False)

    def batched(self, head_dim: int, block: int) -> BatchedProduct:
        """Returns the products of queries with blocks of keys, and of weights with blocks of values.

        Args:
            head_dim: Elements of a head.
            block: Keys of a block.
        """
        heights = self._passed(("batched", head_dim, block), lambda: _try_batches(head_dim, block))
        return BatchedProduct(heights or (self._tiles.base,), together=bool(heights))

    def _passed(self, shape: tuple[object, ...], trial: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        """Returns the heights in which a shape may run merged; none where not even the definition's is."""
        if shape not in self._tried:
            heights = trial() if self._on_cpu else ()
            self._tried[shape] = heights if self._tiles.base in heights else ()
        return self._tried[shape]

    def _kernel(self, weight: torch.Tensor, *, shared: bool) -> Kernel:
        features = weight.shape[0]
        if features < _LEAST_FEATURES:
            # So few would be a case of its own for the kernel.
            inner = self._kernel(functional.pad(weight, (0, 0, 0, _LEAST_FEATURES - features)), shared=False)
            return lambda rows: inner(rows)[:, :features]
        if not self._onednn:
            return lambda rows: functional.linear(rows, weight)
        held = weight if shared else torch.ops.mkldnn._reorder_linear_weight(weight)  # noqa: SLF001 - no public name
        return lambda rows: _onednn(rows, held)

    def _unit_kernel(self, weight: torch.Tensor, start: int, unit: int) -> Kernel:
        """Returns the definition's kernel of the unit that begins at output feature ``start``."""
        return self._kernel(weight[start : start + unit].contiguous(), shared=False)

    def _try_columns(self, weight: torch.Tensor, merged: Kernel, unit: int) -> tuple[int, ...]:
        """Returns the heights in which ``merged`` gives the bits of the definition, for the first and the last unit."""
        rows = random_rows(CPU_TILES.columns[-1] + CPU_TILES.base, weight.shape[1])
        starts = sorted({0, (weight.shape[0] - 1) // unit * unit})
        expected = {}
        with one_thread():
            for start in starts:
                kernel = self._unit_kernel(weight, start, unit)
                expected[start] = by_definition(kernel, rows, CPU_TILES.base)
                if not places_are_equal(kernel, rows, CPU_TILES.base):
                    return ()

        def passes(height: int, first: int) -> bool:
            found = merged(rows[first : first + height])
            return all(
                same_bits(found[:, start : start + unit], whole[first : first + height])
                for start, whole in expected.items()
            )

        return all_pass(CPU_TILES.columns, passes)


def _row_kernel(weight: torch.Tensor) -> Kernel:
    """Returns the definition's kernel of one unit of an input, [1, unit, out]."""
    return lambda tile: torch.bmm(tile.unsqueeze(0), weight).squeeze(0)


def _try_rows(weights: torch.Tensor) -> tuple[int, ...]:
    """Returns the heights in which a batch of all units gives the bits of each alone, for the first and the last."""
    units, length, _ = weights.shape
    rows = random_rows(CPU_TILES.rows[-1] + CPU_TILES.base, units * length)
    by_unit = rows.view(-1, units, length).transpose(0, 1)
    expected = {}
    with one_thread():
        for one in sorted({0, units - 1}):
            kernel = _row_kernel(weights[one : one + 1])
            expected[one] = by_definition(kernel, by_unit[one].contiguous(), CPU_TILES.base)
            if not places_are_equal(kernel, by_unit[one].contiguous(), CPU_TILES.base):
                return ()

    def passes(height: int, first: int) -> bool:
        found = torch.bmm(by_unit[:, first : first + height], weights)
        return all(same_bits(found[one], whole[first : first + height]) for one, whole in expected.items())

    return all_pass(CPU_TILES.rows, passes)


def _try_batches(head_dim: int, block: int) -> tuple[int, ...]:
    """Returns the heights in which a batch of pairs gives the bits of each pair's base tile alone."""
    generator = torch.Generator().manual_seed(TRIAL_SEED)
    rows = CPU_TILES.batched[-1] + CPU_TILES.base
    keys = torch.randn(_TRIAL_PAIRS, block, head_dim, generator=generator)
    heights = CPU_TILES.batched
    for right in (keys.transpose(1, 2), keys):
        left = torch.randn(_TRIAL_PAIRS, rows, right.shape[1], generator=generator)
        for one in (0, _TRIAL_PAIRS - 1):
            allowed = _try_pair(left, right, one)
            heights = tuple(height for height in heights if height in allowed)
    return heights


def _try_pair(left: torch.Tensor, right: torch.Tensor, one: int) -> tuple[int, ...]:
    """Returns the heights in which one pair of a batch has the bits of its base tile, in the batch and alone."""

    def kernel(tile: torch.Tensor) -> torch.Tensor:
        return torch.bmm(tile.unsqueeze(0), right[one : one + 1]).squeeze(0)

    with one_thread():
        whole = by_definition(kernel, left[one], CPU_TILES.base)
        if not places_are_equal(kernel, left[one], CPU_TILES.base):
            return ()

    def passes(height: int, first: int) -> bool:
        tiles = left[:, first : first + height].contiguous()
        expected = whole[first : first + height]
        return same_bits(torch.bmm(tiles, right)[one], expected) and same_bits(kernel(tiles[one]), expected)

    return all_pass(CPU_TILES.batched, passes)


def _onednn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")  # noqa: SLF001 - see above
    return y
