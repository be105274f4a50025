"""Syntax trees of regular expressions, kept small by constructors that simplify.

The trees are built with :func:`concat`, :func:`choice` and :func:`repeat` only, so that equal languages often have
equal trees: ``x{1,2}x?`` is ``x{1,3}``, ``a|[bc]`` is ``[abc]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeAlias

import msgspec

from grammar_sync.regular.chars import ALL, CharSet, RegularError, characters

MAX_REPEAT: Final = 100_000  # the largest repetition count, nested ones multiplied out


class Chars(msgspec.Struct, frozen=True):
    """One character of a set; with the empty set: the empty language."""

    chars: CharSet


class Concat(msgspec.Struct, frozen=True):
    """The parts, one after another; without parts: the empty string."""

    parts: tuple[Node, ...] = ()


class Choice(msgspec.Struct, frozen=True):
    """Any one of the options."""

    options: tuple[Node, ...]


class Repeat(msgspec.Struct, frozen=True):
    """The body, ``minimum`` to ``maximum`` times (None: any number)."""

    body: Node
    minimum: int
    maximum: int | None


class Start(msgspec.Struct, frozen=True):
    """True at the start of the string only."""


class End(msgspec.Struct, frozen=True):
    """True at the end of the string, and before a newline that ends it when ``before_newline``."""

    before_newline: bool = False


class Look(msgspec.Struct, frozen=True):
    """True where the body does (or, negative, does not) match ahead from here, or behind up to here."""

    body: Node
    ahead: bool
    negative: bool


Node: TypeAlias = Chars | Concat | Choice | Repeat | Start | End | Look

EMPTY_STRING: Final = Concat()
NOTHING: Final = Chars(CharSet())
ANY_CHAR: Final = Chars(ALL)


def literal(text: str) -> Node:
    """Returns the language of one string."""
    return concat(Chars(characters(char)) for char in text)


def _counts(node: Node) -> tuple[Node, int, int | None]:
    return (node.body, node.minimum, node.maximum) if isinstance(node, Repeat) else (node, 1, 1)


def _sum(left: int | None, right: int | None) -> int | None:
    """Returns the sum of two upper bounds, where None is unbounded."""
    return None if left is None or right is None else left + right


def concat(parts: Iterable[Node]) -> Node:
    """Returns the concatenation, simplified."""
    flat: list[Node] = []
    for part in parts:
        for piece in part.parts if isinstance(part, Concat) else (part,):
            if piece == NOTHING:
                return NOTHING
            if flat and not isinstance(piece, Start | End | Look):
                body, low, high = _counts(piece)
                last, last_low, last_high = _counts(flat[-1])
                if body == last:
                    flat[-1] = repeat(body, low + last_low, _sum(high, last_high))
                    continue
            flat.append(piece)
    return flat[0] if len(flat) == 1 else Concat(tuple(flat))


def choice(options: Iterable[Node]) -> Node:
    """Returns the union, simplified."""
    chars = CharSet()
    seen: dict[Node, None] = {}
    single = Chars(CharSet())
    for option in options:
        for piece in option.options if isinstance(option, Choice) else (option,):
            if isinstance(piece, Chars):
                chars = chars | piece.chars
                seen.setdefault(single)
            else:
                seen.setdefault(piece)
    found = [Chars(chars) if node == single else node for node in seen if node != single or chars]
    optional = EMPTY_STRING in seen
    rest = [node for node in found if node != EMPTY_STRING]
    if not rest:
        return EMPTY_STRING if optional else NOTHING
    node = rest[0] if len(rest) == 1 else Choice(tuple(rest))
    return repeat(node, 0, 1) if optional else node


def repeat(body: Node, minimum: int, maximum: int | None) -> Node:
    """Returns the repetition, simplified.

    Raises:
        RegularError: A count, nested ones multiplied, is larger than ``MAX_REPEAT``.
    """
    if body == EMPTY_STRING or maximum == 0:
        return EMPTY_STRING
    if body == NOTHING:
        return EMPTY_STRING if minimum == 0 else NOTHING
    if (minimum, maximum) == (1, 1):
        return body
    if isinstance(body, Repeat) and body.minimum <= 1:
        # The counts of the inner repetition leave no gap, so that the two multiply.
        minimum *= body.minimum
        maximum = None if maximum is None or body.maximum is None else maximum * body.maximum
        body = body.body
    if max(minimum, maximum or 0) > MAX_REPEAT:
        raise RegularError(f"repetition counts multiply to {max(minimum, maximum or 0)}, more than {MAX_REPEAT}")
    return Repeat(body, minimum, maximum)


def children(node: Node) -> tuple[Node, ...]:
    """Returns the node's direct parts."""
    if isinstance(node, Concat):
        return node.parts
    if isinstance(node, Choice):
        return node.options
    if isinstance(node, Repeat | Look):
        return (node.body,)
    return ()


def walk(node: Node) -> Iterator[Node]:
    """Yields the node and all below it."""
    stack = [node]
    while stack:
        found = stack.pop()
        yield found
        stack.extend(children(found))


