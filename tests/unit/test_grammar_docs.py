"""docs/grammars.md says what the code does."""

from __future__ import annotations

from grammar_tables import DOCUMENT, generated

from grammar_sync.spec import GRAMMAR_FIELDS, GRAMMAR_OPTION_FIELDS


def test_tables_are_those_of_the_code() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == generated(text), "run: python tests/grammar_tables.py"


def test_every_field_is_told() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for name in (*GRAMMAR_FIELDS, *GRAMMAR_OPTION_FIELDS):
        assert f"`{name}`" in text, name
