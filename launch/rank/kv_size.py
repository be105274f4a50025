"""How large the KV pool is: from what was asked or from free memory, the same number of blocks on every rank."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from launch.options import EngineOptions
from runtime.kv_blocks import KVCacheError
from runtime.kv_budget import KV_BLOCK_TOKENS

_CUDA_PART = 0.85
_CPU_PART = 0.5
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def agreed_kv_blocks(
    options: EngineOptions, bytes_per_token: int, max_model_len: int, device: torch.device, local_ranks: int
) -> int:
    """Returns how many blocks the KV pool of every rank has; every rank calls it once, when all have their weights.

    Without ``kv_cache_bytes`` a rank takes a part of the memory that is free now; the smallest of all ranks counts,
    so that all plan alike. More than ``max_num_seqs`` sequences of the greatest length need is never taken.

    Args:
        options: The engine's options.
        bytes_per_token: KV bytes of a token on the rank that holds most.
        max_model_len: Prompt and output together.
        device: This rank's device.
        local_ranks: Ranks of this node.

    Raises:
        KVCacheError: The memory has no room for a single block.
    """
    asked = options.kv_cache_bytes
    own = free_bytes(device, local_ranks) if asked is None else asked
    most = options.max_num_seqs * -(-max_model_len // KV_BLOCK_TOKENS)
    blocks = torch.tensor([min(own // (bytes_per_token * KV_BLOCK_TOKENS), most)])
    if dist.get_world_size() > 1:
        dist.all_reduce(blocks, op=dist.ReduceOp.MIN)
    if blocks[0] < 1:
        raise KVCacheError(
            f"the KV cache has no room: of {own} bytes on this rank, and perhaps less on another, a block of "
            f"{KV_BLOCK_TOKENS} tokens takes {bytes_per_token * KV_BLOCK_TOKENS}"
        )
    return int(blocks[0])


def free_bytes(device: torch.device, local_ranks: int) -> int:
    """Returns what a rank may take of its device's free memory, or on the CPU of its share of this node's."""
    if device.type == "cuda":
        return int(_CUDA_PART * torch.cuda.mem_get_info(device)[0])
    return int(_CPU_PART * available_memory_bytes()) // local_ranks


def available_memory_bytes() -> int:
    """Returns the memory that this node can give to new work, within the limit of the control group it is in."""
    meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    kib = next(line.split()[1] for line in meminfo.splitlines() if line.startswith("MemAvailable:"))
    available = int(kib) << 10
    for limit, usage in _CGROUPS:
        if not Path(limit).exists():
            continue
        limit_text = Path(limit).read_text(encoding="ascii").strip()
        if limit_text != "max":
            available = min(available, max(int(limit_text) - int(Path(usage).read_text(encoding="ascii")), 0))
    return available
