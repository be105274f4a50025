"""Grammars that broke comparable systems (SCENARIOS T5 to T9): each is refused in one line, or does what it says."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from grammars import small_vocabulary
from hostile_grammars import HOSTILE, Hostile

from grammar_sync.backend import compile_spec
from grammar_sync.prepared import CompileError
from grammar_sync.spec import GrammarError, parse_grammar
from grammar_sync.xgrammar_backend import XGrammarBackend

_TEXT_KINDS = {"regex", "ebnf"}


def of(*scenarios: str) -> dict[str, Hostile]:
    return {name: one for name, one in HOSTILE.items() if one.scenario in scenarios}


@cache
def backend() -> XGrammarBackend:
    torch.set_num_threads(1)
    return XGrammarBackend(small_vocabulary())


def check_one_line(message: str) -> None:
    assert message
    assert "\n" not in message
    assert len(message) <= 600


@pytest.mark.parametrize("name", [name for name, one in HOSTILE.items() if one.at_the_door])
def test_t5_t6_t7_refused_at_the_door(name: str) -> None:
    """What is beyond a bound is refused before any engine sees it, naming the field."""
    with pytest.raises(GrammarError) as caught:
        parse_grammar(HOSTILE[name].fields)
    assert caught.value.param in HOSTILE[name].fields
    check_one_line(str(caught.value))


def test_every_other_passes_the_door() -> None:
    for name, one in HOSTILE.items():
        assert one.at_the_door or parse_grammar(one.fields) is not None, name


@pytest.mark.parametrize("name", [name for name, one in of("T5").items() if not one.at_the_door])
def test_t5_a_wrong_grammar_is_refused_with_its_position(name: str) -> None:
    fields = HOSTILE[name].fields
    spec = parse_grammar(fields)
    assert spec is not None
    with pytest.raises(CompileError) as caught:
        compile_spec(backend(), spec)
    check_one_line(str(caught.value))
    if fields.keys() & _TEXT_KINDS:
        assert re.search(r"(position|column) \d+", str(caught.value))


@pytest.mark.parametrize("value", [None, False])
def test_t5_no_grammar_is_no_error(value: object) -> None:
    assert parse_grammar({"json_object": value, "regex": None}) is None
