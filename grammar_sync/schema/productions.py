"""Context-free grammars that engines do not know yet, and how to write them in the language of each engine.

A rule is a :class:`Terminal`, a regular language of its own, or an expression over other rules. Terminals are what a
lexer may read as one token: no two neighbours in a rule can run into each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from grammar_sync.engines.prepared import CompileError
from grammar_sync.regular.chars import RegularError
from grammar_sync.regular.language import Language

_EBNF_PARTS: Final = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]| ::=')
"""A quoted text, a class of characters, or what stands between a rule's name and its body."""

_LONGEST_NAME: Final = "t0000_text"
"""A rule's name as long as any: names count for the length of what is written."""

MAX_GRAMMAR_BYTES: Final = 512 << 10
"""Bound on a grammar as written for an engine."""


@dataclass(frozen=True)
class Literal:
    """A fixed text."""

    text: str


@dataclass(frozen=True)
class Call:
    """What a rule allows."""

    rule: str


@dataclass(frozen=True)
class Sequence:
    """One after another."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True)
class Options:
    """Any one of them; none at all: nothing is allowed."""

    options: tuple[Expression, ...]


@dataclass(frozen=True)
class Repeated:
    """The body ``least`` to ``most`` times (None: no bound)."""

    body: Expression
    least: int
    most: int | None


@dataclass(frozen=True)
class Terminal:
    """A regular language.

    Attributes:
        language: The texts.
        json_encoded: Whether they are to be written as inside a JSON string.
        quoted: Whether quotes stand around them.
    """

    language: Language
    json_encoded: bool = False
    quoted: bool = False

    def check(self) -> None:
        """Checks that it can be written for some engine.

        Raises:
            RegularError: It is too large.
        """
        try:
            self.language.to_ebnf(_LONGEST_NAME, json_encoded=self.json_encoded)
        except RegularError:
            self.language.to_regex(json_encoded=self.json_encoded)


Expression: TypeAlias = Literal | Call | Sequence | Options | Repeated

EMPTY: Final = Sequence(())
NOTHING: Final = Options(())


def sequence(*parts: Expression) -> Expression:
    """Returns the parts one after another, simplified."""
    flat: list[Expression] = []
    for part in parts:
        for piece in part.parts if isinstance(part, Sequence) else (part,):
            if flat and isinstance(piece, Literal) and isinstance(flat[-1], Literal):
                flat[-1] = Literal(flat[-1].text + piece.text)
            else:
                flat.append(piece)
    return NOTHING if NOTHING in flat else flat[0] if len(flat) == 1 else Sequence(tuple(flat))


def options(*given: Expression) -> Expression:
    """Returns any one of the parts, simplified."""
    flat: dict[Expression, None] = {}
    for one in given:
        flat.update(dict.fromkeys(one.options if isinstance(one, Options) else (one,)))
    return next(iter(flat)) if len(flat) == 1 else Options(tuple(flat))


def optional(body: Expression) -> Expression:
    """Returns the body or nothing."""
    return repeated(body, 0, 1)


def repeated(body: Expression, least: int, most: int | None) -> Expression:
    """Returns the body so many times, simplified."""
    if most == 0 or body == EMPTY:
        return EMPTY
    if body == NOTHING:
        return NOTHING if least else EMPTY
    return body if least == most == 1 else Repeated(body, least, most)


Rules: TypeAlias = Mapping[str, Expression | Terminal]


def calls(expression: Expression | Terminal) -> Iterator[str]:
    """Yields the names of the rules that an expression calls."""
    stack: list[Expression | Terminal] = [expression]
    while stack:
        found = stack.pop()
        if isinstance(found, Call):
            yield found.rule
        elif isinstance(found, Sequence):
            stack.extend(reversed(found.parts))
        elif isinstance(found, Options):
            stack.extend(reversed(found.options))
        elif isinstance(found, Repeated):
            stack.append(found.body)


class NoOutputError(CompileError):
    """A grammar has no text at all.

    Args:
        rules: The rules that none has, from the root on: each is needed by the one before it.
    """

    def __init__(self, rules: tuple[str, ...]) -> None:
        super().__init__("the grammar allows no output at all")
        self.rules = rules


def productive(rules: Rules, root: str) -> dict[str, Expression | Terminal]:
    """Returns the rules that lead from ``root`` to some text, without the options that lead nowhere.

    Raises:
        NoOutputError: None does.
    """
    known = {name for name, body in rules.items() if isinstance(body, Terminal)}
    callers: dict[str, list[str]] = {}
    for name, body in rules.items():
        for called in set(calls(body)):
            callers.setdefault(called, []).append(name)
    waiting = list(rules)
    while waiting:
        name = waiting.pop()
        body = rules[name]
        fresh = name not in known and not isinstance(body, Terminal) and _reaches(body, known)
        if fresh:
            known.add(name)
            waiting.extend(callers.get(name, ()))
    if root not in known:
        raise NoOutputError(_dead_ends(rules, root, known))
    kept: dict[str, Expression | Terminal] = {}
    stack = [root]
    while stack:
        name = stack.pop()
        if name not in kept:
            body = rules[name]
            kept[name] = body if isinstance(body, Terminal) else _without(body, known)
            stack.extend(dict.fromkeys(calls(kept[name])))
    return {name: kept[name] for name in rules if name in kept}


def _dead_ends(rules: Rules, root: str, known: set[str]) -> tuple[str, ...]:
    """Returns the rules without a text that ``root`` needs, each needed by the one before it."""
    found: dict[str, None] = {}
    name: str | None = root
    while name is not None and name not in found:
        found[name] = None
        body = rules[name]
        name = None if isinstance(body, Terminal) else _needed(body, known)
    return tuple(found)


def _needed(body: Expression, known: set[str]) -> str | None:
    """Returns a rule without a text that an expression cannot do without; None where it is at an end for itself."""
    if isinstance(body, Call):
        return body.rule
    if isinstance(body, Sequence):
        return next((_needed(part, known) for part in body.parts if not _reaches(part, known)), None)
    return _needed(body.body, known) if isinstance(body, Repeated) else None


def _reaches(body: Expression, known: set[str]) -> bool:
    if isinstance(body, Call):
        return body.rule in known
    if isinstance(body, Sequence):
        return all(_reaches(part, known) for part in body.parts)
    if isinstance(body, Options):
        return any(_reaches(option, known) for option in body.options)
    return True if isinstance(body, Literal) else body.least == 0 or _reaches(body.body, known)


def _without(body: Expression, known: set[str]) -> Expression:
    if not _reaches(body, known):
        return NOTHING
    if isinstance(body, Sequence):
        return sequence(*(_without(part, known) for part in body.parts))
    if isinstance(body, Options):
        return options(*(_without(option, known) for option in body.options if _reaches(option, known)))
    if isinstance(body, Repeated):
        return repeated(_without(body.body, known), body.least, body.most)
    return body


def ebnf(rules: Rules, root: str) -> str:
    """Returns the grammar in xgrammar's EBNF, starting at ``root``.

    Raises:
        RegularError: A language is empty or too large to be written.
        CompileError: The grammar is too long.
    """
    lines = []
    for name in (root, *(name for name in rules if name != root)):
        body = rules[name]
        if isinstance(body, Terminal):
            inner = f"{name}_text" if body.quoted else name
            if body.quoted:
                lines.append(f'{name} ::= "\\"" {inner} "\\""')
            lines.append(body.language.to_ebnf(inner, json_encoded=body.json_encoded))
        else:
            lines.append(f"{name} ::= {_ebnf(body)}")
    return _bounded(lines)


def _ebnf(body: Expression) -> str:
    if isinstance(body, Literal):
        return quoted(body.text, for_lark=False)
    if isinstance(body, Call):
        return body.rule
    if isinstance(body, Sequence):
        return " ".join(f"({_ebnf(part)})" if isinstance(part, Options) else _ebnf(part) for part in body.parts) or '""'
    if isinstance(body, Options):
        return " | ".join(_ebnf(option) for option in body.options)
    return f"({_ebnf(body.body)}){_counts(body)}"


def lark(rules: Rules, root: str) -> str:
    """Returns the grammar in llguidance's Lark, starting at ``root``.

    Raises:
        RegularError: A language is empty or too large to be written.
        CompileError: The grammar is too long.
    """
    names: dict[str, str] = {}
    lines: list[str] = []
    for name, body in rules.items():
        if isinstance(body, Terminal):
            names[name], text = _lark_terminal(name, body)
            lines.append(text)
    lines.extend(f"r_{name}: {_lark(body, names)}" for name, body in rules.items() if not isinstance(body, Terminal))
    return _bounded([f"start: {names.get(root, f'r_{root}')}", *lines])


def _lark_terminal(name: str, body: Terminal) -> tuple[str, str]:
    """Returns the name of a terminal, and its definition: an expression, or rules where that would be too large."""
    try:
        regex = body.language.to_regex(json_encoded=body.json_encoded)
    except RegularError:
        inner = f"{name}_text" if body.quoted else name
        text = _EBNF_PARTS.sub(_lark_part, body.language.to_ebnf(inner, json_encoded=body.json_encoded))
        return name, f'{name}: "\\"" {inner} "\\""\n{text}' if body.quoted else text
    return f"T_{name.upper()}", f"T_{name.upper()}: " + (f'/"(?:{regex})"/' if body.quoted else f"/{regex}/")


def _lark_part(found: re.Match[str]) -> str:
    part = found[0]
    return ":" if part == " ::=" else part if part[0] == '"' else f"/{part}/"


def _lark(body: Expression, terminals: Mapping[str, str]) -> str:
    if isinstance(body, Literal):
        return quoted(body.text, for_lark=True)
    if isinstance(body, Call):
        return terminals.get(body.rule, f"r_{body.rule}")
    if isinstance(body, Sequence):
        parts = (_lark(part, terminals) for part in body.parts)
        texts = [
            f"({text})" if isinstance(part, Options) else text for part, text in zip(body.parts, parts, strict=True)
        ]
        return " ".join(texts) or '""'
    if isinstance(body, Options):
        return " | ".join(_lark(option, terminals) for option in body.options)
    return f"({_lark(body.body, terminals)}){_counts(body)}"


def _counts(body: Repeated) -> str:
    plain = {(0, 1): "?", (0, None): "*", (1, None): "+"}.get((body.least, body.most))
    if plain is not None:
        return plain
    return f"{{{body.least},{'' if body.most is None else body.most}}}"


def quoted(text: str, *, for_lark: bool) -> str:
    r"""Returns a text in quotes, as one of the engines reads it: Lark's texts have no ``\U``."""
    return '"' + "".join(_character(char, for_lark=for_lark) for char in text) + '"'


def _character(char: str, *, for_lark: bool) -> str:
    if char in '"\\':
        return "\\" + char
    code = ord(char)
    if char.isprintable() or (for_lark and code > 0xFFFF):
        return char
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def _bounded(lines: Iterable[str]) -> str:
    text = "\n".join(lines)
    size_bytes = len(text.encode())
    if size_bytes > MAX_GRAMMAR_BYTES:
        raise CompileError(
            f"the grammar has {size_bytes} bytes when written out, at most {MAX_GRAMMAR_BYTES} are allowed"
        )
    return text
