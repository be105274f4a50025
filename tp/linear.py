"""Linear layers cut over the tensor-parallel group: by output columns, which need no collective, or by input rows.

A layer holds only what its rank owns, in whatever form its product needs.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

from tp.group import TensorParallelGroup
from tp.invariant_products import InvariantProductFactory, Subtrees
from tp.partition import invariant_mlp_unit, mlp_unit
from tp.products import Product, ProductFactory
from tp.reduction_tree import ReductionTree


class RowParallelLinear:
    """``y = x Wᵀ + b`` where each rank holds a slice of the input; every rank gets the whole, equal output.

    Args:
        product: With the columns of the whole weight that this rank owns, without a bias: [T, in_local] to [T, out].
        bias: [out], replicated: added once, after the sum over the group; or None.
        group: The ranks whose partial products are summed; all of them call the layer together.
    """

    def __init__(self, product: Product, bias: torch.Tensor | None, group: TensorParallelGroup) -> None:
        self._product = product
        self._bias = bias
        self._group = group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a fresh [T, out], summed over the group, of this rank's input slice ``x`` [T, in_local].

        Raises:
            CollectiveError: The sum over the group failed.
        """
        y = self._group.all_reduce_sum_(self._product(x))
        return y if self._bias is None else y.add_(self._bias)


class UnitParallelLinear:
    """``y = x Wᵀ + b`` of invariant mode: units of the input are summed in one tree, whatever the number of ranks.

    Args:
        subtrees: With the columns of the whole weight that this rank owns, without a bias.
        bias: [out], replicated: added once, to the whole sum; or None.
        tree: Finishes the sum over the group; all its ranks call the layer together.
    """

    def __init__(self, subtrees: Subtrees, bias: torch.Tensor | None, tree: ReductionTree) -> None:
        self._subtrees = subtrees
        self._bias = None if bias is None else bias.float()
        self._tree = tree

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a fresh [T, out] in the dtype of ``x``, of this rank's input slice ``x`` [T, in_local].

        Raises:
            CollectiveError: The gather over the group failed.
        """
        y = self._tree.finish(self._subtrees(x))
        if self._bias is not None:
            y = y + self._bias
        return y.to(x.dtype)


class RowLayer(Protocol):
    """A layer whose input is cut over the group."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [T, out], whole and equal on every rank, of this rank's input slice ``x`` [T, in_local]."""


class LinearFactory:
    """Makes the linear layers of a rank: as the backend sums, or with bits that depend on neither ranks nor batch.

    Args:
        products: Makes their products; invariant ones make the layers invariant.
        group: The ranks.
    """

    def __init__(self, products: ProductFactory | InvariantProductFactory, group: TensorParallelGroup) -> None:
        self._products = products
        self._group = group

    def column(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, unit: int, parts: int = 1, shared: bool = False
    ) -> Product:
        """Returns the product with this rank's rows of a weight.

        Args:
            weight: [out_local, in], contiguous.
            bias: [out_local], or None.
            unit: Output features of a canonical unit of the model.
            parts: Of how many weights of one length these rows are; the last unit of each may be shorter.
            shared: Whether someone else reads the weight too.
        """
        if isinstance(self._products, InvariantProductFactory):
            return self._products.make(weight, bias, unit, parts=parts, shared=shared)
        return self._products.make(weight, bias, shared=shared)

    def row(self, weight: torch.Tensor, bias: torch.Tensor | None, *, unit: int, units: int) -> RowLayer:
        """Returns the layer with this rank's columns of a weight.

        Args:
            weight: [out, in_local], contiguous.
            bias: [out], replicated, or None.
            unit: Input features of a canonical unit of the model.
            units: Units of the whole weight.
        """
        if isinstance(self._products, InvariantProductFactory):
            tree = ReductionTree(units, self._group)
            return UnitParallelLinear(self._products.make_units(weight, unit, tree), bias, tree)
        return RowParallelLinear(self._products.make(weight), bias, self._group)

    def mlp_unit(self, intermediate_size: int, num_kv_heads: int) -> int:
        """Returns how many columns a canonical unit of an MLP has."""
        if isinstance(self._products, InvariantProductFactory):
            return invariant_mlp_unit(intermediate_size, num_kv_heads)
        return mlp_unit(intermediate_size)

    def gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Returns silu(gate) · up, a fresh contiguous [T, N] of two [T, N]."""
        if isinstance(self._products, InvariantProductFactory):
            return invariant_gated(gate, up)
        return functional.silu(gate).mul_(up)


def invariant_gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) · up, computed in float32 and rounded once; [T, N] like both arguments.

    torch's silu computes what a whole vector register does not hold with another exponential, so that the bits of a
    row would depend on its place. These operations do not.
    """
    wide = gate.float()
    return wide.div(wide.neg().exp_().add_(1.0)).mul_(up).to(gate.dtype)
