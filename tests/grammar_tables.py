"""The tables of docs/grammars.md, made from the code; ``python tests/grammar_tables.py`` writes them there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from grammar_sync import spec
from grammar_sync.fill_pool import DEFAULT_DEADLINE_S
from grammar_sync.regular.formats import format_rules
from grammar_sync.schema.keywords import KEYWORDS
from grammar_sync.vetting.messages import VettingLimits

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "grammars.md"


def generated(text: str) -> str:
    """Returns a document with all its generated sections as the code has them."""
    for name, table in (("keywords", _keywords()), ("formats", _formats()), ("limits", _limits())):
        pattern = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, count = pattern.subn(lambda found, table=table: found[1] + table + found[2], text)  # type: ignore[misc]
        if count != 1:
            raise ValueError(f"the document has {count} sections {name}")
    return text


def _keywords() -> str:
    rows = [
        (f"`{keyword}`", enforcement.status, enforcement.note, enforcement.negated)
        for keyword, enforcement in KEYWORDS.items()
        if enforcement.status != "annotation"
    ]
    return _table(("Keyword", "Enforced", "Good to know", "Negated"), rows)


def _formats() -> str:
    rows = [(f"`{rule.name}`", rule.status, rule.note) for rule in format_rules()]
    return _table(("Format", "Enforced", "How"), rows)


def _limits() -> str:
    vetting = VettingLimits()
    rows = [
        ("Text of a grammar", f"{spec.MAX_SOURCE_BYTES:,} bytes"),
        ("Nested values, or open parentheses", f"{spec.MAX_NESTING}"),
        ("Values of an `enum` or a `choice`", f"{spec.MAX_ENUM_VALUES:,}"),
        ("Different `$ref` targets", f"{spec.MAX_REFERENCES}"),
        ("Compiling", f"{vetting.deadline_s:g} s of CPU (`--grammar-timeout`)"),
        ("Memory of a compile", f"{vetting.memory_bytes >> 20} MiB (`--grammar-memory-bytes`)"),
        ("A mask, when a grammar is vetted", f"{vetting.fill_limit_s:g} s of CPU"),
        ("A mask, in a run", f"{DEFAULT_DEADLINE_S:g} s of CPU"),
    ]
    return _table(("What", "At most"), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


if __name__ == "__main__":
    DOCUMENT.write_text(generated(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
