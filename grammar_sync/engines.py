"""Which grammar engines there are, and how they are made."""

from __future__ import annotations

from typing import Literal

from grammar_sync.backend import GrammarBackend
from grammar_sync.vocabulary import GrammarVocabulary
from grammar_sync.xgrammar_backend import XGrammarBackend

EnginePolicy = Literal["auto", "xgrammar", "llguidance"]

MAKE_BACKEND = "grammar_sync.engines:make_backend"
"""The name under which a compile process finds ``make_backend``."""


def make_backend(vocabulary: GrammarVocabulary, policy: str) -> GrammarBackend:  # noqa: ARG001 - one engine so far
    """Returns the engines that ``policy`` allows, for one vocabulary."""
    return XGrammarBackend(vocabulary)
