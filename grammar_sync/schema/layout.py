"""How JSON is laid out: separators, blanks, and the spellings of fixed values."""

from __future__ import annotations

import json
from typing import Any, Final

from grammar_sync.regular.language import whole_regex
from grammar_sync.schema.productions import Call, Expression, Literal, Terminal, optional, options, sequence
from grammar_sync.spec import GrammarOptions

BLANKS: Final = "blanks"


class Layout:
    """The separators of one grammar.

    Args:
        options_: ``any_whitespace`` and ``max_whitespace`` count.
    """

    def __init__(self, options_: GrammarOptions) -> None:
        self._most = options_.max_whitespace if options_.any_whitespace else 0
        blank: Expression = optional(Call(BLANKS)) if self._most else sequence()
        spaced = not options_.any_whitespace
        self._blank = blank
        self.comma = Literal(", ") if spaced else sequence(blank, Literal(","), blank)
        self.colon = Literal(": ") if spaced else sequence(blank, Literal(":"), blank)

    def blanks(self) -> dict[str, Terminal]:
        """Returns the rule that the separators call, if they do."""
        if not self._most:
            return {}
        return {BLANKS: Terminal(whole_regex(f"[ \\n\\r\\t]{{1,{self._most}}}"))}

    def between(self, opening: str, body: Expression | None, closing: str) -> Expression:
        """Returns a body between brackets; None: nothing but blanks between them."""
        if body is None:
            return sequence(Literal(opening), self._blank, Literal(closing))
        return sequence(Literal(opening), self._blank, body, self._blank, Literal(closing))

    def value(self, value: Any) -> Expression:
        """Returns the spellings of one value, an object's properties in its own order."""
        if isinstance(value, dict):
            members = [sequence(text_spellings(name), self.colon, self.value(item)) for name, item in value.items()]
            return self.between("{", self._joined(members), "}")
        if isinstance(value, list):
            return self.between("[", self._joined([self.value(item) for item in value]), "]")
        if isinstance(value, str):
            return text_spellings(value)
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            return options(Literal(str(int(value))), Literal(json.dumps(value)))
        return Literal(json.dumps(value))

    def _joined(self, parts: list[Expression]) -> Expression | None:
        if not parts:
            return None
        return sequence(parts[0], *(sequence(self.comma, part) for part in parts[1:]))


def text_spellings(text: str) -> Expression:
    """Returns a string as JSON: as it is, and with all that is not ASCII escaped."""
    return options(Literal(json.dumps(text, ensure_ascii=False)), Literal(json.dumps(text)))
