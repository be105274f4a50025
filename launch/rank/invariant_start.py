"""What the ranks of a run in invariant mode agree on at the start: that all of them compute alike."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress

import msgspec
import torch
from torch.distributed import Store

from launch.cli.parse import UsageError
from launch.environment import RankEnvironment
from launch.options import EngineOptions
from runtime.messages import InvariantFacts
from runtime.model_config import ModelConfig
from runtime.tiled_attention import KEY_BLOCK
from tp.compiled_library import BuildError
from tp.invariant_kernels import InvariantKernels, build_kernels
from tp.invariant_products import CPU_TILES, DEVICE_TILES, InvariantProductFactory
from tp.partition import VOCABULARY_BLOCKS, invariant_mlp_unit
from tp.product_measure import onednn_supports

_LOG = logging.getLogger(__name__)
_KEY = "invariant"


def agreed_invariant(
    options: EngineOptions, config: ModelConfig, device: torch.device, environment: RankEnvironment, store: Store
) -> InvariantFacts | None:
    """Returns how all ranks compute in invariant mode, None when it is off; every rank calls it once.

    Args:
        options: The engine's options.
        config: The model's configuration.
        device: This rank's device.
        environment: What torchrun says.
        store: Shared by all ranks.

    Raises:
        UsageError: This rank would compute in another way than rank 0: another processor, device or library.
    """
    if not options.invariant:
        return None
    own = _facts(config, device)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
    if environment.rank == 0:
        store.set(_KEY, msgspec.json.encode(own).decode())
        return own
    first = msgspec.json.decode(store.get(_KEY), type=InvariantFacts)
    for name in InvariantFacts.__struct_fields__:
        mine, theirs = getattr(own, name), getattr(first, name)
        if mine != theirs:
            raise UsageError(
                f"--invariant: rank {environment.rank} would give other bits than rank 0: {name} is {mine!r} here and "
                f"{theirs!r} there"
            )
    return first


def prepare_kernels(environ: Mapping[str, str]) -> None:
    """Builds the kernels, so that no rank has to: each of them finds them, or finds out why there are none."""
    with suppress(BuildError):
        build_kernels(environ)


def invariant_products(
    facts: InvariantFacts, device: torch.device, rank: int, environ: Mapping[str, str]
) -> InvariantProductFactory:
    """Returns what makes this rank's products, by kernels compiled for this machine where it has a compiler.

    Args:
        facts: How all ranks compute.
        device: This rank's device.
        rank: The global rank; the first says why there are no kernels.
        environ: Says where compiler and cache folder are.
    """
    kernels = None
    if device.type == "cpu":
        try:
            kernels = InvariantKernels(build_kernels(environ))
        except BuildError as error:
            if rank == 0:
                _LOG.warning("--invariant takes longer, for the same bits: its library of kernels %s", error)
    return InvariantProductFactory(device, onednn=facts.kernel == "onednn", kernels=kernels)


def _facts(config: ModelConfig, device: torch.device) -> InvariantFacts:
    on_cpu = device.type == "cpu"
    return InvariantFacts(
        kernel="onednn" if on_cpu and onednn_supports(torch.float32) else "torch",
        tile_rows=(CPU_TILES if on_cpu else DEVICE_TILES).base,
        attention_units=config.num_kv_heads,
        mlp_units=-(-config.intermediate_size // invariant_mlp_unit(config.intermediate_size, config.num_kv_heads)),
        vocabulary_blocks=VOCABULARY_BLOCKS,
        key_block=KEY_BLOCK,
        processor=torch.backends.cpu.get_cpu_capability() if on_cpu else torch.cuda.get_device_name(device),
        torch=str(torch.__version__),
    )
