"""Sets of Unicode characters as sorted code-point intervals, and the named sets that regex dialects use."""

from __future__ import annotations

import unicodedata
from bisect import bisect_right
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

import msgspec

MAX_CODE_POINT: Final = 0x10FFFF
SURROGATES: Final = (0xD800, 0xDFFF)
# Beyond these, planes hold unassigned or private code points only.
_ASSIGNED_SPANS: Final = ((0, 0x323FF), (0xE0000, 0xE01EF))


class RegularError(ValueError):
    """A pattern that is wrong, not regular, or beyond a limit: the client's fault, told in one line.

    Args:
        message: What is wrong, without the position.
        position: Index of the offending character in the pattern; None when no single place is at fault.
    """

    def __init__(self, message: str, position: int | None = None) -> None:
        super().__init__(message if position is None else f"{message} at position {position}")
        self.position = position


class CharSet(msgspec.Struct, frozen=True):
    """A set of Unicode scalar values (surrogates excluded).

    Args:
        ranges: Inclusive intervals, ascending, neither overlapping nor adjacent. Build with :func:`char_set`.
    """

    ranges: tuple[tuple[int, int], ...] = ()

    def __or__(self, other: CharSet) -> CharSet:
        """Returns the union."""
        return char_set(self.ranges + other.ranges)

    def __and__(self, other: CharSet) -> CharSet:
        """Returns the intersection, by one sweep over both."""
        found: list[tuple[int, int]] = []
        left, right = 0, 0
        while left < len(self.ranges) and right < len(other.ranges):
            low = max(self.ranges[left][0], other.ranges[right][0])
            high = min(self.ranges[left][1], other.ranges[right][1])
            if low <= high:
                found.append((low, high))
            if self.ranges[left][1] < other.ranges[right][1]:
                left += 1
            else:
                right += 1
        return CharSet(tuple(found))

    def __invert__(self) -> CharSet:
        """Returns all other characters."""
        found: list[tuple[int, int]] = []
        low = 0
        for start, end in char_set((*self.ranges, SURROGATES), keep_surrogates=True).ranges:
            if low < start:
                found.append((low, start - 1))
            low = end + 1
        if low <= MAX_CODE_POINT:
            found.append((low, MAX_CODE_POINT))
        return CharSet(tuple(found))

    def __sub__(self, other: CharSet) -> CharSet:
        """Returns the characters of this set that the other lacks."""
        return self & ~other

    def __bool__(self) -> bool:
        """Returns whether the set has a character."""
        return bool(self.ranges)

    def __contains__(self, code_point: int) -> bool:
        """Returns whether the code point is in the set."""
        index = bisect_right(self.ranges, (code_point, MAX_CODE_POINT)) - 1
        return index >= 0 and code_point <= self.ranges[index][1]

    def size(self) -> int:
        """Returns how many characters it has."""
        return sum(high - low + 1 for low, high in self.ranges)


def char_set(ranges: Iterable[tuple[int, int]], *, keep_surrogates: bool = False) -> CharSet:
    """Returns the set of the intervals' characters, normalised."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    if keep_surrogates:
        return CharSet(tuple(merged))
    clean: list[tuple[int, int]] = []
    for low, high in merged:
        below, above = min(high, SURROGATES[0] - 1), max(low, SURROGATES[1] + 1)
        if high < SURROGATES[0] or low > SURROGATES[1]:
            clean.append((low, high))
            continue
        if low <= below:
            clean.append((low, below))
        if above <= high:
            clean.append((above, high))
    return CharSet(tuple(clean))


def characters(text: str) -> CharSet:
    """Returns the set of the text's characters."""
    return char_set((ord(char), ord(char)) for char in text)


ALL: Final = char_set([(0, MAX_CODE_POINT)])
NEWLINE: Final = characters("\n")
LINE_ENDS: Final = characters("\n\r\u2028\u2029")
ASCII_DIGITS: Final = char_set([(0x30, 0x39)])
ASCII_WORD: Final = char_set([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
ECMA_SPACE: Final = char_set(
    [
        (0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A),
        (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
    ]
)  # fmt: skip


def _runs(code_points: Iterable[int]) -> CharSet:
    ranges: list[tuple[int, int]] = []
    start = end = -2
    for code_point in code_points:
        if code_point != end + 1:
            if start >= 0:
                ranges.append((start, end))
            start = code_point
        end = code_point
    if start >= 0:
        ranges.append((start, end))
    return char_set(ranges)


def _assigned() -> Iterable[int]:
    for low, high in _ASSIGNED_SPANS:
        yield from range(low, high + 1)


@lru_cache(maxsize=1)
def unicode_digits() -> CharSet:
    r"""Returns what Python's ``\d`` matches."""
    return _runs(code for code in _assigned() if chr(code).isdecimal())


@lru_cache(maxsize=1)
def unicode_word() -> CharSet:
    r"""Returns what Python's ``\w`` matches."""
    return _runs(code for code in _assigned() if code == 0x5F or chr(code).isalnum())


@lru_cache(maxsize=1)
def unicode_space() -> CharSet:
    r"""Returns what Python's ``\s`` matches."""
    return _runs(code for code in range(0x3001) if chr(code).isspace())


_CATEGORY_NAMES: Final = {
    "Letter": "L", "Uppercase_Letter": "Lu", "Lowercase_Letter": "Ll", "Titlecase_Letter": "Lt", "Cased_Letter": "LC",
    "Modifier_Letter": "Lm", "Other_Letter": "Lo", "Mark": "M", "Nonspacing_Mark": "Mn", "Spacing_Mark": "Mc",
    "Enclosing_Mark": "Me", "Number": "N", "Decimal_Number": "Nd", "digit": "Nd", "Letter_Number": "Nl",
    "Other_Number": "No", "Punctuation": "P", "punct": "P", "Connector_Punctuation": "Pc", "Dash_Punctuation": "Pd",
    "Open_Punctuation": "Ps", "Close_Punctuation": "Pe", "Initial_Punctuation": "Pi", "Final_Punctuation": "Pf",
    "Other_Punctuation": "Po", "Symbol": "S", "Math_Symbol": "Sm", "Currency_Symbol": "Sc", "Modifier_Symbol": "Sk",
    "Other_Symbol": "So", "Separator": "Z", "Space_Separator": "Zs", "Line_Separator": "Zl",
    "Paragraph_Separator": "Zp",
}  # fmt: skip
_CATEGORIES: Final = frozenset(_CATEGORY_NAMES.values())


@lru_cache(maxsize=64)
def category(name: str) -> CharSet | None:
    r"""Returns the characters of a general category (``\p{name}``), or None for a name this module does not know.

    Category C (other) and its parts are left out: what is unassigned differs between Unicode versions.
    """
    if name == "ASCII":
        return char_set([(0, 0x7F)])
    if name == "Any":
        return ALL
    plain = name.removeprefix("General_Category=").removeprefix("gc=")
    wanted = _CATEGORY_NAMES.get(plain, plain)
    if wanted not in _CATEGORIES:
        return None
    kinds = ("Lu", "Ll", "Lt") if wanted == "LC" else (wanted,)
    return _runs(code for code in _assigned() if unicodedata.category(chr(code)).startswith(kinds))
