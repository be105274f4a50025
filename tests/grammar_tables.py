"""The tables of docs/grammars.md, made from the code; ``python tests/grammar_tables.py`` writes them there."""

from __future__ import annotations

from pathlib import Path

from document_tables import table, with_sections

from grammar_sync import spec
from grammar_sync.fill_pool import DEFAULT_DEADLINE_S
from grammar_sync.regular.formats import format_rules
from grammar_sync.regular.language import MAX_COUNTED_LENGTH
from grammar_sync.regular.parse import MAX_GROUP_DEPTH
from grammar_sync.regular.syntax import MAX_REPEAT
from grammar_sync.schema.grammar import MAX_ITEMS, MAX_LENGTH, MAX_RULES
from grammar_sync.schema.keywords import KEYWORDS
from grammar_sync.schema.numbers import MAX_DIGITS
from grammar_sync.schema.walk import MAX_ALTERNATIVES, MAX_STEPS
from grammar_sync.vetting.messages import VettingLimits

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "grammars.md"


def generated(text: str) -> str:
    """Returns a document with all its generated sections as the code has them."""
    return with_sections(text, {"keywords": _keywords(), "formats": _formats(), "limits": _limits()})


def _keywords() -> str:
    rows = [
        (f"`{keyword}`", enforcement.status, enforcement.note, enforcement.negated)
        for keyword, enforcement in KEYWORDS.items()
        if enforcement.status != "annotation"
    ]
    return table(("Keyword", "Enforced", "Good to know", "Negated"), rows)


def _formats() -> str:
    rows = [(f"`{rule.name}`", rule.status, rule.note) for rule in format_rules()]
    return table(("Format", "Enforced", "How"), rows)


def _limits() -> str:
    vetting = VettingLimits()
    rows = [
        ("Text of a grammar", f"{spec.MAX_SOURCE_BYTES:,} bytes"),
        (
            "Nested values, or open parentheses",
            f"{spec.MAX_NESTING}; groups of a regular expression: {MAX_GROUP_DEPTH}",
        ),
        ("Values of an `enum` or a `choice`", f"{spec.MAX_ENUM_VALUES:,}"),
        ("Different `$ref` targets", f"{spec.MAX_REFERENCES}"),
        ("Steps in which a schema is taken apart", f"{MAX_STEPS:,}"),
        ("Rules that a schema becomes", f"{MAX_RULES:,}"),
        ("Items that llguidance keeps at one place of an output", "2,000: hundreds of required properties, say"),
        ("Properties of one object", f"{spec.MAX_PROPERTIES:,}"),
        ("Entries of an `anyOf`, `oneOf`, `allOf` or `prefixItems`", f"{spec.MAX_BRANCHES}"),
        ("Alternatives that `anyOf`, `oneOf`, `if` and `not` at one place multiply to", f"{MAX_ALTERNATIVES}"),
        (
            "`minLength`; a greater `maxLength` is cut to it",
            f"{MAX_LENGTH:,}; beside `pattern` or `format` {MAX_COUNTED_LENGTH:,}",
        ),
        ("`minItems`; a greater `maxItems` is cut to it", f"{MAX_ITEMS:,}"),
        ("Digits, or decimals, of a bound on a number", f"{MAX_DIGITS}"),
        ("Count of a repetition in a regular expression", f"{MAX_REPEAT:,}"),
        ("Compiling", f"{vetting.deadline_s:g} s of CPU (`--grammar-timeout`)"),
        ("Memory of a compile", f"{vetting.memory_bytes >> 20} MiB (`--grammar-memory-bytes`)"),
        ("A mask, when a grammar is vetted", f"{vetting.fill_limit_s:g} s of CPU"),
        ("A mask, in a run", f"{DEFAULT_DEADLINE_S:g} s of CPU"),
    ]
    return table(("What", "At most"), rows)


if __name__ == "__main__":
    DOCUMENT.write_text(generated(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
