"""What an engine compiles: a grammar in a language of that engine, and what its client should know about it.

Needs neither torch nor a grammar engine.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from grammar_sync.spec import GrammarOptions

Engine = Literal["xgrammar", "llguidance"]
Language = Literal["regex", "ebnf", "lark", "structural_tag"]


class CompileError(ValueError):
    """A grammar cannot be compiled: the client's fault, told in one line."""


class Finding(msgspec.Struct, frozen=True):
    """One thing about a grammar that its client should know.

    Attributes:
        path: JSON pointer into the schema; empty for its root and for grammars that are no schema.
        keyword: What it is about, for example ``uniqueItems``.
        message: One line.
    """

    path: str
    keyword: str
    message: str


class PreparedGrammar(msgspec.Struct, frozen=True):
    """A grammar ready for one engine.

    Attributes:
        engine: Which engine compiles it.
        language: What ``source`` is in.
        source: The text that the engine reads.
        options: How it is to be enforced; what concerns the schema alone is already part of ``source``.
        not_enforced: What the output may violate; when ``options.strict``, no more than formats that are not known, and
            ``max_string_length`` where it cannot be applied.
        rewritten: Where ``source`` allows less than was asked for, or says it in another way.
    """

    engine: Engine
    language: Language
    source: str
    options: GrammarOptions
    not_enforced: tuple[Finding, ...] = ()
    rewritten: tuple[Finding, ...] = ()
