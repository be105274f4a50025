"""Linear layers cut over the tensor-parallel group: by output columns, or by input rows with a sum over the group.

Weights are kept as torch.nn.functional.linear takes them, [out, in]; a layer holds only what its rank owns.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from tp.group import TensorParallelGroup


class ColumnParallelLinear:
    """This rank's columns of ``y = x Wᵀ + b``; needs no collective.

    Args:
        weight: [out_local, in], the rows of the whole weight that this rank owns.
        bias: [out_local], or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [T, out_local] of the replicated input ``x`` [T, in]."""
        return functional.linear(x, self.weight, self.bias)


class RowParallelLinear:
    """``y = x Wᵀ + b`` where each rank holds a slice of the input; every rank gets the whole, equal output.

    Args:
        weight: [out, in_local], the columns of the whole weight that this rank owns.
        bias: [out], replicated: added once, after the sum over the group; or None.
        group: The ranks whose partial products are summed; all of them call the layer together.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, group: TensorParallelGroup) -> None:
        self.weight = weight
        self.bias = bias
        self._group = group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a fresh [T, out], summed over the group, of this rank's input slice ``x`` [T, in_local].

        Raises:
            CollectiveError: The sum over the group failed.
        """
        y = self._group.all_reduce_sum_(functional.linear(x, self.weight))
        return y if self.bias is None else y.add_(self.bias)
