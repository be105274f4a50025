"""What the functions of keywords are called with, and the checks they ask for on the same value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from grammar_sync.schema.document import Document, Schema
from grammar_sync.schema.goals import Check
from grammar_sync.schema.values import listing


class Context:
    """What the functions of this module and the next need beside the schema.

    Args:
        document: Where references are looked up.
        is_disjoint: Whether no value is surely valid under both of two schemas.
        known_format: Whether a format's name means something.
    """

    def __init__(
        self,
        document: Document,
        is_disjoint: Callable[[Schema, Schema], bool],
        known_format: Callable[[str], bool],
    ) -> None:
        self.document = document
        self.is_disjoint = is_disjoint
        self.known_format = known_format


@dataclass(frozen=True)
class Site:
    """A check at work: what the function of a keyword is called with.

    Attributes:
        context: What is known beside the schema.
        check: What is checked.
    """

    context: Context
    check: Check

    @property
    def schema(self) -> Schema:
        """The schema that has the keyword."""
        return self.check.schema


def inner(check: Check, schema: Schema, *, positive: bool = True) -> Check:
    """Returns the check of a schema that applies to the same value."""
    return Check(schema, positive, check.via | {check.schema}, check.scopes if positive else frozenset())


def inner_checks(context: Context, check: Check, keyword: str, *, positive: bool = True) -> tuple[Check, ...]:
    """Returns the checks of all schemas in a keyword's list."""
    schema = check.schema
    count_ = len(listing(schema, keyword))
    return tuple(
        inner(check, context.document.child(schema, keyword, index), positive=positive) for index in range(count_)
    )
