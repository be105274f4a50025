"""Process groups of a rank: one tensor-parallel group a stage, one link a pipeline, each with its own time-out."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from launch.node.progress_record import ProgressRecord
from pp.link import StageLink, Tag
from tp.group import TensorParallelGroup

_WARM_UP_ELEMENTS = 1024
"""More than fits beside a header, so that a tensor of its own travels."""


@dataclass(frozen=True)
class RankGroups:
    """What a rank communicates through."""

    tensor_parallel: TensorParallelGroup
    link: StageLink


def build_groups(
    tp_size: int,
    pp_size: int,
    *,
    timeout_s: float,
    device: torch.device | None = None,
    record: ProgressRecord | None = None,
) -> RankGroups:
    """Returns this rank's groups; every rank of the world calls it once, with the same arguments.

    Rank = stage * tp_size + tp_rank. Tensors go over the default group's backend, objects and frames over gloo.

    Args:
        tp_size: Ranks of a stage.
        pp_size: Stages.
        timeout_s: Time-out of every operation; ``init_process_group``'s does not carry over to new groups.
        device: This rank's device; the CPU when left out.
        record: Where the groups note what this rank does; None when nobody wants to know.
    """
    rank = dist.get_rank()
    device = device or torch.device("cpu")
    timeout = timedelta(seconds=timeout_s)
    stage, tp_rank = divmod(rank, tp_size)
    columns = [tuple(range(column, tp_size * pp_size, tp_size)) for column in range(tp_size)]
    rows = [tuple(range(first, first + tp_size)) for first in range(0, tp_size * pp_size, tp_size)]
    tp_control, tp_device = _groups(rows, rank, timeout, device)
    pp_control, pp_device = _groups(columns, rank, timeout, device)
    group = TensorParallelGroup(
        tp_rank,
        tp_size,
        name=f"tp{stage}",
        root=rows[stage][0],
        device_group=tp_device,
        control_group=tp_control,
        device=device,
        record=record,
    )
    link = StageLink(
        stage,
        columns[tp_rank],
        name=f"pp{tp_rank}",
        control_group=pp_control,
        device_group=pp_device,
        device=device,
        record=record,
    )
    return RankGroups(group, link)


def warm_up(groups: RankGroups, device: torch.device | None = None) -> None:
    """Runs one operation on each group and between each pair of stages, so that the first step finds them connected."""
    group, link = groups.tensor_parallel, groups.link
    ones = torch.ones(_WARM_UP_ELEMENTS, device=device)
    group.all_reduce_sum_(ones)
    group.broadcast_frame(b"" if group.rank == 0 else None)
    group.all_gather_object(group.rank)
    others = [stage for stage in range(link.size) if stage != link.stage]
    for stage in others:
        link.send_frame(b"warm-up", stage, Tag.WARM_UP)
    for stage in others:
        link.receive_frame(stage, Tag.WARM_UP)
    # Hidden states go from each stage to the next over the device's backend, which connects at first use.
    if not link.is_last:
        link.send_tensor(ones, link.stage + 1, Tag.HIDDEN)
    if not link.is_first:
        link.receive_tensor(link.stage - 1, Tag.HIDDEN, shape=(_WARM_UP_ELEMENTS,), dtype=torch.float32)
    link.drain()


def _groups(
    members: list[tuple[int, ...]], rank: int, timeout: timedelta, device: torch.device
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Returns this rank's (control, device) groups among ``members``; every rank creates all of them, in order."""
    control: dist.ProcessGroup | None = None
    tensors: dist.ProcessGroup | None = None
    for ranks in members:
        if len(ranks) == 1:
            continue
        gloo = dist.new_group(list(ranks), timeout=timeout, backend="gloo")
        backend = gloo if device.type == "cpu" else dist.new_group(list(ranks), timeout=timeout, backend="nccl")
        if rank in ranks:
            control, tensors = gloo, backend
    return control, tensors
