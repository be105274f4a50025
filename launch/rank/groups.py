"""Process groups of a rank: one tensor-parallel group a stage, one link a pipeline, each with its own time-out."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from launch.node.progress_record import ProgressRecord
from pp.link import StageLink, Tag
from tp.group import TensorParallelGroup
from tp.shared_memory import host_identity
from tp.shared_memory_group import BACKEND, Announcement, Options, register

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

    Rank = stage * tp_size + tp_rank. Objects and frames go over gloo; tensors over NCCL on GPUs, and on CPUs over gloo
    too, or through shared memory within a stage whose ranks are on one host.

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
    announcement = Announcement() if device.type == "cpu" and tp_size > 1 else None
    tp_control, tp_device = _groups(rows, rank, timeout, device, announcement)
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
        announcement=announcement,
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
    members: list[tuple[int, ...]],
    rank: int,
    timeout: timedelta,
    device: torch.device,
    announcement: Announcement | None = None,
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Returns this rank's (control, device) groups among ``members``; every rank creates all of them, in order.

    Args:
        members: The ranks of each group.
        rank: This rank.
        timeout: Of every operation.
        device: Where the tensors of the device groups live.
        announcement: Of this rank's calls where CPU ranks of one host may share memory; None where they may not.
    """
    control: dist.ProcessGroup | None = None
    tensors: dist.ProcessGroup | None = None
    hosts = _hosts() if announcement is not None else []
    for ranks in members:
        if len(ranks) == 1:
            continue
        gloo = dist.new_group(list(ranks), timeout=timeout, backend="gloo")
        backend = gloo
        if device.type != "cpu":
            backend = dist.new_group(list(ranks), timeout=timeout, backend="nccl")
        elif hosts and len({hosts[one] for one in ranks}) == 1:
            register()
            # Looking out for the others takes a core that another rank may need.
            spins = hosts.count(hosts[rank]) <= len(os.sched_getaffinity(0))
            options = Options(spins, announcement)
            backend = dist.new_group(list(ranks), timeout=timeout, backend=BACKEND, pg_options=options)
        if rank in ranks:
            control, tensors = gloo, backend
    return control, tensors


def _hosts() -> list[str]:
    """Returns on which host each rank of the world is; all ranks call it together."""
    hosts = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, host_identity())
    return hosts
