"""What the sampler needs of the ranks that hold the other vocabulary slices."""

from __future__ import annotations

from typing import Protocol

import torch


class SliceGroup(Protocol):
    """The ranks that hold the slices of one vocabulary; all call the same methods in the same order."""

    @property
    def rank(self) -> int:
        """This rank in the group."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the ranks' tensors of one shape stacked as [size, *shape]."""

    def all_reduce_max_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns ``tensor`` after taking the elementwise maximum over the ranks in place."""

    def all_reduce_sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns ``tensor`` after summing it over the ranks in place."""
