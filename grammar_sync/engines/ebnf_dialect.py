r"""EBNF as clients write it, read once, so that it means the same for each engine.

The dialect is GBNF. ``\xHH`` takes two hexadecimal digits, ``\uHHHH`` four and ``\UHHHHHHHH`` eight; ``\n``, ``\r`` and
``\t`` are what they are in C; a backslash before other ASCII punctuation stands for that character. Any other escape is
refused. A class ``[...]`` is a set of characters, a rule may go on over several lines, and an option may be empty.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NoReturn

from grammar_sync.engines.ebnf_pieces import COUNT_SIGNS, Piece, productive_rules
from grammar_sync.engines.prepared import CompileError
from grammar_sync.regular.chars import MAX_CODE_POINT, SURROGATES, char_set
from grammar_sync.regular.syntax import Chars
from grammar_sync.schema.productions import Call, Literal

_BLANKS: Final = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_RULE: Final = re.compile(r"[ \t]*::=")
_COUNTS: Final = re.compile(r"\{\s*([0-9]{1,9})\s*(?:(,)\s*([0-9]{1,9})?\s*)?\}", re.ASCII)
_DIGITS: Final[Mapping[str, int]] = {"x": 2, "u": 4, "U": 8}
_NAMED: Final[Mapping[str, str]] = {"n": "\n", "r": "\r", "t": "\t"}
_PUNCTUATION: Final = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")


def read_ebnf(source: str, start: str) -> dict[str, list[Piece]]:
    """Returns the rules of an EBNF by name, in order, without what never comes to an end.

    Args:
        source: The grammar.
        start: The name of the rule that it starts at.

    Raises:
        CompileError: It is wrong, or has something that engines read differently; with the place.
    """
    return _Reader(source).rules(start)


class _Reader:
    """Reads a grammar from its beginning to its end; parentheses are as deep as the request's check lets them be."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0
        self._calls: list[tuple[str, int]] = []

    def rules(self, start: str) -> dict[str, list[Piece]]:
        """Returns the rules by name, in order.

        Raises:
            CompileError: The grammar is wrong, with the place.
        """
        found: dict[str, list[Piece]] = {}
        places: dict[str, int] = {}
        self._skip()
        while self._at < len(self._source):
            begin = self._at
            name = self._rule_name()
            if name in found:
                self._refuse(f"rule {name}, defined at {self._place(places[name])}, is defined again", begin)
            places[name] = begin
            found[name] = self._options()
            if self._peek() == ")":
                self._refuse("a parenthesis is closed that was never opened", self._at)
        for name, position in self._calls:
            if name not in found:
                self._refuse(f"rule {name} is not defined", position)
        if start not in found:
            self._refuse(f"the start rule {start} is not defined in the grammar that begins", 0)
        kept = productive_rules(found)
        if start not in kept:
            self._refuse(
                f"the grammar allows no output at all: rule {start} never comes to an end, defined", places[start]
            )
        return kept

    def _rule_name(self) -> str:
        begin = self._at
        name = _NAME.match(self._source, begin)
        sign = _RULE.match(self._source, name.end()) if name else None
        if name is None or sign is None:
            self._refuse("expected a rule (name ::= ...)", begin)
        if self._source[max(self._source.rfind(end, 0, begin) for end in "\r\n") + 1 : begin].strip(" \t"):
            self._refuse(f"rule {name[0]} must begin on a line of its own", begin)
        self._at = sign.end()
        self._skip()
        return name[0]

    def _options(self) -> list[Piece]:
        """Reads up to a closing parenthesis, the next rule or the end."""
        found = self._sequence()
        while self._peek() == "|":
            self._at += 1
            self._skip()
            found += ["|", *self._sequence()]
        return found

    def _sequence(self) -> list[Piece]:
        found: list[Piece] = []
        while self._at < len(self._source) and self._peek() not in "|)" and not self._at_rule():
            item = self._item()
            self._skip()
            found += self._counted(item)
            self._skip()
        return found or [Literal("")]

    def _at_rule(self) -> bool:
        name = _NAME.match(self._source, self._at)
        return name is not None and _RULE.match(self._source, name.end()) is not None

    def _item(self) -> list[Piece]:
        begin, sign = self._at, self._peek()
        name = _NAME.match(self._source, begin)
        if name is not None:
            self._calls.append((name[0], begin))
            self._at = name.end()
            return [Call(name[0])]
        self._at += 1
        if sign == '"':
            return [Literal(self._text(begin))]
        if sign == "[":
            return [self._class(begin)]
        if sign == "(":
            self._skip()
            inner = self._options()
            if self._peek() != ")":
                self._refuse("a parenthesis is never closed, opened", begin)
            self._at += 1
            return ["(", *inner, ")"]
        wrong = "'.' is no part of the dialect, write [^\\n] for it: found" if sign == "." else f"unexpected {sign!r}"
        return self._refuse(wrong, begin)

    def _counted(self, item: list[Piece]) -> list[Piece]:
        """Returns an item with the count that follows it, if one does."""
        begin, sign = self._at, self._peek()
        if sign not in COUNT_SIGNS:
            return item
        counts = _COUNTS.match(self._source, begin) if sign == "{" else None
        if sign == "{" and counts is None:
            self._refuse("expected {n}, {n,} or {n,m}", begin)
        self._at = counts.end() if counts else begin + 1
        end = self._at
        self._skip()
        if self._peek() in COUNT_SIGNS:
            self._refuse("a count of a count: put the first in parentheses: found", end)
        if counts is None:
            return [*item, sign]
        least = int(counts[1])
        most = int(counts[3]) if counts[3] else None if counts[2] else least
        if most is not None and most < least:
            self._refuse(f"the count {counts[0]} has its bounds the wrong way round", begin)
        if most == 0 or item == [Literal("")]:
            return [Literal("")]
        return [*item, f"{{{least},{'' if most is None else most}}}"]

    def _text(self, begin: int) -> str:
        found: list[str] = []
        while self._peek() != '"':
            place = self._at
            found.append(self._character("literal", begin))
            if found[-1] == "\0":
                self._refuse("a NUL character in a literal", place)
        self._at += 1
        return "".join(found)

    def _class(self, begin: int) -> Chars:
        negated = self._peek() == "^"
        self._at += negated
        ranges: list[tuple[int, int]] = []
        while self._peek() != "]":
            place = self._at
            low = high = ord(self._character("class", begin))
            if self._peek() == "-" and self._source[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                high = ord(self._character("class", begin))
            if high < low:
                self._refuse(f"the range {self._source[place : self._at]} ends before it begins", place)
            ranges.append((low, high))
        self._at += 1
        chars = ~char_set(ranges) if negated else char_set(ranges)
        if not chars or chars.ranges == ((0, 0),):
            self._refuse(f"the class holds no character{' but NUL' if chars else ''}", begin)
        return Chars(chars)

    def _character(self, inside: str, begin: int) -> str:
        place, sign = self._at, self._peek()
        if not sign or sign in "\r\n":
            self._refuse(f"the {inside} is not closed on its line, opened", begin)
        self._at += 1
        if sign != "\\":
            return sign
        letter = self._peek()
        self._at += 1
        if letter in _NAMED:
            return _NAMED[letter]
        if letter in _PUNCTUATION:
            return letter
        if letter not in _DIGITS:
            self._refuse(f"unknown escape \\{letter if letter.isprintable() else ''}", place)
        count = _DIGITS[letter]
        digits = self._source[self._at : self._at + count]
        if not re.fullmatch(f"[0-9A-Fa-f]{{{count}}}", digits):
            self._refuse(f"the escape \\{letter} takes {count} hexadecimal digits", place)
        self._at += count
        code = int(digits, 16)
        if code > MAX_CODE_POINT or SURROGATES[0] <= code <= SURROGATES[1]:
            self._refuse(f"the escape \\{letter}{digits} is no character", place)
        return chr(code)

    def _peek(self) -> str:
        return self._source[self._at : self._at + 1]

    def _skip(self) -> None:
        blanks = _BLANKS.match(self._source, self._at)
        self._at = blanks.end() if blanks else self._at

    def _place(self, position: int) -> str:
        before = self._source[:position].replace("\r\n", "\n").replace("\r", "\n")
        return f"line {before.count(chr(10)) + 1}, column {len(before) - before.rfind(chr(10))}"

    def _refuse(self, message: str, position: int) -> NoReturn:
        raise CompileError(f"{message} at {self._place(position)}")
