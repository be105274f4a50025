"""A model that thinks, in the small vocabulary."""

from __future__ import annotations

from functools import cache

from grammars import END, START, THINK, encode, small_tokenizer, small_vocabulary

from grammar_sync.reasoning import ReasoningVocabulary
from grammar_sync.thinking import ReasoningMarkers
from runtime.tokenizer import Tokenizer
from runtime.tokenizer_parts import TokenizerParts

ADDED = (END, START, THINK)
TEXT_END = "</think>"
# A marker whose beginning comes again within it, so that a match that fails may have begun another.
TRICKY_END = "ababac"


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(TokenizerParts(small_tokenizer(), [END], {}, {}))


def piece(token_id: int) -> bytes:
    return tokenizer().piece(token_id, token_id)


@cache
def reasoning(end: str = TEXT_END) -> ReasoningVocabulary:
    """Returns a model that thinks until ``end``; ``<|start|>`` is one added token."""
    is_token = end == "<|start|>"
    end_ids = (START,) if is_token else tuple(encode(end))
    markers = ReasoningMarkers("<think>", end, (THINK,), end_ids, is_token)
    return ReasoningVocabulary(small_vocabulary(), markers, ADDED, piece)
