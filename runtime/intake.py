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
from runtime.plan import DesyncError
from tp.group import TensorParallelGroup


class Patience(Enum):
    """How long the leader may wait for a client before the next step."""

    NONE = auto()
    """Sequences run: do not wait."""
    BRIEF = auto()
    """Only grammars are being compiled: look again when the leader's rank or, soon after, another has one."""
    LONG = auto()
    """Nothing runs: wait, but no longer than a third of the group time-out: the others wait inside a collective."""


class ActionSource(Protocol):
    """Where the leader's actions come from."""

    def collect(self, patience: Patience) -> list[Action]:
        """Returns the next actions in order, perhaps none, after waiting for them as ``patience`` allows."""


class IntakeFrame(msgspec.Struct, frozen=True):
    """What the leader sends in each step.

    Args:
        digest: Of all the leader planned and committed so far; every rank compares its own.
        actions: What to do.
    """

    digest: int
    actions: list[Action]


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
        self._decoder = msgspec.msgpack.Decoder(IntakeFrame)

    def exchange(self, patience: Patience, digest: int) -> list[Action]:
        """Returns this step's actions; every rank calls it once a step.

        Args:
            patience: How long the leader may wait for its client.
            digest: Of all this rank planned and committed so far.

        Raises:
            DesyncError: The leader planned or committed something else.
        """
        link = self._link
        if link.is_first:
            frame = self._group.broadcast_frame(self._own_frame(patience, digest))
        else:
            frame = link.receive_frame(link.stage - 1, Tag.INTAKE)
        if not link.is_last:
            link.send_frame(frame, link.stage + 1, Tag.INTAKE)
        received = self._decoder.decode(frame)
        if received.digest != digest:
            raise DesyncError(
                f"intake at stage {link.stage} rank {self._group.rank}, step {link.step}: the leader's digest of all "
                f"before this step is {received.digest}, this rank's is {digest}",
                rank=self._group.global_rank,
                step=link.step,
                own=digest,
                other=received.digest,
            )
        return received.actions

    def _own_frame(self, patience: Patience, digest: int) -> bytes | None:
        if self._source is None:
            return None
        return msgspec.msgpack.encode(IntakeFrame(digest, self._source.collect(patience)))
