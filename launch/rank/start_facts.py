"""What the first stage tells the later ones before the first step."""

from __future__ import annotations

import msgspec

from launch.cli.parse import UsageError
from launch.rank.groups import RankGroups
from launch.rank.preparation import FirstStageParts
from pp.link import Tag


class StartFacts(msgspec.Struct, frozen=True):
    """What the leader alone can know before the first step, since later stages hold no tokenizer.

    Args:
        eos_token_ids: What ends an output: the union of tokenizer, generation and model configuration.
    """

    eos_token_ids: tuple[int, ...]


def share_facts(groups: RankGroups, parts: FirstStageParts | None) -> StartFacts:
    """Returns the first stage's facts on every rank; every rank calls it once, before the first step.

    Raises:
        UsageError: This rank's model files are not those of rank 0.
    """
    group, link = groups.tensor_parallel, groups.link
    own = None if parts is None else StartFacts(parts.eos_token_ids)
    if own is not None:
        frame = group.broadcast_frame(msgspec.msgpack.encode(own) if group.rank == 0 else None)
    else:
        frame = link.receive_frame(link.stage - 1, Tag.INTAKE)
    if not link.is_last:
        link.send_frame(frame, link.stage + 1, Tag.INTAKE)
    facts = msgspec.msgpack.decode(frame, type=StartFacts)
    if own is not None and own != facts:
        raise UsageError(
            f"outputs end at ids {list(own.eos_token_ids)} here and at {list(facts.eos_token_ids)} on the first rank: "
            "their model files differ"
        )
    return facts
