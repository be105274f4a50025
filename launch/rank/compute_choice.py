"""In which dtype and form a run computes: from what was asked and what rank 0 measures, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from launch.cli.parse import UsageError
from launch.options import EngineOptions
from runtime.model_config import ModelConfig
from runtime.weights import resolve_dtype
from tp.partition import mlp_slice, mlp_unit
from tp.product_measure import bfloat16_pays, faster_mode, measure_products, onednn_supports
from tp.products import ProductMode

_DTYPES = (torch.float32, torch.bfloat16)
_MODES = tuple(ProductMode)


@dataclass(frozen=True)
class ComputeChoice:
    """How a run computes.

    Args:
        dtype: Of weights, hidden states and KV cache.
        products: How products with weights are computed.
        why: Half a line for a person; on other ranks than the first it is empty.
    """

    dtype: torch.dtype
    products: ProductMode
    why: str


def agreed_compute(options: EngineOptions, config: ModelConfig, device: torch.device, rank: int) -> ComputeChoice:
    """Returns how all ranks compute; every rank calls it once. Rank 0 measures while the others wait.

    On the CPU ``auto`` takes bfloat16 where the checkpoint was saved so and this machine's products are not clearly
    slower in it. A checkpoint in float32 is never rounded without being asked to. Invariant mode measures nothing.

    Args:
        options: The engine's options.
        config: The model's configuration.
        device: This rank's device.
        rank: The global rank.

    Raises:
        UsageError: oneDNN was asked for, and this rank does not have it.
    """
    asked = resolve_dtype(options.dtype, config)
    if options.products == "onednn" and not (device.type == "cpu" and onednn_supports(asked)):
        raise UsageError(f"--products onednn: {asked} on {device.type} has no oneDNN products here; say auto or plain")
    if device.type != "cpu" or options.invariant:
        return ComputeChoice(asked, ProductMode.PLAIN, "")
    choice = _measured(options, config, asked) if rank == 0 else ComputeChoice(asked, ProductMode.PLAIN, "")
    if dist.get_world_size() == 1:
        return choice
    agreed = torch.tensor([_DTYPES.index(choice.dtype), _MODES.index(choice.products)])
    dist.broadcast(agreed, src=0)
    dtype, products = _DTYPES[int(agreed[0])], _MODES[int(agreed[1])]
    able = torch.tensor([int(products is ProductMode.PLAIN or onednn_supports(dtype))])
    dist.all_reduce(able, op=dist.ReduceOp.MIN)
    if not able[0]:
        return ComputeChoice(dtype, ProductMode.PLAIN, "plain products, since some rank has no oneDNN")
    return ComputeChoice(dtype, products, choice.why)


def _measured(options: EngineOptions, config: ModelConfig, asked: torch.dtype) -> ComputeChoice:
    decides_dtype = options.dtype == "auto" and asked is torch.bfloat16
    units = len(mlp_slice(config.intermediate_size, 0, options.tp, mlp_unit(config.intermediate_size)))
    seconds = measure_products(2 * units, config.hidden_size, _DTYPES if decides_dtype else (asked,))
    dtype, reasons = asked, []
    if decides_dtype:
        if not bfloat16_pays(seconds):
            dtype = torch.float32
        times = {one: 1000 * seconds[one, faster_mode(seconds, one)] for one in _DTYPES}
        reasons.append(f"measured {times[torch.bfloat16]:.2g} ms in bfloat16, {times[torch.float32]:.2g} in float32")
    products = faster_mode(seconds, dtype) if options.products == "auto" else ProductMode(options.products)
    plain, onednn = (seconds.get((dtype, mode)) for mode in (ProductMode.PLAIN, ProductMode.ONEDNN))
    if plain is not None and onednn is not None:
        reasons.append(f"{products} products, oneDNN's being {plain / onednn:.2g} times as fast as plain ones")
    else:
        reasons.append(f"{products} products")
    return ComputeChoice(dtype, products, ", ".join(reasons))
