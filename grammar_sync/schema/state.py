"""What is known of a value while its schema is taken apart: for each JSON type, the constraints it must meet.

A state stands for a union over the types: a value belongs to it when the record of its own type takes it. Records only
ever get narrower. A type without a record is not allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal, TypeAlias

from grammar_sync.schema.document import Conjunction

JsonType: TypeAlias = Literal["null", "boolean", "number", "string", "array", "object"]
JSON_TYPES: tuple[JsonType, ...] = ("null", "boolean", "number", "string", "array", "object")


@dataclass(frozen=True)
class Bound:
    """An end of a range of numbers; ``is_open`` when the value itself is outside."""

    value: Fraction
    is_open: bool = False


@dataclass(frozen=True)
class Numbers:
    """Numbers within a range.

    Attributes:
        low: The lower end.
        high: The upper end.
        integral: True: integers only; False: none of them; None: both.
        multiples: Each must divide the number.
        not_multiples: None of them may divide it.
        excluded: Values that are not allowed.
    """

    low: Bound | None = None
    high: Bound | None = None
    integral: bool | None = None
    multiples: tuple[Fraction, ...] = ()
    not_multiples: tuple[Fraction, ...] = ()
    excluded: frozenset[Fraction] = frozenset()

    def above(self, value: Fraction, *, is_open: bool) -> Numbers:
        """Returns the numbers from ``value`` on."""
        old = self.low
        if old is not None and (old.value, old.is_open) >= (value, is_open):
            return self
        return replace(self, low=Bound(value, is_open))

    def below(self, value: Fraction, *, is_open: bool) -> Numbers:
        """Returns the numbers up to ``value``."""
        old = self.high
        if old is not None and (-old.value, old.is_open) >= (-value, is_open):
            return self
        return replace(self, high=Bound(value, is_open))

    def is_empty(self) -> bool:
        """Returns whether the range is surely empty."""
        if self.low is None or self.high is None:
            return False
        width = self.high.value - self.low.value
        if width < 0 or (width == 0 and (self.low.is_open or self.high.is_open)):
            return True
        if width == 0 and (self.low.value in self.excluded or self.integral is (self.low.value.denominator != 1)):
            return True
        if self.integral:
            first, last = integer_range(self.low, self.high)
            return first is not None and last is not None and first > last
        return False


def integer_range(low: Bound | None, high: Bound | None) -> tuple[int | None, int | None]:
    """Returns the least and the greatest integer of a range; None where it has no end."""
    first = last = None
    if low is not None:
        first = -(-low.value.numerator // low.value.denominator)
        first += low.is_open and first == low.value
    if high is not None:
        last = high.value.numerator // high.value.denominator
        last -= high.is_open and last == high.value
    return first, last


@dataclass(frozen=True)
class TextConstraint:
    """A string must (or, negative, must not) match a pattern or format."""

    kind: Literal["pattern", "format"]
    text: str
    positive: bool
    path: str

    def told(self) -> str:
        """Returns what it is, in words."""
        return f"{'' if self.positive else 'not '}{self.kind} {self.text!r}"


@dataclass(frozen=True)
class Strings:
    """Strings of a length, in code points, that meet constraints; ``excluded`` ones are not allowed."""

    min_length: int = 0
    max_length: int | None = None
    constraints: tuple[TextConstraint, ...] = ()
    excluded: frozenset[str] = frozenset()

    def is_empty(self) -> bool:
        """Returns whether the lengths leave no string."""
        return self.max_length is not None and self.min_length > self.max_length


@dataclass(frozen=True)
class ItemSet:
    """One schema's say on the items: those of ``prefix`` by position, all others by ``rest`` (None: not said)."""

    prefix: tuple[Conjunction, ...] = ()
    rest: Conjunction | None = None
    scopes: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Contains:
    """At least ``least`` and at most ``most`` items must satisfy ``items``; ``inverse`` is satisfied by all others."""

    items: Conjunction
    inverse: tuple[Conjunction, ...]
    least: int
    most: int | None
    path: str


