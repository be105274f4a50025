"""The rules of an EBNF, written for each engine.

llguidance reads texts greedily: where one text of a grammar begins another, it goes on with the longer one alone. The
texts of such a grammar are written for it character by character, since no character begins another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from grammar_sync.engines.ebnf_pieces import COUNT_SIGNS, Piece
from grammar_sync.regular.chars import char_set
from grammar_sync.regular.syntax import Chars
from grammar_sync.regular.write import ebnf_expression
from grammar_sync.schema.productions import Call, Literal, quoted

_Rules: TypeAlias = Mapping[str, list[Piece]]


def xgrammar_form(rules: _Rules, start: str) -> str:
    """Returns the rules in xgrammar's EBNF, starting at ``root``.

    Raises:
        RegularError: A class of characters becomes too long.
    """

    def written(piece: Piece) -> str:
        if isinstance(piece, Call):
            return "root" if piece.rule == start else f"r_{piece.rule}"
        if isinstance(piece, Literal):
            return quoted(piece.text, for_lark=False)
        return ebnf_expression(piece) if isinstance(piece, Chars) else piece

    return "\n".join(f"{written(Call(name))} ::={_joined(map(written, body))}" for name, body in rules.items())


def llguidance_form(rules: _Rules, start: str) -> str:
    """Returns the rules in llguidance's Lark.

    Raises:
        RegularError: A class of characters becomes too long.
    """
    names = {name: "start" if name == start else f"r{index}" for index, name in enumerate(rules)}
    spelled = _must_be_spelled(piece for body in rules.values() for piece in body)

    def written(piece: Piece) -> str:
        if isinstance(piece, Call):
            return names[piece.rule]
        if isinstance(piece, Literal):
            parts = piece.text if spelled and len(piece.text) > 1 else (piece.text,)
            text = " ".join(quoted(part, for_lark=True) for part in parts)
            return f"({text})" if len(parts) > 1 else text
        if isinstance(piece, Chars):
            first = piece.chars.ranges[0][0]
            return quoted(chr(first), for_lark=True) if piece.chars.size() == 1 else f"/{ebnf_expression(piece)}/"
        return piece

    return "\n".join(f"{names[name]}:{_joined(map(written, body))}" for name, body in rules.items())


def _must_be_spelled(pieces: Iterable[Piece]) -> bool:
    """Returns whether a text or a single character of the grammar is the beginning of another of its texts."""
    texts: set[str] = set()
    spans: list[tuple[int, int]] = []
    for piece in pieces:
        if isinstance(piece, Literal):
            texts.add(piece.text)
        elif isinstance(piece, Chars):
            spans.extend(piece.chars.ranges)
    singles = char_set(spans)
    lengths = {len(text) for text in texts if text}
    return any(
        ord(text[0]) in singles or any(text[:length] in texts for length in lengths if length < len(text))
        for text in texts
        if len(text) > 1
    )


def _joined(written: Iterable[str]) -> str:
    return "".join(part if part[0] in COUNT_SIGNS else f" {part}" for part in written)
