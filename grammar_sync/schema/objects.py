"""Object types as rules: declared properties in their order, others between them, and how many there are.

Names that are not declared may come again and again, as in any JSON text; a reader keeps the last one. They are valid
one by one, so that this does no harm, but only the first of them counts towards ``minProperties``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Final, NamedTuple

from grammar_sync.regular.automaton import of_words
from grammar_sync.regular.language import Language, strings
from grammar_sync.schema.document import Conjunction, conjoin
from grammar_sync.schema.layout import Layout, text_spellings
from grammar_sync.schema.productions import (
    EMPTY,
    NOTHING,
    Call,
    Expression,
    options,
    repeated,
    sequence,
)
from grammar_sync.schema.state import Objects
from grammar_sync.schema.strings import pattern_language

MAX_OVERLAPPING_PATTERNS: Final = 4
"""Bound on the patterns of one object whose names may overlap: each combination is a rule of its own."""

MAX_COUNTED_STATES: Final = 4096
"""Bound on properties × counts of an object whose number of properties is bounded."""


_CHAIN_LENGTH: Final = 16
"""How many required properties may be written into one rule: longer ones take quadratic time to build."""


@dataclass(frozen=True)
class Property:
    """A declared property."""

    name: str
    value: Conjunction
    is_required: bool


@dataclass(frozen=True)
class Names:
    """Names that are not declared.

    Attributes:
        taken: Names that are not among them.
        patterns: The patterns of the object type.
        matched: Which of the patterns the names match; they match none of the others.
        names: What each must satisfy.
    """

    taken: tuple[str, ...]
    patterns: tuple[str, ...]
    matched: frozenset[str]
    names: Conjunction


@dataclass(frozen=True)
class Region:
    """Names that are not declared, and what their values must satisfy."""

    names: Names
    value: Conjunction


def declared(record: Objects, child: Callable[[str], Conjunction], allowed: Callable[[str], bool]) -> list[Property]:
    """Returns the properties that have a name, in the order in which they are declared.

    Args:
        record: The object type.
        child: What a property of a name must satisfy.
        allowed: Whether ``propertyNames`` allow a name.
    """
    names: dict[str, None] = {}
    for one in record.sets:
        names.update(dict.fromkeys(one.properties))
    names.update(dict.fromkeys(record.required))
    return [
        Property(name, child(name), name in record.required)
        for name in names
        if name not in record.forbidden and allowed(name)
    ]


def regions(record: Objects, known: list[Property]) -> list[Region]:
    """Returns the names that are not declared, by the patterns that they match; some may be empty.

    Args:
        record: The object type.
        known: Its declared properties.
    """
    patterns = tuple(dict.fromkeys(pattern for one in record.sets for pattern, _ in one.patterns))
    taken = tuple(dict.fromkeys([one.name for one in known] + sorted(record.forbidden)))
    found: list[Region] = []
    for size in range(len(patterns) + 1):
        for matched in combinations(patterns, size):
            if not matched and record.is_closed():
                continue
            parts: list[Conjunction] = []
            for one in record.sets:
                own = [part for pattern, part in one.patterns if pattern in matched]
                if not own and one.additional is not None:
                    own = [one.additional]
                parts.extend(own)
            value = conjoin(*parts)
            if not any(schema.value is (not positive) for schema, positive in value):
                found.append(Region(Names(taken, patterns, frozenset(matched), record.names), value))
    return found


def names_language(names: Names, allowed: Language | None) -> Language:
    """Returns the names of a region.

    Args:
        names: The region's.
        allowed: What ``propertyNames`` allow; None for any name.

    Raises:
        RegularError: The names are no regular language, or one that is too large.
    """
    parts = [pattern_language(pattern, positive=pattern in names.matched) for pattern in names.patterns]
    found = parts[0].intersect(*parts[1:]) if parts else strings()
    found = found if allowed is None else found.intersect(allowed)
    return found.minus(Language(of_words(names.taken))) if names.taken else found


class Counts(NamedTuple):
    """How many properties there were: in all, different ones, and whether one was undeclared."""

    total: int = 0
    different: int = 0
    has_extra: bool = False


class Members:
    """Builds the rules of one object type.

    Args:
        layout: The separators.
        add_rule: Adds a rule under a name that begins as given, and returns the call of it.
        known: The declared properties, in order, with the expressions of their values.
        extras: The expressions of one undeclared name, a colon and its value.
        record: For the bounds on the number of properties.
    """

    def __init__(
        self,
        layout: Layout,
        add_rule: Callable[[Callable[[], Expression]], Call],
        known: list[tuple[Property, Expression]],
        extras: list[Expression],
        record: Objects,
    ) -> None:
        self._layout = layout
        self._add_rule = add_rule
        self._known = [
            (sequence(text_spellings(one.name), layout.colon, value), one.is_required) for one, value in known
        ]
        self._extra = options(*extras) if extras else None
        required = sum(is_required for _, is_required in self._known)
        self._least = record.min_properties if record.min_properties > required else 0
        most = record.max_properties
        self._most = most if most is not None and (extras or most < len(known)) else None
        self._must_after = [False] * (len(self._known) + 1)
        for index in range(len(self._known) - 1, -1, -1):
            self._must_after[index] = self._known[index][1] or self._must_after[index + 1]
        self._calls: dict[tuple[str, int, Counts], Call] = {}

    def body(self) -> Expression:
        """Returns what the object type allows, its braces included."""
        if self._least == 0 and self._most is None:
            first, empty = self._plain()
        else:
            first, empty = self._first(0, Counts()), not self._must_after[0] and self._least == 0
        full = NOTHING if first == NOTHING else self._layout.between("{", first, "}")
        return options(full, self._layout.between("{", None, "}")) if empty else full

    def reachable_least(self) -> int:
        """Returns the greatest number of different properties that can be counted."""
        return len(self._known) + (self._extra is not None)

    def state_count(self) -> int:
        """Returns how many rules there may be."""
        counts = (1 if self._most is None else self._most + 1) * (self._least + 1)
        return (len(self._known) + 1) * counts

    def _plain(self) -> tuple[Expression, bool]:
        """Returns the members of an object type without bounds on their number, and whether there may be none.

        Built from the last property to the first; ``after`` is what may follow a property, with its comma.
        """
        comma = self._layout.comma
        others = EMPTY if self._extra is None else repeated(sequence(comma, self._extra), 0, None)
        after: Expression = others
        next_one: Expression = NOTHING
        first: Expression = NOTHING
        for index in range(len(self._known) - 1, -1, -1):
            item, is_required = self._known[index]
            taken = sequence(item, after)
            first = taken if is_required else options(taken, first)
            step = sequence(comma, taken)
            next_one = step if is_required else self._shared(options(step, next_one))
            follows = next_one if self._must_after[index] else options(next_one, EMPTY)
            after = sequence(others, follows)
            if not is_required or self._extra is not None or index % _CHAIN_LENGTH == 0:
                after = self._shared(after)
            if index and not is_required:
                first = self._shared(first)
        if self._extra is not None:
            first = options(sequence(self._extra, after), first)
        return first, not self._must_after[0]

    def _shared(self, expression: Expression) -> Expression:
        return expression if isinstance(expression, Call) else self._add_rule(lambda: expression)

    def _call(self, kind: str, index: int, counts: Counts) -> Call:
        key = kind, index, counts
        if key not in self._calls:
            build = {"after": self._after, "next": self._next, "first": self._first}[kind]
            # Noted before it is built: rules of extra properties call themselves.
            self._calls[key] = self._add_rule(lambda: build(index, counts))
        return self._calls[key]

    def _counted(self, counts: Counts, *, extra: bool) -> Counts | None:
        """Returns the counts after one more property, or None where there may be no more."""
        if self._most is not None and counts.total >= self._most:
            return None
        different = counts.different + (not (extra and counts.has_extra))
        return Counts(
            counts.total + 1 if self._most is not None else 0,
            min(different, self._least),
            (counts.has_extra or extra) if self._least else False,
        )

    def _after(self, index: int, counts: Counts) -> Expression:
        """Returns what may follow a property: undeclared ones, or a declared one from ``index`` on, or the end."""
        found: list[Expression] = [self._call("next", index, counts)] if index < len(self._known) else []
        more = self._counted(counts, extra=True)
        if self._extra is not None and more is not None:
            found.append(sequence(self._layout.comma, self._extra, self._call("after", index, more)))
        if not self._must_after[index] and counts.different >= self._least:
            found.append(EMPTY)
        return options(*found)

    def _next(self, index: int, counts: Counts) -> Expression:
        """Returns a comma and a declared property from ``index`` on, and what may follow it."""
        return self._chosen(index, counts, "next", self._layout.comma)

    def _first(self, index: int, counts: Counts) -> Expression:
        """Returns the first property, and what may follow it."""
        found = [self._chosen(index, counts, "first", EMPTY)] if index < len(self._known) else []
        more = self._counted(counts, extra=True)
        if index == 0 and self._extra is not None and more is not None:
            found.append(sequence(self._extra, self._call("after", 0, more)))
        return options(*found)

    def _chosen(self, index: int, counts: Counts, kind: str, comma: Expression) -> Expression:
        item, is_required = self._known[index]
        found: list[Expression] = []
        more = self._counted(counts, extra=False)
        if more is not None:
            found.append(sequence(comma, item, self._call("after", index + 1, more)))
        if not is_required and index + 1 < len(self._known):
            found.append(self._call(kind, index + 1, counts))
        return options(*found)
