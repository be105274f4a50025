"""Sections of documents that are made from the code, between ``<!-- generated: NAME -->`` and ``<!-- end -->``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence


def with_sections(text: str, sections: Mapping[str, str]) -> str:
    """Returns a document with its generated sections as given; it has each exactly once."""
    for name, section in sections.items():
        pattern = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, count = pattern.subn(lambda found, section=section: found[1] + section + found[2], text)  # type: ignore[misc]
        if count != 1:
            raise ValueError(f"the document has {count} sections {name}")
    return text


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)
