"""What the leader needs of others: its socket, its clock, and word of grammars."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from grammar_sync.statistics import GrammarStatistics
from runtime.messages import ClientMessage, EngineMessage


class MessageSocket(Protocol):
    """What the leader needs of its socket."""

    def send(self, messages: list[EngineMessage]) -> None:
        """Sends messages in order, without waiting."""

    def receive(self, timeout_s: float, /) -> list[ClientMessage]:
        """Returns what came, after waiting up to ``timeout_s`` for it."""

    def wake(self) -> None:
        """Ends a ``receive`` that waits; any thread may call it."""


class GrammarWatch(Protocol):
    """What tells of the grammar of a sequence while the sequence is there."""

    def statistics(self, sequence_id: int) -> GrammarStatistics:
        """Returns what it cost so far."""

    def moved_s(self, sequence_id: int) -> float:
        """Returns when it, or one that it waits for, was last seen to get on; monotonic clock."""

    def is_compiled(self, sequence_id: int) -> bool:
        """Returns whether it is compiled on the leader's rank; the other ranks may not be so far."""


@dataclass(frozen=True)
class LeaderLimits:
    """The leader's clock.

    Args:
        beat_s: How long an idle leader waits at most before it sends an empty list.
        grammar_wait_s: How long it waits for other ranks' grammars when one is compiled on its own.
        grammar_beat_s: How long it waits when none is: it is woken when that changes.
        grammar_wait_limit_s: How long a grammar may wait in which neither it nor one that it waits for gets on.
    """

    beat_s: float
    grammar_wait_s: float
    grammar_beat_s: float
    grammar_wait_limit_s: float
