"""The markers around a model's thinking, found in its files."""

from __future__ import annotations

from grammar_sync.reasoning import ReasoningVocabulary
from grammar_sync.thinking import ReasoningMarkers
from grammar_sync.vocabulary import GrammarVocabulary
from runtime.thinking_fields import KNOWN_MARKERS
from runtime.tokenizer import Tokenizer


def find_markers(tokenizer: Tokenizer, named: tuple[str, str] | None = None) -> ReasoningMarkers | None:
    """Returns the markers around a model's thinking, None when it has none.

    Without ``named`` they are found where a known pair are tokens of their own, or both stand in the chat template.
    """
    pair = named
    if pair is None:
        added = tokenizer.added_tokens
        pairs = (
            pair
            for pair in KNOWN_MARKERS
            if all(marker in added for marker in pair) or all(tokenizer.template_mentions(marker) for marker in pair)
        )
        pair = next(pairs, None)
    if pair is None:
        return None
    start, end = pair
    start_ids, end_ids = (tuple(tokenizer.encode(marker, add_special_tokens=False)) for marker in pair)
    return ReasoningMarkers(start, end, start_ids, end_ids, tokenizer.added_tokens.get(end) == end_ids[0])


def reasoning_of(
    tokenizer: Tokenizer, vocabulary: GrammarVocabulary, named: tuple[str, str] | None = None
) -> ReasoningVocabulary | None:
    """Returns what thinking needs to know of a model, None when it has no markers.

    Raises:
        VocabularyError: The tokenizer cannot write the end marker.
    """
    markers = find_markers(tokenizer, named)
    if markers is None:
        return None
    added = tokenizer.added_tokens.values()
    return ReasoningVocabulary(vocabulary, markers, added, lambda token_id: tokenizer.piece(token_id, token_id))
