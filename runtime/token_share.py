"""How sampled ids reach every rank: broadcast over the last stage from its rank 0, then sent to all other stages.

The payload starts with the step number and the plan's digest; a rank whose plan differs finds out here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pp.link import StageLink, Tag
from runtime.plan import DesyncError, StepPlan
from tp.group import TensorParallelGroup

_HEADER = 3


class SharedTokens(NamedTuple):
    """A step's ids and statuses, one for each sampling row, the same on all ranks."""

    token_ids: list[int]
    statuses: list[int]


class TokenShare:
    """One rank's end of the exchange."""

    def __init__(self, group: TensorParallelGroup, link: StageLink) -> None:
        self._group = group
        self._link = link

    def publish(self, plan: StepPlan, token_ids: torch.Tensor, statuses: torch.Tensor) -> SharedTokens:
        """Returns the ids [B] and statuses [B] of the last stage's rank 0, after sending them to the other stages.

        Last stage only; all its ranks call it. The tensors are int64 on any device.
        """
        header = torch.tensor([plan.step, plan.digest, token_ids.shape[0]], dtype=torch.int64)
        payload = torch.cat((header, token_ids.cpu().to(torch.int64), statuses.cpu().to(torch.int64)))
        # A frame, not a tensor: it survives ranks whose plans differ in rows, so that the difference can be named.
        frame = self._group.broadcast_frame(payload.numpy().tobytes())
        payload = torch.frombuffer(bytearray(frame), dtype=torch.int64)
        result = self._checked(plan, payload)
        for stage in range(self._link.size - 1):
            self._link.send_tensor(payload, stage, Tag.TOKENS)
        return result

    def receive(self, plan: StepPlan) -> SharedTokens:
        """Returns the ids and statuses of ``plan``'s sampling rows; every stage but the last calls it."""
        shape = (_HEADER + 2 * len(plan.sampling_rows),)
        last = self._link.size - 1
        payload = self._link.receive_tensor(last, Tag.TOKENS, shape=shape, dtype=torch.int64, step=plan.step)
        return self._checked(plan, payload)

    def _checked(self, plan: StepPlan, payload: torch.Tensor) -> SharedTokens:
        values = payload.tolist()
        expected = [plan.step, plan.digest, len(plan.sampling_rows)]
        if values[:_HEADER] != expected:
            raise DesyncError(
                f"token ids at stage {self._link.stage} rank {self._group.rank} of {self._group.name}: got "
                f"(step, plan digest, rows) {values[:_HEADER]}, expected {expected}"
            )
        rows = expected[2]
        return SharedTokens(values[_HEADER : _HEADER + rows], values[_HEADER + rows :])
