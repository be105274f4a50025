"""What ranks run in tests of the choice of dtype and products."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import torch

from launch.options import EngineOptions
from launch.rank import compute_choice
from launch.rank.compute_choice import agreed_compute
from runtime.checkpoint import open_checkpoint
from tp.products import ProductMode

PLAIN, ONEDNN = ProductMode.PLAIN, ProductMode.ONEDNN


def choice_of_rank(rank: int, world_size: int, folder: Path, unable_rank: int) -> tuple[str, str, str]:
    """Returns dtype, products and reason; measurements are made up, and on other ranks than the first they differ."""
    config = open_checkpoint(folder).config
    fast = {(torch.float32, PLAIN): 4.0, (torch.float32, ONEDNN): 2.0}
    slow = {(torch.float32, PLAIN): 1.0, (torch.float32, ONEDNN): 9.0}
    with (
        mock.patch.object(compute_choice, "measure_products", return_value=slow if rank else fast),
        mock.patch.object(compute_choice, "onednn_supports", return_value=rank != unable_rank),
    ):
        choice = agreed_compute(EngineOptions(model=folder, tp=world_size), config, torch.device("cpu"), rank)
    return str(choice.dtype), choice.products, choice.why