def has_assertions(node: Node) -> bool:
    """Returns whether the tree has anchors or lookaround, so that its parts are no languages of their own."""
    return any(isinstance(found, Start | End | Look) for found in walk(node))


def repeats_groups(node: Node) -> bool:
    """Returns whether the tree repeats anything but a single character."""
    return any(isinstance(found, Repeat) and not isinstance(found.body, Chars) for found in walk(node))


def length_bounds(node: Node) -> tuple[int, int | None]:
    """Returns the fewest and the most characters the node matches (None: no bound); assertions count as empty."""
    if isinstance(node, Chars):
        return 1, 1
    if isinstance(node, Concat):
        bounds = [length_bounds(part) for part in node.parts]
        return sum(low for low, _ in bounds), _greatest(bounds, sum)
    if isinstance(node, Choice):
        bounds = [length_bounds(option) for option in node.options]
        return min(low for low, _ in bounds), _greatest(bounds, max)
    if isinstance(node, Repeat):
        low, high = length_bounds(node.body)
        unbounded = node.maximum is None or high is None
        return low * node.minimum, None if unbounded else (node.maximum or 0) * (high or 0)
    return 0, 0


def _greatest(bounds: list[tuple[int, int | None]], together: Callable[[list[int]], int]) -> int | None:
    """Returns what the upper bounds make together; None when one of them is None."""
    highs = [high for _, high in bounds if high is not None]
    return together(highs) if len(highs) == len(bounds) else None


def limit_length(node: Node, minimum: int, maximum: int | None) -> Node | None:
    """Returns the strings of the node with that many characters, or None where no simple rewriting is exact.

    Exact for an assertion-free tree of which at most one part varies in length, as a repetition of a body of fixed
    length; and for unions of such trees.
    """
    low, high = length_bounds(node)
    if low >= minimum and (maximum is None or (high is not None and high <= maximum)):
        return node
    if (maximum is not None and low > maximum) or (high is not None and high < minimum):
        return NOTHING
    if isinstance(node, Choice):
        limited = [limit_length(option, minimum, maximum) for option in node.options]
        exact = [found for found in limited if found is not None]
        return choice(exact) if len(exact) == len(limited) else None
    parts = node.parts if isinstance(node, Concat) else (node,)
    bounds = [length_bounds(part) for part in parts]
    varying = [index for index, (part_low, part_high) in enumerate(bounds) if part_low != part_high]
    index = varying[0]
    part = parts[index]
    if len(varying) > 1 or not isinstance(part, Repeat):
        return None
    unit, unit_high = length_bounds(part.body)
    if unit != unit_high or unit == 0:
        return None
    return concat(
        (*parts[:index], _limit_repeat(part, unit, low - bounds[index][0], (minimum, maximum)), *parts[index + 1 :])
    )


def _limit_repeat(part: Repeat, unit: int, fixed: int, bounds: tuple[int, int | None]) -> Node:
    """Returns a repetition of a body of ``unit`` characters, beside which ``fixed`` stand, within bounds on the sum."""
    minimum, maximum = bounds
    least = max(part.minimum, -((fixed - minimum) // unit))
    most = part.maximum
    if maximum is not None:
        fitting = (maximum - fixed) // unit
        most = fitting if most is None else min(most, fitting)
    if most is not None and most < least:
        return NOTHING
    return repeat(part.body, least, most)


def without_anchors(node: Node, around: Node) -> Node | None:
    """Returns the whole-string tree of a tree whose assertions are anchors at its outer ends; else None.

    Args:
        node: A tree with anchors.
        around: What may stand before and after it where no anchor does: any string for a search, the empty one for a
            whole-string match.
    """
    tree = _at_end(_at_start(node, around), around)
    return None if has_assertions(tree) else tree


def _at_start(node: Node, around: Node) -> Node:
    if isinstance(node, Start):
        return EMPTY_STRING
    if isinstance(node, Choice) and has_assertions(node):
        return choice(_at_start(option, around) for option in node.options)
    if isinstance(node, Concat) and node.parts and has_assertions(node.parts[0]):
        return concat([_at_start(node.parts[0], around), *node.parts[1:]])
    return concat([around, node])


def _at_end(node: Node, around: Node) -> Node:
    if isinstance(node, End):
        return repeat(Chars(characters("\n")), 0, 1) if node.before_newline else EMPTY_STRING
    if isinstance(node, Choice) and has_assertions(node):
        return choice(_at_end(option, around) for option in node.options)
    if isinstance(node, Concat) and node.parts and has_assertions(node.parts[-1]):
        return concat([*node.parts[:-1], _at_end(node.parts[-1], around)])
    return concat([node, around])


def relax_counts(node: Node, maximum: int) -> Node:
    """Returns a tree with the same strings of at most ``maximum`` characters, but fewer counts."""
    if isinstance(node, Concat):
        return concat(relax_counts(part, maximum) for part in node.parts)
    if isinstance(node, Choice):
        return choice(relax_counts(option, maximum) for option in node.options)
    if isinstance(node, Repeat):
        reached = node.maximum is not None and node.maximum * length_bounds(node.body)[0] >= maximum > 0
        return repeat(relax_counts(node.body, maximum), node.minimum, None if reached else node.maximum)
    return node
