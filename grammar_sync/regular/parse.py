r"""Parses regular expressions of two dialects into one syntax tree.

``pattern``: what JSON Schema's keyword of that name means: ECMA-262, with the ``u`` flag's ``\u{...}`` and ``\p{...}``.
JSON Schema is checked by libraries of several languages, and ``\d``, ``\w``, ``\s``, ``.`` and ``$`` differ among
them. A *narrow* tree takes only what both ECMA-262 and Python's re take, so that output is valid under either. A *wide*
tree takes what at least one of them takes; its complement is what surely does not match. Inside a negative lookaround
the two change places.

``regex``: a whole-string regular expression, as Python's re and grammar engines read it. ``.`` is all but the newline.
"""

from __future__ import annotations

import re
from typing import Final, Literal, TypeAlias

from grammar_sync.regular.chars import (
    ASCII_DIGITS,
    ASCII_WORD,
    ECMA_SPACE,
    LINE_ENDS,
    MAX_CODE_POINT,
    NEWLINE,
    CharSet,
    RegularError,
    category,
    char_set,
    unicode_digits,
    unicode_space,
    unicode_word,
)
from grammar_sync.regular.syntax import ANY_CHAR, Chars, End, Look, Node, Start, choice, concat, repeat

MAX_PATTERN_CHARS: Final = 32_768
MAX_GROUP_DEPTH: Final = 60

Dialect: TypeAlias = Literal["pattern", "regex"]

_QUANTIFIER: Final = re.compile(r"\{([0-9]{1,9})(?:(,)([0-9]{1,9})?)?\}")
_OPEN_QUANTIFIER: Final = re.compile(r"\{,([0-9]{1,9})\}")
_LOOKAROUND: Final = {"?=": (True, False), "?!": (True, True), "?<=": (False, False), "?<!": (False, True)}
_CONTROL: Final = {"f": 0x0C, "n": 0x0A, "r": 0x0D, "t": 0x09, "v": 0x0B}
_HEX_LENGTHS: Final = {"x": 2, "u": 4, "U": 8}

# A set as ECMA-262 means it, and as Python means it.
_Meanings: TypeAlias = tuple[CharSet, CharSet]


def parse(text: str, dialect: Dialect, *, wide: bool = False) -> Node:
    """Returns the syntax tree of a regular expression.

    Args:
        text: The expression.
        dialect: How to read it.
        wide: Take what any of the readings takes, not only what all of them take (see the module's text).

    Raises:
        RegularError: It is malformed, has what is not supported (backreferences, flags), or is beyond a limit.
    """
    if len(text) > MAX_PATTERN_CHARS:
        raise RegularError(f"a pattern of {len(text)} characters is longer than {MAX_PATTERN_CHARS}")
    return _Parser(text, dialect, wide).whole()


