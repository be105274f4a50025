"""What is left to do while a schema is taken apart: schemas to look at, updates of the state, and alternatives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from grammar_sync.schema.document import Conjunction, Schema
from grammar_sync.schema.state import (
    JSON_TYPES,
    Arrays,
    Contains,
    ItemSet,
    JsonType,
    Numbers,
    Objects,
    PropertySet,
    State,
    Strings,
)

Scopes: TypeAlias = frozenset[str]


@dataclass(frozen=True)
class Check:
    """A schema under which the value must be valid, or invalid.

    Attributes:
        schema: The schema.
        positive: Valid, rather than invalid.
        via: The schemas that led here without taking a step into the value.
        scopes: The ``unevaluated…`` keywords that count what this schema evaluates.
    """

    schema: Schema
    positive: bool
    via: frozenset[Schema] = frozenset()
    scopes: Scopes = frozenset()


@dataclass(frozen=True)
class Update:
    """A step that narrows the state."""

    apply: Callable[[State], State]


@dataclass(frozen=True)
class Choice:
    """Alternatives, of which one or more must hold; each is a list of goals that must hold together.

    Attributes:
        alternatives: The alternatives.
        path: Which schema they come from.
        missing: Names of properties of which each, when it is missing from an object, is an alternative too.
    """

    alternatives: tuple[tuple[Goal, ...], ...]
    path: str
    missing: tuple[str, ...] = ()


Goal: TypeAlias = Check | Update | Choice
Goals: TypeAlias = tuple[Goal, ...]


def only(*types: JsonType) -> Update:
    """Returns the step that leaves these types alone."""
    return Update(lambda state: state.only(*types))


def other_than(*types: JsonType) -> Update:
    """Returns the step that leaves all other types."""
    return only(*(name for name in JSON_TYPES if name not in types))


def numbers(step: Callable[[Numbers], Numbers]) -> Update:
    """Returns the step that narrows numbers."""
    return Update(lambda state: replace(state, number=None if state.number is None else step(state.number)))


def strings(step: Callable[[Strings], Strings]) -> Update:
    """Returns the step that narrows strings."""
    return Update(lambda state: replace(state, string=None if state.string is None else step(state.string)))


def arrays(step: Callable[[Arrays], Arrays]) -> Update:
    """Returns the step that narrows arrays."""
    return Update(lambda state: replace(state, array=None if state.array is None else step(state.array)))


def objects(step: Callable[[Objects], Objects]) -> Update:
    """Returns the step that narrows objects."""
    return Update(lambda state: replace(state, object=None if state.object is None else step(state.object)))


def at_least_items(count: int) -> Update:
    """Returns the step to arrays of so many items or more."""
    return arrays(lambda old: replace(old, min_items=max(old.min_items, count)))


def at_most_items(count: int) -> Update:
    """Returns the step to arrays of so many items or fewer."""
    return arrays(lambda old: replace(old, max_items=_least(old.max_items, count)))


def at_least_characters(count: int) -> Update:
    """Returns the step to strings of so many characters or more."""
    return strings(lambda old: replace(old, min_length=max(old.min_length, count)))


def at_most_characters(count: int) -> Update:
    """Returns the step to strings of so many characters or fewer."""
    return strings(lambda old: replace(old, max_length=_least(old.max_length, count)))


def at_least_properties(count: int, path: str) -> Update:
    """Returns the step to objects of so many properties or more."""
    return objects(lambda old: replace(old, min_properties=max(old.min_properties, count), bounds_path=path))


def at_most_properties(count: int, path: str) -> Update:
    """Returns the step to objects of so many properties or fewer."""
    return objects(lambda old: replace(old, max_properties=_least(old.max_properties, count), bounds_path=path))


def with_items(items: ItemSet) -> Update:
    """Returns the step that adds a schema's say on items."""
    return arrays(lambda old: replace(old, sets=(*old.sets, items)))


def with_contains(contains: Contains) -> Update:
    """Returns the step that adds a count of items."""
    return arrays(lambda old: replace(old, contains=(*old.contains, contains)))


def with_properties(properties: PropertySet) -> Update:
    """Returns the step that adds a schema's say on properties."""
    return objects(lambda old: replace(old, sets=(*old.sets, properties)))


def with_names(names: Conjunction) -> Update:
    """Returns the step that adds what every name must satisfy."""
    return objects(lambda old: replace(old, names=tuple(dict.fromkeys((*old.names, *names)))))


def requiring(names: Iterable[str]) -> Update:
    """Returns the step to objects that have these properties."""
    given = tuple(names)
    return objects(lambda old: replace(old, required=tuple(dict.fromkeys((*old.required, *given)))))


def forbidding(*names: str) -> Update:
    """Returns the step to objects that have none of these properties."""
    return objects(lambda old: replace(old, forbidden=old.forbidden.union(names)))


def among(values: Iterable[Any]) -> Update:
    """Returns the step that leaves these values alone."""
    given = tuple(values)

    def step(state: State) -> State:
        if state.values is None:
            return replace(state, values=given)
        known = {value_key(value) for value in given}
        return replace(state, values=tuple(value for value in state.values if value_key(value) in known))

    return Update(step)


def value_key(value: Any) -> Any:
    """Returns what is equal for values that JSON Schema calls equal: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, dict):
        return "object", frozenset((name, value_key(item)) for name, item in value.items())
    if isinstance(value, list):
        return "array", tuple(map(value_key, value))
    return ("boolean" if isinstance(value, bool) else "scalar"), value


def _least(old: int | None, new: int) -> int:
    return new if old is None else min(old, new)
