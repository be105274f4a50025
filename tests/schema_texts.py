"""Says which texts a JSON Schema's grammar takes, with a small byte-level vocabulary."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from grammars import Speller, small_vocabulary

from grammar_sync.engines.backend import CompiledGrammar
from grammar_sync.engines.prepared import PreparedGrammar
from grammar_sync.engines.routing import Policy, RoutingBackend
from grammar_sync.spec import parse_grammar


@cache
def backend(policy: Policy) -> RoutingBackend:
    return RoutingBackend(small_vocabulary(), policy)


@cache
def speller() -> Speller:
    return Speller(small_vocabulary())


@dataclass(frozen=True)
class Taker:
    """A compiled grammar that takes texts."""

    prepared: PreparedGrammar
    compiled: CompiledGrammar

    def takes(self, text: str) -> bool:
        """Returns whether the grammar takes the text and then the end."""
        matcher = self.compiled.new_matcher()
        ids = [*speller().ids(text), small_vocabulary().stop_token_ids[0]]
        return all(matcher.accept(token_id) for token_id in ids)

    def takes_value(self, value: Any) -> bool:
        """Returns whether the grammar takes a value as json.dumps writes it with its characters as they are."""
        return self.takes(json.dumps(value, ensure_ascii=False))


def taker(policy: Policy = "llguidance", **fields: Any) -> Taker:
    """Returns what a grammar's fields are compiled to.

    Raises:
        CompileError: They are refused.
    """
    spec = parse_grammar(fields)
    assert spec is not None
    prepared = backend(policy).prepare(spec)[0]
    return Taker(prepared, backend(policy).compile(prepared))


def json_taker(schema: Any, policy: Policy = "llguidance", **fields: Any) -> Taker:
    """Returns what a schema is compiled to.

    Raises:
        CompileError: It is refused.
    """
    return taker(policy, json_schema=schema, **fields)
