"""The engines of a compile process: made by itself, or there already when it was forked."""

from __future__ import annotations

import gc
import importlib
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from grammar_sync.engines.backend import GrammarBackend
from grammar_sync.engines.factory import MAKE_BACKEND
from grammar_sync.engines.prepared import CompileError
from grammar_sync.spec import GrammarSpec
from grammar_sync.vetting.messages import Setup
from grammar_sync.vocabulary import GrammarVocabulary

_WARM_UP: Final = (
    GrammarSpec("json_schema", '{"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"string"}}}'),
    GrammarSpec("regex", "[a-z]+"),
)


@dataclass(frozen=True)
class WarmBackend:
    """Engines that a compile process was born with.

    Args:
        backend: The engines from ``make_backend``, warmed up.
        vocabulary: What they were made for.
        policy: Which they are.
    """

    backend: GrammarBackend
    vocabulary: GrammarVocabulary
    policy: str

    def fits(self, setup: Setup) -> bool:
        """Returns whether these are the engines that ``setup`` asks for."""
        return (setup.backend, self.policy, self.vocabulary) == (MAKE_BACKEND, setup.policy, setup.vocabulary)


def own_backend(setup: Setup) -> GrammarBackend:
    """Returns the engines that ``setup`` asks for, made here; whoever is forked from now on copies little of them."""
    module, _, name = setup.backend.partition(":")
    backend: GrammarBackend = getattr(importlib.import_module(module), name)(setup.vocabulary, setup.policy)
    warm_up(backend)
    # What the collector never looks at is never copied in a worker.
    gc.collect()
    gc.freeze()
    return backend


def warm_up(backend: GrammarBackend) -> None:
    """Has the engines make what they make at first use: it would else be made in every worker, and lost with it."""
    for spec in _WARM_UP:
        with suppress(CompileError):
            for prepared in backend.prepare(spec):
                backend.compile(prepared)
