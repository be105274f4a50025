"""What each rank of test_model_ranks runs; apart from it so that ranks need not import transformers."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from model_pipeline import ModelPipeline, Part

from launch.rank.groups import build_groups
from runtime.checkpoint import open_checkpoint
from runtime.model import DecoderStage
from runtime.weights import WeightReader
from tp.group import TensorParallelGroup
from tp.linear import RowParallelLinear
from tp.partition import even_run
from tp.products import ProductFactory

Logits = npt.NDArray[np.float32]


def mixed_steps() -> list[list[Part]]:
    """Returns two sequences' chunks: prefill in parts, mixed with decodes of the other."""
    generator = random.Random(12)
    first, second = ([generator.randrange(320) for _ in range(length)] for length in (26, 19))
    return [
        [Part(0, first[:9], 0, True), Part(1, second[:12], 0, False)],
        [Part(1, second[12:17], 12, True), Part(0, first[9:10], 9, True)],
        [Part(0, first[10:26], 10, True), Part(1, second[17:18], 17, True)],
        [Part(1, second[18:], 18, True)],
    ]


def mixed_logits(folder: Path, group: TensorParallelGroup, pp_size: int) -> list[Logits]:
    pipeline = ModelPipeline(folder, group, pp_size=pp_size)
    for sequence_id in (0, 1):
        pipeline.add(sequence_id, 26)
    return [pipeline.step(chunks, all_rows=True).numpy() for chunks in mixed_steps()]


def logits_of_rank(rank: int, world_size: int, folders: dict[str, Path]) -> dict[str, list[Logits]]:
    group = build_groups(world_size, 1, timeout_s=60).tensor_parallel
    return {family: mixed_logits(folder, group, pp_size=1) for family, folder in folders.items()}


def stages_agree_on_rank(rank: int, world_size: int, folder: Path) -> bool:
    group = build_groups(world_size, 1, timeout_s=60).tensor_parallel
    whole, staged = (mixed_logits(folder, group, pp_size) for pp_size in (1, 3))
    return all(np.array_equal(one, other) for one, other in zip(whole, staged, strict=True))


def linear_differences_of_rank(rank: int, world_size: int) -> list[float]:
    """Returns what column- then row-parallel products differ by from the whole ones; small integers add exactly."""
    group = build_groups(world_size, 1, timeout_s=60).tensor_parallel
    generator = torch.Generator().manual_seed(5)
    x, up, down, bias_up, bias_down = (
        torch.randint(-4, 5, shape, generator=generator).float() for shape in ((3, 6), (7, 6), (5, 7), (7,), (5,))
    )
    run = even_run(7, rank, world_size)
    part = slice(run.start, run.stop)
    products = ProductFactory()
    column = products.make(up[part], bias_up[part])
    y = RowParallelLinear(products.make(down[:, part]), bias_down, group)(column(x))
    differences: list[float] = (y - ((x @ up.T + bias_up) @ down.T + bias_down)).flatten().tolist()
    return differences


def greedy_of_rank(rank: int, world_size: int, path: Path, prompts: list[list[int]]) -> list[list[int]]:
    group = build_groups(world_size, 1, timeout_s=60).tensor_parallel
    return ModelPipeline(path, group, pp_size=2).greedy(prompts, 16)


class CountingReader(WeightReader):
    """Counts the elements of the matrices it reads."""

    matrix_elements = 0

    def read(self, name: str, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        tensor = super().read(name, rows, columns)
        self.matrix_elements += tensor.numel() if tensor.dim() == 2 else 0
        return tensor


def matrix_elements_of_rank(rank: int, world_size: int, folder: Path, layers: range) -> int:
    """Returns how many elements of matrices this rank reads to load a stage."""
    group = build_groups(world_size, 1, timeout_s=60).tensor_parallel
    checkpoint = open_checkpoint(folder)
    reader = CountingReader(checkpoint)
    DecoderStage(checkpoint.config, reader, layers, group, dtype=torch.float32, device=torch.device("cpu"))
    return reader.matrix_elements