class _Parser:
    def __init__(self, text: str, dialect: Dialect, wide: bool) -> None:
        self.text = text
        self.dialect = dialect
        self.wide = wide
        self.at = 0
        self.depth = 0

    def whole(self) -> Node:
        node = self._alternatives()
        if self.at < len(self.text):
            raise RegularError("unbalanced ')'", self.at)
        return node

    def _peek(self, token: str) -> bool:
        return self.text.startswith(token, self.at)

    def _take(self, token: str) -> bool:
        if self._peek(token):
            self.at += len(token)
            return True
        return False

    def _next(self, expected: str) -> str:
        if self.at >= len(self.text):
            raise RegularError(f"the pattern ends where {expected} is expected", self.at)
        self.at += 1
        return self.text[self.at - 1]

    def _alternatives(self) -> Node:
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        return choice(options)

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            parts.append(self._quantified())
        return concat(parts)

    def _quantified(self) -> Node:
        start = self.at
        atom = self._atom()
        quantified_at = self.at
        bounds = self._quantifier()
        if bounds is None:
            return atom
        if isinstance(atom, Start | End | Look) and not self._is_plain_group(start):
            raise RegularError("a quantifier after an anchor or lookaround", quantified_at)
        self._take("?")  # lazy: the same language
        if self.at < len(self.text) and (self.text[self.at] in "*+?" or _QUANTIFIER.match(self.text, self.at)):
            raise RegularError("a possessive or doubled quantifier is not supported", self.at)
        try:
            return repeat(atom, *bounds)
        except RegularError as error:
            raise RegularError(str(error), start) from error

    def _is_plain_group(self, start: int) -> bool:
        return self.text[start] == "(" and not self.text.startswith(tuple(_LOOKAROUND), start + 1)

    def _quantifier(self) -> tuple[int, int | None] | None:
        if self._take("*"):
            return 0, None
        if self._take("+"):
            return 1, None
        if self._take("?"):
            return 0, 1
        if found := _QUANTIFIER.match(self.text, self.at):
            low = int(found[1])
            high = low if found[2] is None else None if found[3] is None else int(found[3])
            if high is not None and high < low:
                raise RegularError(f"repetition bounds out of order: {found[0]}", self.at)
            self.at = found.end()
            return low, high
        if found := _OPEN_QUANTIFIER.match(self.text, self.at):
            if self.dialect == "pattern":
                raise RegularError(f"{found[0]} means different things in ECMA-262 and Python", self.at)
            self.at = found.end()
            return 0, int(found[1])
        return None

    def _atom(self) -> Node:
        start = self.at
        char = self._next("a character")
        if char == "(":
            return self._group(start)
        if char == "\\":
            return self._escape(start)
        if char in "^$":
            return Start() if char == "^" else End(before_newline=self.wide)
        if char in "*+?" or (char == "{" and self._quantifier_at(start)):
            raise RegularError(f"nothing to repeat before {char!r}", start)
        if char == "[":
            return Chars(self._class(start))
        if char == ".":
            return Chars(self._reading((~LINE_ENDS if self.dialect == "pattern" else ~NEWLINE, ~NEWLINE)))
        return Chars(self._single(ord(char), start))

    def _quantifier_at(self, position: int) -> bool:
        return bool(_QUANTIFIER.match(self.text, position) or _OPEN_QUANTIFIER.match(self.text, position))

    def _single(self, code: int, position: int) -> CharSet:
        if 0xD800 <= code <= 0xDFFF:
            raise RegularError(f"a lone surrogate U+{code:04X}", position)
        return char_set([(code, code)])

    def _reading(self, meanings: _Meanings) -> CharSet:
        ecma, python = meanings
        return ecma | python if self.wide else ecma & python

    def _group(self, start: int) -> Node:
        self.depth += 1
        if self.depth > MAX_GROUP_DEPTH:
            raise RegularError(f"groups nested deeper than {MAX_GROUP_DEPTH}", start)
        look: tuple[bool, bool] | None = None
        if self._peek("?"):
            for token, found in _LOOKAROUND.items():
                if self._take(token):
                    look = found
                    break
            else:
                self._group_opening(start)
        negative = look is not None and look[1]
        self.wide ^= negative
        node = self._alternatives()
        self.wide ^= negative
        if not self._take(")"):
            raise RegularError("a group that is not closed", start)
        self.depth -= 1
        return node if look is None else Look(node, ahead=look[0], negative=look[1])

    def _group_opening(self, start: int) -> None:
        if self._take("?:"):
            return
        named = re.compile(r"\?P?<([^\W\d]\w*)>").match(self.text, self.at)
        if named and (self.dialect == "regex" or not self._peek("?P")):
            self.at = named.end()
            return
        raise RegularError(
            "a kind of group that is not supported (flags, comments, conditionals, atomic groups)", start
        )

    def _escape(self, start: int) -> Node:
        following = self.text[self.at : self.at + 1]
        if following in ("b", "B"):
            self.at += 1
            return self._word_boundary(negative=following == "B")
        if self.dialect == "regex" and following in ("A", "Z"):
            self.at += 1
            return Start() if following == "A" else End()
        if following and following in "123456789k":
            raise RegularError("backreferences are not regular", start)
        return Chars(self._reading(self._escaped_set(start)))

    def _word_boundary(self, *, negative: bool) -> Node:
        narrow, wide = ASCII_WORD & unicode_word(), ASCII_WORD | unicode_word()
        yes, no = (wide, narrow) if self.wide else (narrow, wide)
        behind, ahead = Look(Chars(yes), ahead=False, negative=False), Look(Chars(yes), ahead=True, negative=False)
        not_behind, not_ahead = Look(Chars(no), ahead=False, negative=True), Look(Chars(no), ahead=True, negative=True)
        if negative and self.wide:
            return choice([concat([behind, ahead]), concat([not_behind, not_ahead])])
        if negative:
            # Python's \B is not found in the empty string.
            some = [Look(ANY_CHAR, ahead=ahead, negative=False) for ahead in (False, True)]
            outside = concat([not_behind, not_ahead, choice(some)])
            return choice([concat([behind, ahead]), outside])
        return choice([concat([behind, not_ahead]), concat([not_behind, ahead])])

    def _escaped_set(self, start: int) -> _Meanings:
        """Returns what the escape at the current place (after the backslash) stands for, in and out of classes."""
        char = self._next("an escaped character")
        if char in "dDwWsS":
            ecma, python = {
                "d": (ASCII_DIGITS, unicode_digits), "w": (ASCII_WORD, unicode_word), "s": (ECMA_SPACE, unicode_space),
            }[char.lower()]  # fmt: skip
            return (~ecma, ~python()) if char.isupper() else (ecma, python())
        if char in "pP":
            found = self._property(start)
            return (~found, ~found) if char == "P" else (found, found)
        code = self._escaped_code(char, start)
        single = self._single(code, start)
        return single, single

    def _property(self, start: int) -> CharSet:
        name = re.compile(r"\{([A-Za-z_=]+)\}").match(self.text, self.at)
        found = category(name[1]) if name else None
        if name is None or found is None:
            raise RegularError(r"a \p{...} that is not a general category (other than C)", start)
        self.at = name.end()
        return found

    def _escaped_code(self, char: str, start: int) -> int:
        following = self.text[self.at : self.at + 1]
        if char in _CONTROL:
            return _CONTROL[char]
        if char in "xu" or (char == "U" and self.dialect == "regex"):
            return self._numbered(char, start)
        if char == "c" and following.isascii() and following.isalpha():
            return ord(self._next("a control letter")) % 32
        if char == "0" and not following.isdigit():
            return 0
        if char.isascii() and char.isalnum():
            raise RegularError(f"an unknown escape \\{char}", start)
        return ord(char)

    def _numbered(self, char: str, start: int) -> int:
        if char == "u" and self._peek("{"):
            braced = re.compile(r"\{([0-9A-Fa-f]{1,8})\}").match(self.text, self.at)
            if braced is None or int(braced[1], 16) > MAX_CODE_POINT:
                raise RegularError(r"a malformed \u{...}", start)
            self.at = braced.end()
            return int(braced[1], 16)
        return self._surrogate_pair(self._hexadecimal(_HEX_LENGTHS[char], start), start)

    def _hexadecimal(self, digits: int, start: int) -> int:
        found = self.text[self.at : self.at + digits]
        if not re.fullmatch(f"[0-9A-Fa-f]{{{digits}}}", found) or int(found, 16) > MAX_CODE_POINT:
            raise RegularError("a malformed hexadecimal escape", start)
        self.at += digits
        return int(found, 16)

    def _surrogate_pair(self, high: int, start: int) -> int:
        if 0xD800 <= high <= 0xDBFF and self._take("\\u"):
            low = self._hexadecimal(4, start)
            if not 0xDC00 <= low <= 0xDFFF:
                raise RegularError(f"a lone surrogate U+{high:04X}", start)
            return 0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00)
        return high

    def _class(self, start: int) -> CharSet:
        negated = self._take("^")
        ecma, python = CharSet(), CharSet()
        singles: list[tuple[int, int]] = []
        first = True
        while first or not self._peek("]"):
            if first and self._peek("]") and self.dialect == "pattern":
                raise RegularError("an empty class, which ECMA-262 and Python read differently", start)
            first = False
            at = self.at
            item = self._class_item(start)
            if self._peek("-") and not self._peek("-]") and self.at + 1 < len(self.text):
                self.at += 1
                end = self._class_item(start)
                if isinstance(item, tuple) or isinstance(end, tuple) or end < item:
                    raise RegularError("a class range that is out of order or has a set for an end", at)
                singles.append((item, end))
            elif isinstance(item, tuple):
                ecma, python = ecma | item[0], python | item[1]
            else:
                singles.append((item, item))
        self._next("']'")
        ranges = char_set(singles)
        ecma, python = ecma | ranges, python | ranges
        return self._reading((~ecma, ~python) if negated else (ecma, python))

    def _class_item(self, start: int) -> int | _Meanings:
        """Returns one code point, or the set that an escape stands for."""
        at = self.at
        char = self._next("']'") if self.at < len(self.text) else ""
        if not char:
            raise RegularError("a character class that is not closed", start)
        if char != "\\":
            self._single(ord(char), at)
            return ord(char)
        following = self.text[self.at : self.at + 1]
        if following == "b":
            self.at += 1
            return 0x08
        if following and following in "dDwWsSpP":
            return self._escaped_set(at)
        if following and following in "123456789":
            raise RegularError("an octal escape in a class", at)
        code = self._escaped_code(self._next("an escaped character"), at)
        self._single(code, at)
        return code
