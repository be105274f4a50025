"""The order of a stage's operations: every forward pass makes the same ones, so a wrong one is seen beforehand."""

from __future__ import annotations

import torch


class ForwardSchedule:
    """The operations of a forward pass, learnt in the first one.

    Ranks that make other operations than their group get each other's tensors, without an error or with the receiver's
    death. What a pass does never depends on its batch, except for the number of tokens, which all its tensors are a
    multiple of: so the rank that is wrong is told before anything is sent.
    """

    def __init__(self) -> None:
        self._learnt: list[tuple[str, torch.dtype, int]] = []
        self._is_learning = True
        self._at = 0
        self._tokens: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether a forward pass is under way."""
        return self._tokens is not None

    def begin(self, tokens: int) -> None:
        """Notes that a forward pass over so many tokens begins."""
        self._tokens = tokens
        self._at = 0

    def problem(self, operation: str, tensor: torch.Tensor) -> str | None:
        """Returns what is wrong with the next operation, in half a line; None when nothing is."""
        tokens = self._tokens
        if not tokens:
            return None
        elements = tensor.numel()
        if self._is_learning:
            self._learnt.append((operation, tensor.dtype, elements // tokens))
        if self._at == len(self._learnt):
            return f"a forward pass has {len(self._learnt)} operations, this is one more"
        expected, dtype, per_token = self._learnt[self._at]
        self._at += 1
        if operation != expected:
            return f"operation {self._at} of a forward pass is {expected}"
        if tensor.dtype != dtype:
            return f"operation {self._at} of a forward pass has {dtype}, not {tensor.dtype}"
        if elements != per_token * tokens:
            return (
                f"operation {self._at} of a forward pass over {tokens} tokens has {per_token * tokens} elements, "
                f"not {elements}"
            )
        return None

    def end(self) -> str | None:
        """Notes that the forward pass is over; returns what is wrong with it, or None."""
        made, self._tokens = self._at, None
        if self._is_learning:
            self._is_learning = False
            return None
        if made != len(self._learnt):
            return f"the forward pass made {made} operations of {len(self._learnt)}"
        return None
