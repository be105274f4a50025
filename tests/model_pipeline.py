"""A whole model in one process per tensor-parallel rank: stages run one after another, whole logits are gathered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from compiled_kernels import invariant_factory

from pp.partition import layer_ranges
from runtime.batch import Chunk, pack
from runtime.checkpoint import open_checkpoint
from runtime.kv_blocks import BlockPool, BlockTable
from runtime.model import DecoderStage
from runtime.weights import WeightReader
from tp.group import TensorParallelGroup
from tp.invariant_products import InvariantProductFactory
from tp.partition import VocabularyBlocks
from tp.products import ProductFactory, ProductMode

CPU = torch.device("cpu")
NUM_BLOCKS = 1024
BLOCK_TOKENS = 4


class Part(NamedTuple):
    """The tokens of one sequence that a step runs."""

    sequence_id: int
    token_ids: Sequence[int]
    context_length: int
    logit_rows: int


class ModelPipeline:
    """Runs chunks through all stages and returns logits of the whole vocabulary, on every rank.

    A sequence's KV blocks lie in several runs, unless ``paged`` is false: then it has one run.
    """

    def __init__(
        self,
        path: Path,
        group: TensorParallelGroup | None = None,
        *,
        pp_size: int = 1,
        dtype: torch.dtype = torch.float32,
        paged: bool = True,
        products: ProductMode = ProductMode.PLAIN,
        invariant: bool = False,
        compiled: bool = True,
    ) -> None:
        checkpoint = open_checkpoint(path)
        reader = WeightReader(checkpoint)
        self.config = checkpoint.config
        self.group = group or TensorParallelGroup(0, 1)
        factory: ProductFactory | InvariantProductFactory = ProductFactory(products)
        if invariant:
            factory = invariant_factory(CPU, compiled=compiled)
        self.stages = [
            DecoderStage(
                self.config,
                reader,
                layers,
                self.group,
                dtype=dtype,
                device=CPU,
                products=factory,
            )
            for layers in layer_ranges(self.config.num_layers, pp_size)
        ]
        self.caches = [stage.new_cache(NUM_BLOCKS, BLOCK_TOKENS) for stage in self.stages]
        self._paged = paged
        self._pool = BlockPool(NUM_BLOCKS)
        self._tables: dict[int, BlockTable] = {}

    def add(self, sequence_id: int, capacity_tokens: int) -> None:
        table, between = BlockTable(sequence_id), BlockTable(-1)
        missing = -(-capacity_tokens // BLOCK_TOKENS)
        while missing:
            count = 1 + len(table) % 3 if self._paged else missing
            count = min(count, missing)
            self._pool.take(table, count, 0)
            missing -= count
            if self._paged:
                self._pool.take(between, 1, 0)
        self._pool.release(between)
        self._tables[sequence_id] = table
        assert len(table.runs) == 1 or self._paged

    def remove(self, sequence_id: int) -> None:
        self._pool.release(self._tables.pop(sequence_id))

    def step(self, parts: Sequence[Part], *, all_rows: bool = False) -> torch.Tensor:
        """Returns [S, vocab_size], or [T, vocab_size] of every token with ``all_rows``."""
        batch = pack([Chunk(*part, self._tables[part.sequence_id]) for part in parts], BLOCK_TOKENS, CPU)
        if all_rows:
            batch = replace(batch, sample_rows=torch.arange(batch.token_ids.numel()))
        hidden: torch.Tensor | None = None
        for stage, cache in zip(self.stages, self.caches, strict=True):
            hidden = stage.forward(batch, hidden, cache)
        assert hidden is not None
        return self._whole(self.stages[-1].logits(hidden))

    def greedy(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        """Returns each prompt's continuation; the prompts run as one batch."""
        sequences = [list(prompt) for prompt in prompts]
        for index, prompt in enumerate(prompts):
            self.add(index, len(prompt) + new_tokens)
        done = [0] * len(prompts)
        for _ in range(new_tokens):
            parts = [Part(index, ids[done[index] :], done[index], True) for index, ids in enumerate(sequences)]
            done = [len(ids) for ids in sequences]
            for ids, token_id in zip(sequences, self.step(parts).argmax(dim=1).tolist(), strict=True):
                ids.append(token_id)
        for index in range(len(prompts)):
            self.remove(index)
        return [ids[len(prompt) :] for ids, prompt in zip(sequences, prompts, strict=True)]

    def _whole(self, logits: torch.Tensor) -> torch.Tensor:
        blocks = VocabularyBlocks(self.config.vocab_size)
        slices = [blocks.slice_of(rank, self.group.size) for rank in range(self.group.size)]
        own = slices[self.group.rank]
        assert logits.dtype == torch.float32
        assert logits.shape[1] == own.size
        assert torch.all(logits[:, own.valid_size :] == -torch.inf)
        widest = max(piece.size for piece in slices)
        padded = torch.nn.functional.pad(logits, (0, widest - own.size))
        gathered = self.group.all_gather(padded)
        return torch.cat([gathered[rank][:, : piece.valid_size] for rank, piece in enumerate(slices)], dim=1)
