"""What is said of thinking between processes: a request's rules, a model's markers. Needs no torch."""

from __future__ import annotations

import msgspec


class ThinkingRules(msgspec.Struct, frozen=True):
    """How one request thinks.

    Attributes:
        writes_start: Whether the output begins with the start marker; else the prompt ends inside a think block.
        budget: Tokens of thinking at most, markers not counted; None = no bound.
        strict: Whether added tokens (end of turn, tool calls, the start marker) are banned while it thinks.
        before_grammar: Whether a grammar follows: an output then cannot end while it thinks.
    """

    writes_start: bool = False
    budget: int | None = None
    strict: bool = False
    before_grammar: bool = False


class ReasoningMarkers(msgspec.Struct, frozen=True):
    """The markers around a model's thinking.

    Attributes:
        start: Text of the start marker.
        end: Text of the end marker.
        start_ids: The tokens of the start marker as the model writes it.
        end_ids: The tokens of the end marker as the model writes it.
        end_is_token: Whether the end marker is one added token, which no other tokens spell.
    """

    start: str
    end: str
    start_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    end_is_token: bool
