"""The size of the KV pool: what was asked or what is free, agreed over all ranks, and never more than can be used."""

from __future__ import annotations

from pathlib import Path

import torch
from ranks import run_ranks

from launch.options import EngineOptions
from launch.rank.kv_size import agreed_kv_blocks, available_memory_bytes, free_bytes
from runtime.kv_blocks import KVCacheError
from runtime.kv_budget import KV_BLOCK_TOKENS

CPU = torch.device("cpu")
TOKEN_BYTES = 100
BLOCK_BYTES = TOKEN_BYTES * KV_BLOCK_TOKENS


def blocks_of(asked: int | None, *, max_num_seqs: int = 64, max_model_len: int = 4096, local_ranks: int = 1) -> int:
    options = EngineOptions(model=Path("m"), kv_cache_bytes=asked, max_num_seqs=max_num_seqs)
    return agreed_kv_blocks(options, TOKEN_BYTES, max_model_len, CPU, local_ranks)


def sizes_of_rank(rank: int, world_size: int) -> tuple[int, int, int, str]:
    asked = blocks_of((5 + rank) * BLOCK_BYTES + 7)
    capped = blocks_of(1000 * BLOCK_BYTES, max_num_seqs=2, max_model_len=33)
    free = blocks_of(None, max_num_seqs=1 << 20)
    try:
        blocks_of((rank + 1) * BLOCK_BYTES - 1)
    except KVCacheError as error:
        return asked, capped, free, str(error)
    return asked, capped, free, ""


def test_the_smallest_over_the_ranks_counts() -> None:
    first, second = run_ranks(sizes_of_rank, 2)
    assert first[:3] == second[:3]
    asked, capped, free, message = first
    assert asked == 5
    assert capped == 2 * 3
    assert 1 <= free <= available_memory_bytes() * 2 // BLOCK_BYTES
    assert f"of {BLOCK_BYTES - 1} bytes on this rank" in message
    assert f"of {2 * BLOCK_BYTES - 1} bytes on this rank" in second[3], "all ranks stop, not one alone"


def test_ranks_of_a_node_share_its_memory() -> None:
    one, four = free_bytes(CPU, 1), free_bytes(CPU, 4)
    assert four < one / 2
    total = int(Path("/proc/meminfo").read_text(encoding="ascii").split()[1]) << 10
    assert 0 < available_memory_bytes() <= total
