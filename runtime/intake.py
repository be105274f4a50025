"""Intake: how every rank learns, in the same step, what the leader wants done.

The leader's actions go to its tensor-parallel group by a broadcast, then down the stages link by link. Each rank of a
stage sends to its own successor only, so that no rank waits for more than one message.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Protocol

import msgspec

from pp.link import StageLink, Tag
from runtime.messages import Action
from tp.group import TensorParallelGroup


class Patience(Enum):
    """How long the leader may wait for a client before the next step."""

    NONE = auto()
    """Sequences run: do not wait."""
    BRIEF = auto()
    """Only grammars are being compiled: look again soon."""
    LONG = auto()
    """Nothing runs: wait, but no longer than a third of the group time-out: the others wait inside a collective."""


class ActionSource(Protocol):
    """Where the leader's actions come from."""

    def collect(self, patience: Patience) -> list[Action]:
        """Returns the next actions in order, perhaps none, after waiting for them as ``patience`` allows."""


class Intake:
    """One rank's end of the intake.

    Args:
        group: This rank's stage.
        link: This rank's pipeline.
        source: The actions; given to the leader, None elsewhere.
    """

    def __init__(self, group: TensorParallelGroup, link: StageLink, source: ActionSource | None) -> None:
        self._group = group
        self._link = link
        self._source = source
        self._decoder = msgspec.msgpack.Decoder(list[Action])

    def exchange(self, patience: Patience) -> list[Action]:
        """Returns this step's actions; every rank calls it once a step."""
        link = self._link
        if link.is_first:
            frame = self._group.broadcast_frame(self._own_frame(patience))
        else:
            frame = link.receive_frame(link.stage - 1, Tag.INTAKE)
        if not link.is_last:
            link.send_frame(frame, link.stage + 1, Tag.INTAKE)
        return self._decoder.decode(frame)

    def _own_frame(self, patience: Patience) -> bytes | None:
        if self._source is None:
            return None
        return msgspec.msgpack.encode(self._source.collect(patience))
