"""How a rank comes up, whatever it is for: threads, device, store, process groups."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from launch.chaos.faulty import Trigger, install
from launch.chaos.record import CellFolder
from launch.cli.parse import UsageError
from launch.environment import RankEnvironment
from launch.node.progress_record import ProgressRecord
from launch.node.rank_processes import threads_per_rank
from launch.options import RankOptions
from launch.rank.groups import RankGroups, build_groups, warm_up
from launch.rank.start_barrier import connect_store, epoch_store, meet


@dataclass(frozen=True)
class StartedRank:
    """A rank that can communicate.

    Args:
        run_store: Shared by all ranks of this attempt, those of later epochs too.
        store: Shared by all ranks of this epoch.
        groups: Warm.
        device: This rank's device.
    """

    run_store: Store
    store: Store
    groups: RankGroups
    device: torch.device


def bring_up(options: RankOptions, environment: RankEnvironment, record: ProgressRecord | None = None) -> StartedRank:
    """Returns this rank, able to communicate with all others; every rank calls it once.

    Args:
        options: The command's options.
        environment: What torchrun says.
        record: Where the groups note what this rank does; None when nobody wants to know.

    Raises:
        UsageError: The number of ranks or devices does not fit.
        StartError: Another rank did not come.
    """
    if environment.world_size != options.world_size:
        raise UsageError(
            f"torchrun started {environment.world_size} ranks: --tp {options.tp} x --pp {options.pp} "
            f"needs {options.world_size}"
        )
    torch.set_num_threads(threads_per_rank(options.threads_per_rank, environment.local_world_size))
    device = _device(options.device, environment)
    run_store = connect_store(environment, options.start_timeout_s)
    store = epoch_store(run_store, environment)
    meet(store, "started", environment, options.start_timeout_s)
    if environment.chaos_folder is not None:
        install(Trigger(CellFolder(environment.chaos_folder), environment.rank, environment.epoch))
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        store=PrefixStore("groups", store),
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=timedelta(seconds=options.group_timeout_s),
    )
    groups = build_groups(options.tp, options.pp, timeout_s=options.group_timeout_s, device=device, record=record)
    warm_up(groups, device)
    return StartedRank(run_store, store, groups, device)


def _device(asked: str, environment: RankEnvironment) -> torch.device:
    available = torch.cuda.device_count()
    if asked == "cpu" or (asked == "auto" and available == 0):
        return torch.device("cpu")
    if available < environment.local_world_size:
        raise UsageError(
            f"--device {asked}: this node has {available} CUDA devices for {environment.local_world_size} ranks"
        )
    device = torch.device("cuda", environment.local_rank)
    torch.cuda.set_device(device)
    return device
