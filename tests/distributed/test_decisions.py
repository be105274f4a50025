"""What the ranks of epoch 0 measured holds for those of later epochs, on every rank."""

from __future__ import annotations

import socket
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tiny_checkpoints import write_tiny_checkpoint
from torch.distributed import HashStore

from launch.environment import RankEnvironment
from launch.options import EngineOptions
from launch.rank import compute_choice, kv_size
from launch.rank.compute_choice import ComputeChoice, agreed_compute
from launch.rank.decisions import Decisions, keep_decisions, recall_decisions
from launch.rank.kv_size import agreed_kv_blocks
from launch.rank.start_barrier import StartError, connect_store, epoch_store, meet
from runtime.checkpoint import open_checkpoint
from tp.products import ProductMode

CPU = torch.device("cpu")
WORLD_SIZE = 3


def environment(rank: int, epoch: int, port: int = 1) -> RankEnvironment:
    return RankEnvironment(rank, WORLD_SIZE, rank, WORLD_SIZE, "127.0.0.1", port, False, 0, None, epoch)


def decided(rank: int, world_size: int, port: int, folder: Path) -> list[Decisions]:
    """Returns what holds in epochs 0 to 2; in each of them the machine would say something else."""
    options = EngineOptions(model=folder, tp=world_size, dtype="auto")
    config = open_checkpoint(folder).config
    here = environment(rank, 0, port)
    store = connect_store(here, 20)
    results = []
    for epoch in range(3):
        here = environment(rank, epoch, port)
        onednn = 1.0 if epoch == 0 else 9.0
        seconds = {(torch.float32, ProductMode.PLAIN): 2.0, (torch.float32, ProductMode.ONEDNN): onednn}
        with (
            mock.patch.object(compute_choice, "measure_products", return_value=seconds),
            mock.patch.object(compute_choice, "onednn_supports", return_value=True),
            mock.patch.object(kv_size, "available_memory_bytes", return_value=(7 << 20) >> epoch),
        ):
            found = recall_decisions(store, here)
            if found is None:
                compute = agreed_compute(options, config, CPU, rank)
                found = Decisions.of(compute, agreed_kv_blocks(options, 1024, 512, CPU, world_size))
                keep_decisions(store, here, found)
        results.append(found)
        meet(epoch_store(store, here), "loaded", here, 20)
    # Rank 0 keeps the store: it must not leave before the others have looked.
    dist.barrier()
    return results


def test_later_epochs_do_as_the_first(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    folder = write_tiny_checkpoint(tmp_path, "llama")
    of_ranks = run_ranks(decided, WORLD_SIZE, port, folder)
    first = of_ranks[0][0]
    assert (first.dtype, first.products) == ("float32", "onednn")
    assert 1 <= first.kv_blocks < 7 << 20
    assert all(one == first for one in of_ranks[0][1:])
    for results in of_ranks:
        assert len({(one.dtype, one.products, one.kv_blocks) for one in [first, *results]}) == 1


def test_a_later_epoch_without_a_first_is_an_error() -> None:
    store = HashStore()
    assert recall_decisions(store, environment(0, 0)) is None
    with pytest.raises(StartError, match="epoch 2 finds nothing that epoch 0 decided"):
        recall_decisions(store, environment(1, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", list(ProductMode))
def test_a_choice_survives_storing(dtype: torch.dtype, mode: ProductMode) -> None:
    store, choice = HashStore(), ComputeChoice(dtype, mode, "measured, für ü")
    keep_decisions(store, environment(0, 0), Decisions.of(choice, 12))
    for rank, epoch, blocks in ((1, 0, 13), (0, 1, 14)):
        keep_decisions(store, environment(rank, epoch), Decisions.of(choice, blocks))
    found = recall_decisions(store, environment(2, 1))
    assert found is not None
    assert (found.compute(), found.kv_blocks) == (choice, 12)
