"""Whether a rank keeps its weights in memory for the process that will take its place, and where."""

from __future__ import annotations

import logging
import math

import torch

from launch.rank.compute_choice import ComputeChoice
from launch.rank.kv_size import available_memory_bytes
from runtime.checkpoint import Checkpoint
from runtime.gguf_checkpoint import GgufCheckpoint
from runtime.kept_weights import KeptWeights
from tp.products import ProductMode

_LOG = logging.getLogger(__name__)
_MOST = 0.25
"""Which part of the memory that this node can still give may hold weights for recoveries alone."""


def kept_weights(
    file: int | None, checkpoint: Checkpoint, compute: ComputeChoice, device: torch.device, *, invariant: bool
) -> KeptWeights | None:
    """Returns where this rank's weights are kept; None when they are read anew after a recovery.

    Where products take the weights as they are, what is kept takes the place of memory that the rank would have of its
    own. Where they are packed or go to a device, it comes on top: then safetensors are read anew, since the system
    keeps their files in memory by itself, and weights of a GGUF file, which take long to dequantise, are kept only
    within a part of the free memory.

    Args:
        file: The zygote's memory file for this rank; None where no zygote recovers it.
        checkpoint: The model's files.
        compute: How the run computes.
        device: This rank's device.
        invariant: Whether bits may depend on nothing, for which weights are laid out in another way.
    """
    if file is None:
        return None
    kept = KeptWeights(file)
    packs = compute.products is ProductMode.ONEDNN and compute.dtype is torch.bfloat16
    if kept.is_complete or (device.type == "cpu" and not packs and not invariant):
        return kept
    if not isinstance(checkpoint, GgufCheckpoint):
        return None
    elements = sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())
    size, free = elements * compute.dtype.itemsize, available_memory_bytes()
    if size <= _MOST * free:
        return kept
    _LOG.warning(
        "weights are not kept for recoveries, which will take longer: %d MiB on top of those in use, and the node has "
        "%d MiB free, of which at most %d %% are taken for that",
        size >> 20,
        free >> 20,
        round(100 * _MOST),
    )
    return None
