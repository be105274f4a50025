"""What ``--invariant`` refuses, and how a run in that mode is described."""

from __future__ import annotations

from launch.cli.parse import UsageError
from launch.options import EngineOptions
from runtime.messages import InvariantFacts
from runtime.model_config import ModelConfig

_OFF = "grouped reads of shared prefixes, choices by measurement, TF32"


def check_invariant(options: EngineOptions, config: ModelConfig) -> None:
    """Returns if nothing asked for would break invariant mode, or the mode is off.

    Raises:
        UsageError: Something would.
    """
    if not options.invariant:
        return
    if options.products != "auto":
        raise UsageError(f"--products {options.products}: --invariant has products of its own; leave --products out")
    if options.tp > config.num_kv_heads:
        raise UsageError(
            f"--tp {options.tp}: --invariant sums attention by KV head, of which the model has {config.num_kv_heads}"
        )


def described(facts: InvariantFacts) -> str:
    """Returns one line for a person: how a run computes, and what is off."""
    return (
        f"invariant: float32 products by {facts.kernel} in tiles of {facts.tile_rows} rows, {facts.attention_units} "
        f"attention and {facts.mlp_units} MLP units in one tree, {facts.vocabulary_blocks} vocabulary blocks, "
        f"{facts.key_block} keys a block, {facts.processor}, torch {facts.torch}; off: {_OFF}"
    )
