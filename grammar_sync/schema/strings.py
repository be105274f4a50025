"""Strings and property names as regular languages, from lengths, patterns, formats and excluded values."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache, partial
from typing import Final

import jsonschema

from grammar_sync.engines.prepared import Finding
from grammar_sync.regular.chars import RegularError
from grammar_sync.regular.formats import format_language, format_rule, format_rules
from grammar_sync.regular.language import Language, not_pattern, pattern, strings, whole_regex, words
from grammar_sync.schema.productions import Terminal
from grammar_sync.schema.state import Strings, TextConstraint

# One character of a JSON string in any of its spellings; surrogates come in pairs or not at all.
_UNIT: Final = (
    r"(?:[^\"\\\x00-\x1f]|\\(?:[\"\\/bfnrt]|u(?:[0-9a-ce-fA-CE-F][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}"
    r"|[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})))"
)


class TextError(ValueError):
    """A string's constraint cannot be enforced.

    Args:
        path: Where the constraint is.
        keyword: ``pattern``, ``format``, or where several meet, the first one's.
        message: Why not.
    """

    def __init__(self, path: str, keyword: str, message: str) -> None:
        super().__init__(message)
        self.path = path
        self.keyword = keyword


@lru_cache(maxsize=512)
def _pattern(text: str, *, positive: bool) -> Language:
    return pattern(text) if positive else not_pattern(text)


def format_checker() -> jsonschema.FormatChecker:
    """Returns what judges values by the formats that are known here."""
    checker = jsonschema.FormatChecker(formats=())
    for rule in format_rules():
        language = format_language(rule.name)
        if language is not None:
            checker.checks(rule.name)(partial(_is_of, language))
    return checker


def _is_of(language: Language, value: object) -> bool:
    return not isinstance(value, str) or language.fullmatch(value)


def known_format(name: str) -> bool:
    """Returns whether a format's name says which strings are valid."""
    return format_rule(name).status in ("exact", "narrower", "refused")


def annotation_note(name: str) -> str:
    """Returns why a format that is not enforced says nothing about which values are valid."""
    rule = format_rule(name)
    return f"the format {name!r} is " + (f"an annotation ({rule.note})" if rule.status == "annotation" else "not known")


def name_matches(text: str, name: str) -> bool:
    """Returns whether a property's name matches a pattern of ``patternProperties``.

    Raises:
        RegularError: The pattern is wrong or no regular language, or its readings differ on this name.
    """
    matches = _pattern(text, positive=True).fullmatch(name)
    if not matches and not _pattern(text, positive=False).fullmatch(name):
        raise RegularError(f"the pattern {text!r} may or may not match the name {name!r}: libraries differ")
    return matches


def pattern_language(text: str, *, positive: bool) -> Language:
    """Returns the strings that match a pattern, by every reading of it; or those that do not, by any.

    Raises:
        RegularError: The pattern is wrong or no regular language.
    """
    return _pattern(text, positive=positive)


def wrong_pattern(texts: Iterable[str]) -> str | None:
    """Returns the first pattern that is wrong, or no regular language, by itself."""
    for text in texts:
        try:
            pattern_language(text, positive=True)
        except RegularError:
            return text
    return None


def constraint_language(constraint: TextConstraint) -> Language:
    """Returns the strings that meet a constraint.

    Raises:
        TextError: It cannot be enforced.
    """
    keyword = constraint.path.rpartition("/")[2]
    try:
        if constraint.kind == "pattern":
            return _pattern(constraint.text, positive=constraint.positive)
        rule = format_rule(constraint.text)
        language = format_language(constraint.text)
    except RegularError as error:
        raise TextError(constraint.path, keyword, str(error)) from error
    if language is None:
        raise TextError(constraint.path, keyword, f"the format {rule.name!r} cannot be enforced: {rule.note}")
    if constraint.positive:
        return language
    if rule.status != "exact":
        raise TextError(constraint.path, keyword, f"the format {rule.name!r} cannot be negated")
    return language.complement()


def narrowing(constraint: TextConstraint) -> Finding | None:
    """Returns what a format's language leaves out, if anything."""
    if constraint.kind != "format" or not constraint.positive:
        return None
    rule = format_rule(constraint.text)
    if rule.status != "narrower":
        return None
    return Finding(constraint.path, "format", f"{rule.name}: {rule.note}")


def string_language(record: Strings) -> Language:
    """Returns the strings of a record, by value.

    Raises:
        TextError: A constraint cannot be enforced, alone or together with the others.
    """
    languages = [constraint_language(constraint) for constraint in dict.fromkeys(record.constraints)]
    try:
        found = strings(record.min_length, record.max_length)
        if languages:
            found = languages[0].intersect(*languages[1:]).with_length(record.min_length, record.max_length)
        return found.minus(words(sorted(record.excluded))) if record.excluded else found
    except RegularError as error:
        raise _text_error(record, error) from error


def _text_error(record: Strings, error: RegularError) -> TextError:
    path = record.constraints[0].path if record.constraints else ""
    return TextError(path, path.rpartition("/")[2], str(error))


def natural_lengths(record: Strings) -> tuple[int, int | None]:
    """Returns the least and greatest length of a record's strings (None: no bound); (0, 0) where there are none.

    Raises:
        TextError: A constraint cannot be enforced, alone or together with the others.
    """
    if not record.constraints:
        return record.min_length, record.max_length
    try:
        return string_language(record).lengths() or (0, 0)
    except RegularError as error:
        raise _text_error(record, error) from error


def string_terminal(record: Strings) -> Terminal:
    """Returns the JSON texts of a record's strings.

    Strings that only have a length may be spelled in any way that JSON allows. Others are spelled as ``json.dumps``
    with ``ensure_ascii=False`` does.

    Raises:
        TextError: A constraint cannot be enforced, alone or together with the others.
    """
    if record.constraints or record.excluded:
        terminal = Terminal(string_language(record), json_encoded=True, quoted=True)
        try:
            if not terminal.language.is_empty():
                terminal.check()
        except RegularError as error:
            raise _text_error(record, error) from error
        return terminal
    least, most = record.min_length, record.max_length
    counts = "*" if (least, most) == (0, None) else f"{{{least},{'' if most is None else most}}}"
    return Terminal(whole_regex(f"{_UNIT}{counts}"), quoted=True)
