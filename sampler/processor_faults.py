"""Why a logit processor failed on a row: agreed over the ranks, so that whoever ends the row can say so."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from sampler.group import SliceGroup

_TOLD_CHARACTERS = 200
_TEXT_BYTES = 512


@dataclass(frozen=True)
class ProcessorFault:
    """What a rank knows of a processor's failure on a row.

    Args:
        why: One line that names the processor.
        is_own: Whether it failed on this rank, rather than on another that this rank waited for.
    """

    why: str
    is_own: bool


def told(error: Exception | SystemExit, *, with_class: bool = True) -> str:
    """Returns an exception of a processor as one short line, even where its own text cannot be had."""
    text = " ".join(str(traceback.TracebackException.from_exception(error, limit=0)).split())
    line = f"{type(error).__name__}: {text}".rstrip(": ") if with_class or not text else text
    return line if len(line) <= _TOLD_CHARACTERS else f"{line[: _TOLD_CHARACTERS - 3]}..."


def agree_on_faults(
    group: SliceGroup, rows: Sequence[int], known: Mapping[int, ProcessorFault], device: torch.device
) -> dict[int, tuple[int, str]]:
    """Returns for each row the lowest rank whose own processor failed, and its words: the same on every rank.

    Every rank of the group calls it, in a step in which a processor failed; in others nothing is exchanged.

    Args:
        group: The ranks.
        rows: The rows in which a processor failed on some rank, the same on all.
        known: What this rank knows of them.
        device: Where the group exchanges tensors.
    """
    table = torch.zeros((len(rows), 1 + _TEXT_BYTES), dtype=torch.uint8)
    for place, row in enumerate(rows):
        if row in known:
            text = known[row].why.encode(errors="replace")[:_TEXT_BYTES]
            table[place, 0] = 2 if known[row].is_own else 1
            table[place, 1 : 1 + len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    gathered = group.all_gather(table.to(device)).cpu()
    agreed = {}
    for place, row in enumerate(rows):
        weights = gathered[:, place, 0].tolist()
        rank = weights.index(max(weights))
        text = bytes(gathered[rank, place, 1:].tolist()).rstrip(b"\0")
        agreed[row] = rank, text.decode(errors="ignore")
    return agreed
