"""Linear layers cut over the tensor-parallel group: by output columns, or by input rows with a sum over the group.

A layer holds only what its rank owns, in whatever form its product needs.
"""

from __future__ import annotations

import torch

from tp.group import TensorParallelGroup
from tp.products import Product


class ColumnParallelLinear:
    """This rank's columns of ``y = x Wᵀ + b``; needs no collective.

    Args:
        product: With the rows of the whole weight that this rank owns, and their bias: [T, in] to [T, out_local].
    """

    def __init__(self, product: Product) -> None:
        self._product = product

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [T, out_local] of the replicated input ``x`` [T, in]."""
        return self._product(x)


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
