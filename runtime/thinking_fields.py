"""What a request may ask of thinking, and whether it thinks. Needs no torch: options are checked by a light process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from grammar_sync.thinking import ReasoningMarkers, ThinkingRules
from sampler.shown_value import shown

THINKING_FIELDS = ("enable_thinking", "thinking_budget", "strict_thinking")
"""The request fields about thinking."""

KNOWN_MARKERS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
)
"""The markers around thinking that models are known to write."""


class ThinkingError(ValueError):
    """A request or an option asks of thinking what cannot be.

    Args:
        param: The field at fault.
        message: What is wrong with it.
    """

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class ThinkingFields(NamedTuple):
    """What a request says of thinking; None where it says nothing."""

    enable: bool | None = None
    budget: int | None = None
    strict: bool = False

    @property
    def wants_thinking(self) -> bool:
        """Whether the request asks for thinking, outright or by how it is to be done."""
        return bool(self.wanted_by)

    @property
    def wanted_by(self) -> str:
        """The first field that asks for thinking; empty when none does."""
        asks = {
            "enable_thinking": self.enable,
            "thinking_budget": self.budget is not None,
            "strict_thinking": self.strict,
        }
        return next((name for name, is_given in asks.items() if is_given), "")


def parse_thinking(fields: Mapping[str, Any], max_model_len: int) -> ThinkingFields:
    """Returns what ``fields`` say of thinking; other fields are not looked at.

    Raises:
        ThinkingError: A field is malformed or out of its range, or they contradict each other.
    """
    enable, strict = (_flag(name, fields.get(name)) for name in ("enable_thinking", "strict_thinking"))
    budget = fields.get("thinking_budget")
    if budget is not None and (type(budget) is not int or not 0 <= budget <= max_model_len):
        raise ThinkingError(
            "thinking_budget", f"thinking_budget must be an integer from 0 to {max_model_len}, not {shown(budget)}"
        )
    if enable is False and (budget is not None or strict):
        name = "strict_thinking" if budget is None else "thinking_budget"
        raise ThinkingError(name, f"{name} is given, but enable_thinking is false")
    return ThinkingFields(enable, budget, bool(strict))


def _flag(name: str, value: object) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise ThinkingError(name, f"{name} must be true or false, not {shown(value)}")
    return value


def marker_pair(start: str | None, end: str | None) -> tuple[str, str] | None:
    """Returns the markers that options name, the start marker derived from the end marker where it is obvious.

    Raises:
        ThinkingError: Only the start marker is given, one is empty, or the start marker is not obvious.
    """
    if end is None:
        if start is not None:
            raise ThinkingError("--reasoning-start-marker", "--reasoning-start-marker needs --reasoning-marker too")
        return None
    known = {one: other for other, one in KNOWN_MARKERS}
    derived = known.get(end) or (end.replace("/", "", 1) if end[:2] in ("</", "[/") else None)
    if not end or start == "":
        raise ThinkingError("--reasoning-marker", "a reasoning marker must not be empty")
    if start is None and derived is None:
        raise ThinkingError("--reasoning-marker", f"--reasoning-marker {end!r} needs --reasoning-start-marker too")
    return start or str(derived), end


def is_open(text: str, markers: ReasoningMarkers) -> bool:
    """Returns whether ``text`` ends inside a think block."""
    return text.rfind(markers.start) > text.rfind(markers.end)


def rules_of(
    asked: ThinkingFields, markers: ReasoningMarkers | None, *, inside: bool, has_grammar: bool
) -> ThinkingRules | None:
    """Returns how a request thinks; None when it does not, or when nobody asks and it has no grammar.

    Args:
        asked: What it says of thinking.
        markers: The model's.
        inside: Whether its prompt ends inside a think block.
        has_grammar: Whether a grammar follows.

    Raises:
        ThinkingError: It asks for thinking, but the model has no markers.
    """
    if markers is None:
        if asked.wants_thinking:
            name = asked.wanted_by
            raise ThinkingError(name, f"{name}: no reasoning markers of this model are known: give --reasoning-marker")
        return None
    if asked.enable is False:
        # A template that opens a think block whatever it is told: the block is closed at once.
        return ThinkingRules(budget=0, before_grammar=has_grammar) if inside else None
    if not asked.wants_thinking and not (inside and has_grammar):
        return None
    return ThinkingRules(writes_start=not inside, budget=asked.budget, strict=asked.strict, before_grammar=has_grammar)
