"""Parts of an engine that fail, stall or are noisy on chosen ranks."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence as Many
from contextlib import AbstractContextManager
from dataclasses import dataclass
from unittest import mock

import torch

from grammar_sync.engines.backend import CompiledGrammar, Matcher, MatcherError
from grammar_sync.manager import GrammarManager
from runtime.batch import ForwardBatch
from runtime.kv_cache import KVCache
from runtime.model import DecoderStage


class FaultyStage(DecoderStage):
    """A stage that sleeps once, in a random forward pass, or whose logits are noisy."""

    noisy = False
    began = threading.Event()
    """Set once this step's forward pass has begun; the scheduler clears it when it plans the next."""

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        clean = super().logits(rows)
        return clean + 30 * torch.randn(clean.shape) if self.noisy else clean

    def stall_once(self, draw: random.Random, limit_s: float) -> None:
        self._stall_in = draw.randrange(6)
        self._stall_s = limit_s

    def forward(self, batch: ForwardBatch, hidden: torch.Tensor | None, cache: KVCache) -> torch.Tensor:
        if self._stall_in == 0:
            time.sleep(self._stall_s)
        self._stall_in -= 1
        self.began.set()
        return super().forward(batch, hidden, cache)


@dataclass(frozen=True)
class FillFault:
    """What befalls a grammar's matchers on one rank after so many tokens.

    ``hang``, ``fail``, ``overlap``, ``flip`` (a bit of the mask) as a mask is filled, ``refuse``, ``forget`` as a token
    is accepted.
    """

    source: str
    rank: int
    what: str
    after: int = 2


class FaultyMatcher:
    """A matcher with a fault."""

    def __init__(self, inner: Matcher, fault: FillFault) -> None:
        self._inner = inner
        self._fault = fault
        self._accepted = 0

    def accept(self, token_id: int) -> bool:
        self._accepted += 1
        if self._fault.what == "refuse" and self._accepted > self._fault.after:
            return False
        if self._fault.what == "forget" and self._accepted == self._fault.after + 1:
            return True
        return self._inner.accept(token_id)

    def fill(self, words: torch.Tensor) -> None:
        if self._accepted >= self._fault.after and self._fault.what == "fail":
            raise MatcherError("made to fail")
        if self._accepted >= self._fault.after and self._fault.what == "hang":
            threading.Event().wait()
        if self._fault.what == "overlap" and not FaultyStage.began.wait(20):
            raise MatcherError("the forward pass did not begin before its masks were filled")
        self._inner.fill(words)
        if self._fault.what == "flip" and self._accepted == self._fault.after:
            words[3] ^= 1 << (self._fault.after % 31)

    def is_terminated(self) -> bool:
        return self._inner.is_terminated()

    def rollback(self, count: int) -> None:
        self._inner.rollback(count)

    def copy(self) -> FaultyMatcher:
        return FaultyMatcher(self._inner.copy(), self._fault)

    def jump_forward(self) -> str:
        return self._inner.jump_forward()


class FaultyCompiled:
    """A compiled grammar whose matchers have a fault."""

    def __init__(self, inner: CompiledGrammar, fault: FillFault) -> None:
        self._inner = inner
        self._fault = fault

    @property
    def size_bytes(self) -> int:
        return self._inner.size_bytes

    def new_matcher(self) -> FaultyMatcher:
        return FaultyMatcher(self._inner.new_matcher(), self._fault)


def faulty_managers(faults: Many[FillFault]) -> AbstractContextManager[object]:
    """Has managers of this process start the sequences of some grammars with matchers that have a fault."""
    start = GrammarManager.start
    by_source = {fault.source: fault for fault in faults}

    def start_faulty(manager: GrammarManager, sequence_id: int) -> None:
        sequence = manager._sequence(sequence_id, "start")
        fault = None if sequence.spec is None else by_source.get(sequence.spec.source)
        if fault is not None and sequence.compiled is not None:
            sequence.compiled = FaultyCompiled(sequence.compiled, fault)
        start(manager, sequence_id)

    return mock.patch.object(GrammarManager, "start", start_faulty)
