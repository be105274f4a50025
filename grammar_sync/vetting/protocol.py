"""What the rest of a rank knows of vetting: who asks, what the answers are, what is counted."""

from __future__ import annotations

from typing import Protocol

import msgspec

from grammar_sync.spec import GrammarSpec
from grammar_sync.vetting.messages import VettingOutcome


class VettingReport(msgspec.Struct, frozen=True):
    """What is known of a grammar that was vetted.

    Attributes:
        outcome: What came of it.
        queue_s: Seconds it waited for a worker.
        vet_s: Seconds the worker took.
    """

    outcome: VettingOutcome
    queue_s: float = 0.0
    vet_s: float = 0.0


class VettingCounters(msgspec.Struct):
    """What a stage's vetting did since it started.

    Attributes:
        asked: Grammars that requests asked for.
        cache_hits: How many of these had an outcome in memory.
        stored_hits: How many outcomes came from the folder of outcomes.
        vetted: Grammars that the compile process found good.
        refused: Grammars that it refused, by reason.
        dropped: Grammars that nobody wanted any more before there was an outcome.
        restarts: Compile processes started after the first.
        compile_s: Seconds of CPU of the compiles that passed.
        queue_s: Seconds that grammars waited for a worker.
        vet_s: Seconds that workers took.
    """

    asked: int = 0
    cache_hits: int = 0
    stored_hits: int = 0
    vetted: int = 0
    refused: dict[str, int] = {}
    dropped: int = 0
    restarts: int = 0
    compile_s: float = 0.0
    queue_s: float = 0.0
    vet_s: float = 0.0


class GrammarVetter(Protocol):
    """Finds out beside the step loop which grammars are safe to compile; no method waits for that.

    ``submit`` and ``discard`` come in pairs, one for each request that wants the grammar.
    """

    @property
    def heard_s(self) -> float:
        """When it was last known to get on with what it was asked for; monotonic clock."""

    def submit(self, spec: GrammarSpec) -> None:
        """Makes sure that ``spec`` is vetted, or under way."""

    def poll(self, spec: GrammarSpec) -> VettingReport | None:
        """Returns what came of a grammar that was submitted and not yet discarded; None while it is under way."""

    def discard(self, spec: GrammarSpec) -> None:
        """Says that one request less wants the grammar; one that nobody wants is vetted no further."""

    def close(self) -> None:
        """Drops everything and ends the compile process."""


class OutcomeStore(Protocol):
    """Keeps outcomes from run to run; called in one thread, beside the step loop."""

    def load(self, spec: GrammarSpec) -> VettingOutcome | None:
        """Returns the outcome kept for a grammar, or None."""

    def save(self, spec: GrammarSpec, outcome: VettingOutcome) -> None:
        """Keeps an outcome."""
