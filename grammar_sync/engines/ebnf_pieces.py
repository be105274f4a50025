"""The rules of an EBNF as it was read: what they are made of, and which of them ever come to an end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

from grammar_sync.regular.syntax import Chars
from grammar_sync.schema.productions import Call, Literal

COUNT_SIGNS: Final = frozenset("*+?{")
"""What a count begins with."""

Piece: TypeAlias = str | Literal | Chars | Call
"""A text, a set of characters, a rule, or punctuation that both engines write alike."""


def productive_rules(rules: Mapping[str, list[Piece]]) -> dict[str, list[Piece]]:
    """Returns the rules that some text has, in order, without the options that no text has.

    Args:
        rules: By name; every rule that is called is one of them.
    """
    callers: dict[str, list[str]] = {}
    for name, body in rules.items():
        for called in dict.fromkeys(piece.rule for piece in body if isinstance(piece, Call)):
            callers.setdefault(called, []).append(name)
    known: set[str] = set()
    waiting = list(rules)
    while waiting:
        fresh = [name for name in waiting if name not in known and _Options(rules[name], known).kept() is not None]
        known.update(fresh)
        waiting = list(
            dict.fromkeys(caller for name in fresh for caller in callers.get(name, ()) if caller not in known)
        )
    if len(known) == len(rules):
        return dict(rules)
    found = ((name, _Options(body, known).kept()) for name, body in rules.items() if name in known)
    return {name: body for name, body in found if body is not None}


class _Options:
    """Goes through a rule once; parentheses are as deep as the request's check lets them be.

    Args:
        pieces: The rule.
        known: The rules that come to an end.
    """

    def __init__(self, pieces: list[Piece], known: set[str]) -> None:
        self._pieces = pieces
        self._known = known
        self._at = 0

    def kept(self) -> list[Piece] | None:
        """Returns the options that come to an end, up to a closing parenthesis or the end; None where none does."""
        found: list[Piece] = []
        while True:
            one = self._sequence()
            if one is not None:
                found += ["|", *one] if found else one
            if self._sign() != "|":
                return found or None
            self._at += 1

    def _sequence(self) -> list[Piece] | None:
        found: list[Piece] = []
        ends = True
        while self._at < len(self._pieces) and self._sign() not in ("|", ")"):
            item = self._item()
            count = self._sign()
            if count[:1] not in COUNT_SIGNS:
                count = ""
            self._at += bool(count)
            if item is not None:
                found += [*item, count] if count else item
            elif count.startswith(("?", "*", "{0,")):
                found.append(Literal(""))
            else:
                ends = False
        return found if ends else None

    def _item(self) -> list[Piece] | None:
        piece = self._pieces[self._at]
        self._at += 1
        if piece == "(":
            inner = self.kept()
            self._at += 1
            return None if inner is None else ["(", *inner, ")"]
        return None if isinstance(piece, Call) and piece.rule not in self._known else [piece]

    def _sign(self) -> str:
        piece = self._pieces[self._at] if self._at < len(self._pieces) else ""
        return piece if isinstance(piece, str) else ""
