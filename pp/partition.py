"""Which decoder layers each pipeline stage holds."""

from __future__ import annotations

from collections.abc import Sequence


class StagePartitionError(ValueError):
    """A model's layers cannot be cut into these stages."""


def layer_ranges(num_layers: int, pp_size: int, explicit: Sequence[int] | None = None) -> list[range]:
    """Returns the layers of each stage, in order: contiguous, none empty.

    Without ``explicit`` the counts differ by at most one and the earlier stages take the larger ones, because the last
    stage also computes the LM head.

    Args:
        num_layers: Decoder layers of the model.
        pp_size: Stages.
        explicit: Layers per stage, in stage order.

    Raises:
        StagePartitionError: There are more stages than layers, or ``explicit`` does not add up.
    """
    if not 1 <= pp_size <= num_layers:
        raise StagePartitionError(f"pp_size {pp_size} is not in 1..{num_layers}, the decoder layers of the model")
    base, extra = divmod(num_layers, pp_size)
    counts = [base + (stage < extra) for stage in range(pp_size)] if explicit is None else list(explicit)
    if len(counts) != pp_size:
        raise StagePartitionError(f"layers per stage {counts} name {len(counts)} stages, expected pp_size {pp_size}")
    if min(counts) < 1 or sum(counts) != num_layers:
        raise StagePartitionError(
            f"layers per stage {counts} must each be at least 1 and sum to the model's {num_layers}, not {sum(counts)}"
        )
    starts = [sum(counts[:stage]) for stage in range(pp_size)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
