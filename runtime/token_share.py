"""How sampled ids reach every rank: broadcast over the last stage from its rank 0, then sent to all other stages.

The payload starts with the step number, the plan's digest and a digest of the grammar masks that the ids were drawn
under; a rank whose plan or masks differ finds out here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from grammar_sync.masks import checksums_digest
from pp.link import StageLink, Tag
from runtime.plan import DesyncError, StepPlan
from runtime.sampling import has_no_mask
from tp.group import TensorParallelGroup

_HEADER = 4


class SharedTokens(NamedTuple):
    """A step's ids and statuses, one for each sampling row, the same on all ranks."""

    token_ids: list[int]
    statuses: list[int]


class TokenShare:
    """One rank's end of the exchange.

    Args:
        group: This rank's stage.
        link: This rank's pipeline.
    """

    def __init__(self, group: TensorParallelGroup, link: StageLink) -> None:
        self._group = group
        self._link = link

    def publish(
        self, plan: StepPlan, token_ids: torch.Tensor, statuses: torch.Tensor, masks: tuple[int, ...] = ()
    ) -> SharedTokens:
        """Returns the ids [B] and statuses [B] of the last stage's rank 0, after sending them to the other stages.

        Last stage only; all its ranks call it. The tensors are int64 on any device; ``masks`` has the checksum of each
        constrained row's mask as this rank got it.

        Raises:
            DesyncError: Rank 0 has another plan or other masks.
        """
        host_statuses = statuses.cpu().to(torch.int64)
        digest = _masks_digest(plan, masks, host_statuses.tolist())
        header = torch.tensor([plan.step, plan.digest, token_ids.shape[0], digest], dtype=torch.int64)
        payload = torch.cat((header, token_ids.cpu().to(torch.int64), host_statuses))
        # A frame, not a tensor: it survives ranks whose plans differ in rows, so that the difference can be named.
        frame = self._group.broadcast_frame(payload.numpy().tobytes())
        payload = torch.frombuffer(bytearray(frame), dtype=torch.int64)
        result = self._checked(plan, payload, masks)
        for stage in range(self._link.size - 1):
            self._link.send_tensor(payload, stage, Tag.TOKENS)
        return result

    def receive(self, plan: StepPlan, masks: tuple[int, ...] | None = None) -> SharedTokens:
        """Returns the ids and statuses of ``plan``'s sampling rows; every stage but the last calls it.

        Args:
            plan: A step in flight.
            masks: The checksum of each constrained row's mask as this rank filled it; None where none are filled.

        Raises:
            DesyncError: The last stage's rank 0 has another plan or other masks.
        """
        shape = (_HEADER + 2 * len(plan.sampling_rows),)
        last = self._link.size - 1
        payload = self._link.receive_tensor(last, Tag.TOKENS, shape=shape, dtype=torch.int64, step=plan.step)
        return self._checked(plan, payload, masks)

    def _checked(self, plan: StepPlan, payload: torch.Tensor, masks: tuple[int, ...] | None) -> SharedTokens:
        values = payload.tolist()
        step, digest, count, masks_digest = values[:_HEADER]
        expected = [plan.step, plan.digest, len(plan.sampling_rows)]
        if [step, digest, count] != expected:
            raise self._desync(
                plan, f"got (step, plan digest, rows) {[step, digest, count]}, expected {expected}", plan.digest, digest
            )
        shared = SharedTokens(values[_HEADER : _HEADER + count], values[_HEADER + count :])
        if masks is not None and plan.constrained_rows:
            own = _masks_digest(plan, masks, shared.statuses)
            if own != masks_digest:
                raise self._desync(
                    plan,
                    f"they were drawn under masks of digest {masks_digest}, this rank's is {own}",
                    own,
                    masks_digest,
                )
        return shared

    def _desync(self, plan: StepPlan, problem: str, own: int, other: int) -> DesyncError:
        group = self._group
        return DesyncError(
            f"token ids at stage {self._link.stage} rank {group.rank} of {group.name}, step {plan.step}: {problem}",
            rank=group.global_rank,
            step=plan.step,
            own=own,
            other=other,
        )


def _masks_digest(plan: StepPlan, checksums: tuple[int, ...], statuses: list[int]) -> int:
    """Returns a signed 64-bit digest of the masks; one that some rank does not have is agreed to be missing."""
    pairs = zip(plan.constrained_rows, checksums, strict=True) if checksums else ()
    return checksums_digest([value for row, value in pairs if not has_no_mask(statuses[row])])
