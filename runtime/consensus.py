"""Where ranks compare what they are about to do, and what they did, beside the digests that other messages carry."""

from __future__ import annotations

import torch

from pp.link import StageLink, Tag
from runtime.plan import DesyncError, StepPlan
from runtime.self_check import SelfCheck
from tp.group import TensorParallelGroup

_DIGEST_BYTES = 8


class Consensus:
    """One rank's end of the comparisons.

    Args:
        group: This rank's stage.
        link: This rank's pipeline.
        self_check: Looks now and then whether this rank still computes right numbers; None when nobody does.
    """

    def __init__(self, group: TensorParallelGroup, link: StageLink, self_check: SelfCheck | None = None) -> None:
        self._group = group
        self._link = link
        self._self_check = self_check

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank."""
        return self._group.size == 1 and self._link.size == 1

    def kept(self, output: torch.Tensor) -> torch.Tensor:
        """Takes the output of this rank's stage, equal on all its ranks; returns it."""
        if self._self_check is not None:
            self._self_check.keep(output)
        return output

    def check_plan(self, plan: StepPlan) -> None:
        """Returns when this rank's plan is that of rank 0 of its stage; all its ranks call it before they run a plan.

        A plan says the shape of every tensor of its step, and a tensor of another shape than expected would end the
        process that receives it, not the one that is wrong. Between stages the messages' own headers tell it.

        Raises:
            DesyncError: The plans differ, or a rank of the stage computes wrong numbers.
        """
        group = self._group
        if self._self_check is not None:
            self._self_check.at(plan.step)
        if group.size == 1:
            return
        agreed = group.broadcast_(torch.tensor([plan.step, plan.digest], dtype=torch.int64)).tolist()
        if agreed != [plan.step, plan.digest]:
            raise DesyncError(
                f"plan at stage {self._link.stage} rank {group.rank} of {group.name}: rank 0 has (step, digest) "
                f"{agreed}, this rank {[plan.step, plan.digest]}",
                rank=group.global_rank,
                step=plan.step,
                own=plan.digest,
                other=agreed[1],
            )

    def confirm(self, digest: int) -> None:
        """Returns when every rank is known to have the same digest; all ranks call it in the same step.

        On the leader nothing less is meant: each stage gathers its ranks' digests, and a stage begins when it has the
        word of the one before; the last stage's word goes to the first.

        Raises:
            DesyncError: Another rank of the stage, or the stage before, has another digest.
        """
        group, link = self._group, self._link
        if not link.is_first:
            self._compare(digest, link.receive_frame(link.stage - 1, Tag.CONFIRM), link.stage - 1)
        for rank, (step, other) in enumerate(group.gather_numbers([link.step, digest])):
            if (step, other) != (link.step, digest):
                where = f"rank {rank} of {group.name} has (step, digest) {[step, other]}"
                raise self._desync(where, digest, other)
        frame = digest.to_bytes(_DIGEST_BYTES, "little", signed=True)
        if link.size > 1:
            link.send_frame(frame, 0 if link.is_last else link.stage + 1, Tag.CONFIRM)
        if link.is_first and not link.is_last:
            self._compare(digest, link.receive_frame(link.size - 1, Tag.CONFIRM), link.size - 1)

    def _compare(self, digest: int, frame: bytes, stage: int) -> None:
        other = int.from_bytes(frame, "little", signed=True)
        if other != digest:
            raise self._desync(f"stage {stage} has digest {other}", digest, other)

    def _desync(self, where: str, own: int, other: int) -> DesyncError:
        group, link = self._group, self._link
        return DesyncError(
            f"confirmation at stage {link.stage} rank {group.rank}, step {link.step}: {where}, this rank {own}",
            rank=group.global_rank,
            step=link.step,
            own=own,
            other=other,
        )
