"""Grammars from public suites: texts they must take and refuse, walked token by token, mask and accept together."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from grammars import END, allowed_ids, encode, small_vocabulary

from grammar_sync.backend import CompiledGrammar, CompileError
from grammar_sync.masks import MaskFiller
from grammar_sync.spec import GrammarSpec, parse_grammar
from grammar_sync.xgrammar_backend import XGrammarBackend

CASES_PATH = Path(__file__).resolve().parents[2] / ".." / "shared" / "cases" / "grammars.jsonl"
EXACT_KINDS = ("regex", "ebnf", "choice", "json_object")


def cases(*kinds: str) -> list[dict[str, Any]]:
    if not CASES_PATH.is_file():
        return []
    lines = [json.loads(line) for line in CASES_PATH.read_text().splitlines()]
    return [case for case in lines if case["kind"] in kinds]


def spec_of(case: dict[str, Any]) -> GrammarSpec:
    value = True if case["kind"] == "json_object" else case["spec"]
    spec = parse_grammar({case["kind"]: value})
    assert spec is not None
    return spec


@cache
def backend() -> XGrammarBackend:
    return XGrammarBackend(small_vocabulary())


@cache
def filler() -> MaskFiller:
    return MaskFiller(small_vocabulary())


def takes(compiled: CompiledGrammar, text: str) -> bool:
    """Returns whether the grammar takes ``text`` and then the end; at each token the mask must say what accept does."""
    matcher = compiled.new_matcher()
    for position, token_id in enumerate([*encode(text), END]):
        masks, _ = filler().fill([matcher])
        masked_in = token_id in allowed_ids(masks[0])
        accepted = matcher.accept(token_id)
        assert masked_in == accepted, f"mask and accept disagree on token {token_id} at {position} of {text!r}"
        if not accepted:
            return False
    return matcher.is_terminated()


@pytest.mark.skipif(not CASES_PATH.is_file(), reason=f"{CASES_PATH.name} is not beside this checkout")
@pytest.mark.parametrize("case", cases(*EXACT_KINDS), ids=lambda case: str(case["id"]))
def test_exact_kinds(case: dict[str, Any]) -> None:
    compiled = backend().compile(spec_of(case))
    missed = [text for text in case["accept"] if not takes(compiled, text)]
    loose = [text for text in case["reject"] if takes(compiled, text)]
    assert (missed, loose) == ([], [])


@pytest.mark.skipif(not CASES_PATH.is_file(), reason=f"{CASES_PATH.name} is not beside this checkout")
def test_every_schema_compiles_or_is_refused_in_one_line() -> None:
    torch.set_num_threads(1)
    failures = {}
    schemas = cases("json_schema")
    for case in schemas:
        try:
            assert backend().compile(spec_of(case)).size_bytes > 0
        except CompileError as error:
            failures[case["id"]] = str(error)
    assert all(message and "\n" not in message and len(message) <= 301 for message in failures.values())
    assert len(schemas) == 128
    assert len(failures) < 0.1 * len(schemas), failures
