"""What could come next in an output, in words."""

from __future__ import annotations

from collections.abc import Sequence

END_OF_OUTPUT = "the end of the output"

_ASCII_END = 0x80
_PRINTABLE = frozenset(chr(code) for code in range(0x20, 0x7F))
_NAMES = {" ": "a blank", "\n": "a line end", "\t": "a tab", "\r": "a carriage return"}
_BEYOND_ASCII = "a character beyond ASCII"
_LEAST_RANGE = 3
_FEW_MISSING = 20


def describe(alternatives: Sequence[bytes], *, may_end: bool) -> str:
    """Returns what may come next as a phrase such as ``0-9, '-' or the end of the output``.

    Args:
        alternatives: How the output may go on, in UTF-8; each different in its first byte, and perhaps cut short
            inside its last character.
        may_end: Whether it may end instead.
    """
    literals: list[str] = []
    singles: set[str] = set()
    is_beyond = False
    for alternative in alternatives:
        text = alternative.decode(errors="ignore")
        if not text:
            is_beyond = True
        elif len(text) == 1 and ord(text) < _ASCII_END:
            singles.add(text)
        else:
            literals.append(repr(text))
    phrases = [*literals, *_characters(singles, is_beyond=is_beyond)]
    if may_end:
        phrases.append(END_OF_OUTPUT)
    if not phrases:
        return "nothing: the grammar allows no way on"
    return " or ".join(filter(None, (", ".join(phrases[:-1]), phrases[-1])))


def _characters(characters: set[str], *, is_beyond: bool) -> list[str]:
    """Returns phrases for single ASCII characters, and for any others; blanks come last."""
    missing = sorted(_PRINTABLE - characters)
    if len(missing) <= _FEW_MISSING:
        whole = "any printable character" if is_beyond else "any printable ASCII character"
        but = f" (but not {', '.join(_ranges(missing))})" if missing else ""
        named = [name for character, name in _NAMES.items() if character in characters - _PRINTABLE]
        return [whole + but, *named]
    blanks = characters.intersection(_NAMES)
    phrases = _ranges(sorted(characters - blanks))
    return phrases + [_BEYOND_ASCII] * is_beyond + [name for blank, name in _NAMES.items() if blank in blanks]


def _ranges(characters: Sequence[str]) -> list[str]:
    """Returns sorted characters, runs of letters or of digits as ``a-z``."""
    phrases: list[str] = []
    start = 0
    for index in range(1, len(characters) + 1):
        if index < len(characters) and _continues(characters[index - 1], characters[index]):
            continue
        run = characters[start:index]
        if len(run) >= _LEAST_RANGE:
            phrases.append(f"{run[0]}-{run[-1]}")
        else:
            phrases += (_NAMES.get(character, repr(character)) for character in run)
        start = index
    return phrases


def _continues(left: str, right: str) -> bool:
    return left.isalnum() and right.isalnum() and ord(right) == ord(left) + 1