@dataclass(frozen=True)
class Arrays:
    """Arrays of a length whose items satisfy all ``sets`` and ``contains``."""

    sets: tuple[ItemSet, ...] = ()
    contains: tuple[Contains, ...] = ()
    min_items: int = 0
    max_items: int | None = None
    unique_path: str | None = None

    def is_empty(self) -> bool:
        """Returns whether the lengths leave no array."""
        return self.max_items is not None and self.min_items > self.max_items

    def item(self, index: int) -> Conjunction:
        """Returns what the item at ``index`` must satisfy."""
        found: dict[Any, None] = {}
        for one in self.sets:
            if index < len(one.prefix):
                found.update(dict.fromkeys(one.prefix[index]))
            elif one.rest is not None:
                found.update(dict.fromkeys(one.rest))
        return tuple(found)

    @property
    def prefix_length(self) -> int:
        """From where on all items must satisfy the same."""
        return max((len(one.prefix) for one in self.sets), default=0)


@dataclass(frozen=True)
class PropertySet:
    """One schema's say on the properties.

    Attributes:
        properties: By name.
        patterns: By patterns that the name matches; these add to ``properties``.
        additional: All others (None: not said).
        scopes: The ``unevaluatedProperties`` that look at this set.
        path: Where the schema is.
    """

    properties: Mapping[str, Conjunction] = field(default_factory=dict)
    patterns: tuple[tuple[str, Conjunction], ...] = ()
    additional: Conjunction | None = None
    scopes: frozenset[str] = frozenset()
    path: str = ""


@dataclass(frozen=True)
class Objects:
    """Objects whose properties satisfy all ``sets``.

    Attributes:
        sets: What is said of values, by name.
        required: Names that must be there.
        forbidden: Names that must not.
        names: What every name must satisfy, as a string.
        failing: Sets under which at least one property, of those beside their ``properties``, must be invalid.
        min_properties: How many properties there are at least.
        max_properties: How many at most.
        bounds_path: Where the bounds on their number were said.
    """

    sets: tuple[PropertySet, ...] = ()
    required: tuple[str, ...] = ()
    forbidden: frozenset[str] = frozenset()
    names: Conjunction = ()
    failing: tuple[PropertySet, ...] = ()
    min_properties: int = 0
    max_properties: int | None = None
    bounds_path: str = ""

    def is_closed(self) -> bool:
        """Returns whether properties that are not declared are left out only because nothing is said of them."""
        return all(one.additional is None for one in self.sets) and any(one.properties for one in self.sets)

    def declares(self, name: str) -> bool:
        """Returns whether a property of that name is declared or required."""
        return name in self.required or any(name in one.properties for one in self.sets)

    def is_empty(self) -> bool:
        """Returns whether names or numbers contradict each other."""
        most = self.max_properties
        if most is not None and max(self.min_properties, len(self.required)) > most:
            return True
        return not self.forbidden.isdisjoint(self.required)


Record: TypeAlias = Numbers | Strings | Arrays | Objects


@dataclass(frozen=True)
class State:
    """A union over JSON types.

    Attributes:
        null: Whether null is allowed.
        booleans: Which of true and false are.
        number: Numbers that are.
        string: Strings that are.
        array: Arrays that are.
        object: Objects that are.
        values: When not None, only these values are, whatever the records say.
    """

    null: bool = True
    booleans: frozenset[bool] = frozenset({True, False})
    number: Numbers | None = Numbers()
    string: Strings | None = Strings()
    array: Arrays | None = Arrays()
    object: Objects | None = Objects()
    values: tuple[Any, ...] | None = None

    def only(self, *types: JsonType) -> State:
        """Returns the state without all other types."""
        return State(
            null=self.null and "null" in types,
            booleans=self.booleans if "boolean" in types else frozenset(),
            number=self.number if "number" in types else None,
            string=self.string if "string" in types else None,
            array=self.array if "array" in types else None,
            object=self.object if "object" in types else None,
            values=self.values,
        )

    def only_object(self) -> Objects | None:
        """Returns the objects when no other type is left."""
        others = (self.number, self.string, self.array)
        alone = not self.null and not self.booleans and all(record is None for record in others)
        return self.object if alone else None

    def pruned(self) -> State:
        """Returns the state without records that are empty."""
        return replace(
            self,
            number=None if self.number is None or self.number.is_empty() else self.number,
            string=None if self.string is None or self.string.is_empty() else self.string,
            array=None if self.array is None or self.array.is_empty() else self.array,
            object=None if self.object is None or self.object.is_empty() else self.object,
        )

    def is_empty(self) -> bool:
        """Returns whether no type is left, or no value."""
        records = (self.number, self.string, self.array, self.object)
        nothing = not self.null and not self.booleans and all(record is None for record in records)
        return nothing or self.values == ()
