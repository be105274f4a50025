"""Array types as rules: items by position, how many there are, counted items, and items that differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from grammar_sync.schema.document import Conjunction, conjoin
from grammar_sync.schema.layout import Layout
from grammar_sync.schema.productions import EMPTY, NOTHING, Call, Expression, optional, options, repeated, sequence
from grammar_sync.schema.state import Arrays, Contains

MAX_DIFFERENT_ITEMS: Final = 7
"""Bound on the values of items that must differ: there is a rule for each set of values that were used."""

MAX_COUNTED_STATES: Final = 4096
"""Bound on items × matches of an array whose items are counted."""

AddRule = Callable[[Callable[[], Expression]], Call]


def listed(record: Arrays, layout: Layout, value: Callable[[Conjunction], Expression]) -> Expression:
    """Returns the items of an array type without counted or different ones, brackets included."""
    length = record.prefix_length if record.max_items is None else min(record.prefix_length, record.max_items)
    least, most = record.min_items, record.max_items
    rest = value(record.item(record.prefix_length))
    if length == 0:
        if most == 0:
            return layout.between("[", None, "]")
        more = None if most is None else most - 1
        inner = sequence(rest, repeated(sequence(layout.comma, rest), max(least - 1, 0), more))
        return _in_brackets(layout, inner, may_be_empty=least == 0)
    more = None if most is None else most - length
    tail = repeated(sequence(layout.comma, rest), max(least - length, 0), more)
    for index in range(length - 1, -1, -1):
        item = value(record.item(index))
        if index == 0:
            return _in_brackets(layout, sequence(item, tail), may_be_empty=least == 0)
        tail = sequence(layout.comma, item, tail)
        tail = tail if index < least else optional(tail)
    return NOTHING


def _in_brackets(layout: Layout, inner: Expression, *, may_be_empty: bool) -> Expression:
    full = NOTHING if inner == NOTHING else layout.between("[", inner, "]")
    return options(full, layout.between("[", None, "]")) if may_be_empty else full


def different(values: list[Expression], record: Arrays, layout: Layout, add_rule: AddRule) -> Expression:
    """Returns arrays of different ones of ``values``, in any order, brackets included."""
    calls: dict[int, Call] = {}
    everything = (1 << len(values)) - 1

    def after(used: int) -> Expression:
        if used not in calls:
            calls[used] = add_rule(lambda: _rest(used))
        return calls[used]

    def _rest(used: int) -> Expression:
        count = used.bit_count()
        found: list[Expression] = [EMPTY] if count >= record.min_items else []
        if record.max_items is None or count < record.max_items:
            found.extend(
                sequence(layout.comma if count else EMPTY, one, after(used | 1 << index))
                for index, one in enumerate(values)
                if not used >> index & 1
            )
        return options(*found)

    if record.min_items > len(values) or (record.min_items and not everything):
        return NOTHING
    firsts = [sequence(one, after(1 << index)) for index, one in enumerate(values)]
    inner = NOTHING if record.max_items == 0 else options(*firsts)
    return _in_brackets(layout, inner, may_be_empty=record.min_items == 0)


class Counted:
    """Builds the rules of arrays of which some items are counted.

    Args:
        record: The array type.
        contains: Which items count, and how many of them there must be.
        layout: The separators.
        value: Returns the expression of a conjunction.
        add_rule: Adds a rule that is built later.
    """

    def __init__(
        self,
        record: Arrays,
        contains: Contains,
        layout: Layout,
        value: Callable[[Conjunction], Expression],
        add_rule: AddRule,
    ) -> None:
        self._record = record
        self._contains = contains
        self._layout = layout
        self._value = value
        self._add_rule = add_rule
        self._last = max(record.prefix_length, record.min_items, record.max_items or 0)
        self._enough = contains.least if contains.most is None else contains.most + 1
        self._calls: dict[tuple[int, int], Call] = {}

    def state_count(self) -> int:
        """Returns how many rules there may be."""
        return (self._last + 1) * (self._enough + 1)

    def body(self) -> Expression:
        """Returns what the array type allows, its brackets included."""
        inner = options(*self._steps(0, 0, EMPTY))
        may_be_empty = self._record.min_items == 0 and self._contains.least == 0
        return _in_brackets(self._layout, inner, may_be_empty=may_be_empty)

    def _steps(self, count: int, matches: int, comma: Expression) -> list[Expression]:
        most = self._record.max_items
        if most is not None and count >= most:
            return []
        item = self._record.item(count)
        following = min(count + 1, self._last)
        found: list[Expression] = []
        if self._contains.most is None or matches < self._contains.most:
            matching = self._value(conjoin(item, self._contains.items))
            found.append(sequence(comma, matching, self._after(following, min(matches + 1, self._enough))))
        if self._contains.most is None:
            found.append(sequence(comma, self._value(item), self._after(following, matches)))
        else:
            found.extend(
                sequence(comma, self._value(conjoin(item, other)), self._after(following, matches))
                for other in self._contains.inverse
            )
        return found

    def _after(self, count: int, matches: int) -> Call:
        key = count, matches
        if key not in self._calls:
            self._calls[key] = self._add_rule(lambda: self._rest(count, matches))
        return self._calls[key]

    def _rest(self, count: int, matches: int) -> Expression:
        ends = count >= self._record.min_items and matches >= self._contains.least
        return options(*([EMPTY] if ends else []), *self._steps(count, matches, self._layout.comma))
