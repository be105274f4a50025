r"""Regular languages of strings: from patterns and lengths, combined, and written back for grammar engines.

Pure functions on immutable values; no engine, no input or output. Lengths count Unicode characters. Everything is
bounded: what would take too long or become too large ends in a ``RegularError`` (a ``ValueError``) within a second.

    >>> name = pattern("^[a-z][a-z0-9_]*$").with_length(2, 16)
    >>> name.to_regex()
    '[a-z][0-9_a-z]{1,15}'
    >>> key = pattern("^x-").minus(words(["x-a"])).intersect(not_pattern("[^a-z-]"))
    >>> key.fullmatch("x-ab"), key.fullmatch("x-a"), key.fullmatch("x-A")
    (True, False, False)
    >>> pattern('^"?$').to_regex(json_encoded=True)
    '(?:\\\\")?'
    >>> print(pattern("^(?!ab)[ab]{2}$").to_ebnf("root"))
    root ::= "a" root_2 | "b" root_3
    root_2 ::= "a"
    root_3 ::= [ab]
    >>> pattern("^a|b$").enumerate(10), pattern("^(a|bb)$").enumerate(10)
    (None, ('a', 'bb'))
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import and_, or_
from typing import Final

from grammar_sync.regular.automaton import Budget, Dfa, combine, counting
from grammar_sync.regular.build import determinise
from grammar_sync.regular.chars import RegularError
from grammar_sync.regular.parse import Dialect, parse
from grammar_sync.regular.syntax import (
    ANY_CHAR,
    EMPTY_STRING,
    NOTHING,
    Node,
    choice,
    concat,
    has_assertions,
    length_bounds,
    limit_length,
    literal,
    relax_counts,
    repeat,
    repeats_groups,
    without_anchors,
)
from grammar_sync.regular.write import ebnf_expression, ebnf_rules, json_form, regex_text, tree_of

MAX_COUNTED_LENGTH: Final = 10_000  # the largest length bound that an automaton counts to
MAX_PREFERRED_STATES: Final = 32  # xgrammar takes about 15 ms to compile the rule of one state


def pattern(text: str, *, wide: bool = False) -> Language:
    """Returns the strings in which a JSON Schema ``pattern`` is found.

    Args:
        text: An ECMA-262 regular expression, with search semantics.
        wide: By default a string must match by the rules of ECMA-262 *and* of Python's re, which differ on non-ASCII
            digits and letters, on line ends under ``.`` and before a last newline at ``$``. Wide, one of them suffices.
            To show that no output of one pattern matches another, compare the first with the second one's wide reading.

    Raises:
        RegularError: The pattern is malformed, not regular or too large; its ``position`` says where.
    """
    return _parsed(text, "pattern", repeat(ANY_CHAR, 0, None), wide=wide)


def not_pattern(text: str) -> Language:
    """Returns the strings in which a JSON Schema ``pattern`` is surely not found, by any reading of it.

    Raises:
        RegularError: The pattern is malformed, not regular or too large.
    """
    return pattern(text, wide=True).complement()


def whole_regex(text: str) -> Language:
    """Returns the strings that a regular expression matches as a whole; ``^`` and ``$`` at its ends change nothing.

    Raises:
        RegularError: The expression is malformed, not regular or too large; its ``position`` says where.
    """
    return _parsed(text, "regex", EMPTY_STRING, wide=False)


def words(texts: Iterable[str]) -> Language:
    """Returns the language of just these strings.

    Raises:
        RegularError: A string has a lone surrogate.
    """
    found = tuple(dict.fromkeys(texts))
    for text in found:
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise RegularError("a lone surrogate in a string")
    return Language(choice(map(literal, found)))


def strings(minimum: int = 0, maximum: int | None = None) -> Language:
    """Returns all strings of ``minimum`` to ``maximum`` characters (None: no bound).

    Raises:
        RegularError: A bound is larger than the largest repetition count.
    """
    if maximum is not None and maximum < minimum:
        return Language(NOTHING)
    return Language(repeat(ANY_CHAR, minimum, maximum))


def _parsed(text: str, dialect: Dialect, around: Node, *, wide: bool) -> Language:
    node = parse(text, dialect, wide=wide)
    plain = without_anchors(node, around)
    return Language(concat([around, node, around]) if plain is None else plain)


class Language:
    """A regular set of strings. Immutable; the automaton is made when first needed, and kept.

    Args:
        source: A syntax tree that matches whole strings, or an automaton.
    """

    __slots__ = ("_automaton", "_tree")

    def __init__(self, source: Node | Dfa) -> None:
        self._automaton: Dfa | None = source if isinstance(source, Dfa) else None
        self._tree: Node | None = None if isinstance(source, Dfa) else source

    def automaton(self) -> Dfa:
        """Returns the language's smallest automaton.

        Raises:
            RegularError: It is beyond the limits.
        """
        if self._automaton is None:
            self._automaton = determinise(EMPTY_STRING if self._tree is None else self._tree, Budget())
        return self._automaton

    def _plain_tree(self) -> Node | None:
        """Returns the syntax tree when it has no assertions."""
        return None if self._tree is None or has_assertions(self._tree) else self._tree

    def intersect(self, *others: Language) -> Language:
        """Returns the strings that are in all of the languages.

        Raises:
            RegularError: The automaton is beyond the limits.
        """
        found = self
        for other in others:
            if other.is_everything():
                continue
            found = other if found.is_everything() else found._combined(other, complement=False)
        return found

    def minus(self, *others: Language) -> Language:
        """Returns the strings that are in this language and in none of the others.

        Raises:
            RegularError: The automaton is beyond the limits.
        """
        found = self
        for other in others:
            found = found._combined(other, complement=True)
        return found

    def _combined(self, other: Language, *, complement: bool) -> Language:
        right = other.automaton()
        return Language(combine(self.automaton(), right.complement() if complement else right, and_, Budget()))

    def union(self, *others: Language) -> Language:
        """Returns the strings that are in any of the languages.

        Raises:
            RegularError: The automaton is beyond the limits.
        """
        trees = [tree for tree in map(Language._plain_tree, (self, *others)) if tree is not None]
        if len(trees) == 1 + len(others):
            return Language(choice(trees))
        found = self.automaton()
        for other in others:
            found = combine(found, other.automaton(), or_, Budget())
        return Language(found)

    def complement(self) -> Language:
        """Returns all strings that are not in the language.

        Raises:
            RegularError: The automaton is beyond the limits.
        """
        return Language(self.automaton().complement())

    def with_length(self, minimum: int = 0, maximum: int | None = None) -> Language:
        """Returns the strings of ``minimum`` to ``maximum`` characters (None: no bound).

        Raises:
            RegularError: The automaton is beyond the limits.
        """
        if minimum <= 0 and maximum is None:
            return self
        tree = self._plain_tree()
        limited = None if tree is None else limit_length(tree, max(minimum, 0), maximum)
        if limited is not None:
            return Language(limited)
        if max(minimum, maximum or 0) > MAX_COUNTED_LENGTH:
            raise RegularError(f"a length bound beside this pattern may be {MAX_COUNTED_LENGTH} at most")
        if maximum is not None and maximum < minimum:
            return Language(NOTHING)
        base = self if tree is None or maximum is None else Language(relax_counts(tree, maximum))
        return Language(combine(base.automaton(), counting(max(minimum, 0), maximum), and_, Budget()))

    def fullmatch(self, text: str) -> bool:
        """Returns whether the string is in the language.

        Raises:
            RegularError: The automaton is beyond the limits.
        """
        return self.automaton().accepts(text)

    def is_empty(self) -> bool:
        """Returns whether no string is in the language.

        Raises:
            RegularError: The automaton is beyond the limits.
        """
        tree = self._plain_tree()
        return self.automaton().is_empty() if tree is None else tree == NOTHING

    def is_everything(self) -> bool:
        """Returns whether every string is known to be in the language."""
        if self._automaton is not None:
            return len(self._automaton.moves) == 1 and self._automaton.accepting[0]
        return self._tree == repeat(ANY_CHAR, 0, None)

    def enumerate(self, limit: int) -> tuple[str, ...] | None:
        """Returns all strings, shorter ones first and else by code point; None where there are more than ``limit``.

        Raises:
            RegularError: The automaton is beyond the limits.
        """
        return self.automaton().words(limit)

    def shortest(self) -> str | None:
        """Returns a shortest string, or None where the language is empty.

        Raises:
            RegularError: The automaton is beyond the limits.
        """
        return self.automaton().shortest()

    def lengths(self) -> tuple[int, int | None] | None:
        """Returns the least and greatest length in characters (None: no bound), or None where the language is empty.

        Raises:
            RegularError: The automaton is beyond the limits.
        """
        tree = self._plain_tree()
        if tree is not None:
            return None if tree == NOTHING else length_bounds(tree)
        shortest = self.automaton().shortest()
        return None if shortest is None else (len(shortest), self.automaton().longest_length())

    def equals(self, other: Language) -> bool:
        """Returns whether both languages have the same strings.

        Raises:
            RegularError: An automaton is beyond the limits.
        """
        return combine(self.automaton(), other.automaton(), lambda left, right: left != right, Budget()).is_empty()

    def is_subset(self, other: Language) -> bool:
        """Returns whether every string of this language is in the other one.

        Raises:
            RegularError: An automaton is beyond the limits.
        """
        return self.minus(other).is_empty()

    def is_disjoint(self, other: Language) -> bool:
        """Returns whether no string is in both languages.

        Raises:
            RegularError: An automaton is beyond the limits.
        """
        return self._combined(other, complement=False).is_empty()

    def to_regex(self, *, json_encoded: bool = False) -> str:
        """Returns a whole-string regular expression that xgrammar, llguidance and Python's re read alike.

        Args:
            json_encoded: Write what stands between the quotes of a JSON string (see :mod:`grammar_sync.regular.write`).

        Raises:
            RegularError: The language is empty, or the expression would become too long (``to_ebnf`` may still do).
        """
        tree = self._plain_tree()
        if tree is None:
            tree = tree_of(self.automaton())
        return regex_text(json_form(tree) if json_encoded else tree)

    def to_ebnf(self, name: str, *, json_encoded: bool = False) -> str:
        """Returns rules in xgrammar's EBNF, one a line; the first one is called ``name``, others ``name_1`` and so on.

        Where groups repeat, one rule per state of a small automaton: xgrammar follows one of these at a time, and fills
        a mask ten to thirty times faster than for an expression that it must follow in several ways at once.

        Args:
            name: The name of the first rule.
            json_encoded: Write what stands between the quotes of a JSON string.

        Raises:
            RegularError: The language is empty, or the rules would become too long.
        """
        tree = self._plain_tree()
        expression = None if tree is None else _one_rule(name, tree, json_encoded=json_encoded)
        # One character is a group where it may be escaped.
        if expression is not None and not (tree is None or repeats_groups(json_form(tree) if json_encoded else tree)):
            return expression
        try:
            automaton = self.automaton()
        except RegularError:
            if expression is None:
                raise
            return expression
        if len(automaton.moves) <= MAX_PREFERRED_STATES:
            return ebnf_rules(automaton, name, json_encoded=json_encoded)
        if expression is not None:
            return expression
        rules = ebnf_rules(automaton, name, json_encoded=json_encoded)
        try:
            return min(_one_rule(name, tree_of(automaton), json_encoded=json_encoded), rules, key=len)
        except RegularError:
            return rules


def _one_rule(name: str, tree: Node, *, json_encoded: bool) -> str:
    return f"{name} ::= {ebnf_expression(json_form(tree) if json_encoded else tree)}"
