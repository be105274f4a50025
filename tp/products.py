"""Matrix products with weights, ``y = x Wᵀ + b``: in which form they are computed.

Plain products go through ``torch.nn.functional.linear``. On the CPU oneDNN is asked by name, since torch itself would
take it for few products only: with bfloat16 weights in its own blocked layout, with float32 weights as they are, from
some rows on. The form depends on mode, dtype and number of rows alone, so that all ranks of a group compute alike.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

import torch
from torch.nn import functional

# Of float32 products: with fewer rows a product of matrix and vectors is faster than one of matrices, and a small
# weight does not outweigh what a call of oneDNN costs.
_FIRST_ONEDNN_ROWS = 4
_FIRST_ONEDNN_ELEMENTS = 3 << 18
# Of bfloat16 products W xᵀ: with more rows it costs more to turn the result round than is won.
_LAST_TURNED_ROWS = 64


class ProductMode(StrEnum):
    """How a rank computes its products; equal on every rank."""

    PLAIN = "plain"
    ONEDNN = "onednn"


class Product(Protocol):
    """The product with one weight."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a fresh contiguous [T, out] of ``x`` [T, in], in its dtype."""


class PlainProduct:
    """As torch computes it.

    Args:
        weight: [out, in].
        bias: [out], or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [T, out]."""
        return functional.linear(x, self._weight, self._bias)


class OneDnnProduct:
    """A float32 product on the CPU with a weight that stays as it is.

    Args:
        weight: [out, in] float32, contiguous.
        bias: [out], or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [T, out]."""
        if x.shape[0] < _FIRST_ONEDNN_ROWS:
            return functional.linear(x, self._weight, self._bias)
        return _onednn(x, self._weight, self._bias)


class PackedProduct:
    """A bfloat16 product on the CPU with a weight in oneDNN's layout, which takes the place of the plain one.

    Args:
        weight: [out, in] bfloat16, contiguous; it is not kept.
        bias: [out], or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)  # noqa: SLF001 - the op has no public name
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [T, out]."""
        return _onednn(x, self._packed, self._bias)


class TurnedProduct:
    """A bfloat16 product on the CPU, as (W xᵀ)ᵀ where that pays, with a weight that stays as it is.

    Args:
        weight: [out, in] bfloat16, contiguous.
        bias: [out], or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [T, out]."""
        rows = x.shape[0]
        if rows > _LAST_TURNED_ROWS:
            return functional.linear(x, self._weight, self._bias)
        # Two rows take less time than one, which is computed as the product of a matrix and a vector.
        twice = x.expand(2, -1) if rows == 1 else x
        y = torch.mm(self._weight, twice.t())[:, :rows].t().contiguous()
        return y if self._bias is None else y.add_(self._bias)


class ProductFactory:
    """Makes the products of a rank.

    Args:
        mode: How they are computed.
    """

    def __init__(self, mode: ProductMode = ProductMode.PLAIN) -> None:
        self.mode = mode

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, shared: bool = False) -> Product:
        """Returns the product with a weight.

        Args:
            weight: [out, in], contiguous.
            bias: [out], or None.
            shared: Whether someone else reads the weight too, so that a copy in another layout would be memory on top.
        """
        if self.mode is ProductMode.PLAIN or weight.device.type != "cpu" or weight.numel() == 0:
            return PlainProduct(weight, bias)
        if weight.dtype is torch.float32:
            large = weight.numel() >= _FIRST_ONEDNN_ELEMENTS
            return OneDnnProduct(weight, bias) if large else PlainProduct(weight, bias)
        return TurnedProduct(weight, bias) if shared else PackedProduct(weight, bias)


def _onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # noqa: SLF001 - see above
    return y
