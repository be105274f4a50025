"""How the grammar engines are made, here and in a compile process."""

from __future__ import annotations

from grammar_sync.engines.backend import GrammarBackend
from grammar_sync.engines.routing import POLICIES, RoutingBackend
from grammar_sync.vocabulary import GrammarVocabulary

MAKE_BACKEND = "grammar_sync.engines.factory:make_backend"
"""The name under which a compile process finds ``make_backend``."""


def make_backend(vocabulary: GrammarVocabulary, policy: str) -> GrammarBackend:
    """Returns the engines that ``policy`` allows, for one vocabulary.

    Raises:
        ValueError: There is no such policy.
    """
    if policy not in POLICIES:
        raise ValueError(f"grammar backend is {policy!r}, expected one of {', '.join(POLICIES)}")
    return RoutingBackend(vocabulary, policy)
