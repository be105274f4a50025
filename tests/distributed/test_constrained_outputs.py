"""Every finished output is what its grammar says, judged by others than the engine; every cut one is a beginning."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import LOCKSTEP, run
from default_model import DEFAULT_MODEL_PROMPTS, default_model_path
from output_judge import Judge, grammar_of
from tiny_checkpoints import write_tiny_checkpoint

from grammar_sync.spec import GRAMMAR_FIELDS
from launch.exit_codes import ExitCode

pytestmark = pytest.mark.long(20)

CASES_PATH = Path(__file__).resolve().parents[2] / ".." / "shared" / "cases" / "grammars.jsonl"
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<call>",
        "content": {"type": "json_schema", "json_schema": {"enum": [{"city": "Rome"}, {"city": "Oslo"}]}},
        "end": "</call>",
    },
}
# Short outputs, so that a model with random weights finishes many of them.
GRAMMARS: list[dict[str, Any]] = [
    {"choice": ["yes", "no", "在线", 'a"b\\c']},
    {"regex": "[a-f]{2,4}(x|yes)?"},
    {"regex": r"(19|20)\d\d-(0[1-9]|1[0-2])"},
    {"regex": "é{1,3}|[^a-z]{2}"},
    {"ebnf": 'root ::= "<" item ("," item){0,3} ">"\nitem ::= [a-c] | "(" item ")"'},
    {"structural_tag": TAG},
    {"json_object": True},
    {"json_schema": {"enum": ["red", "grün", 3, None, {"a": [1, "b"]}]}},
    {
        "json_schema": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 1, "maxLength": 4},
                "age": {"type": "integer", "minimum": 0, "maximum": 120},
                "mood": {"enum": ["good", "bad"]},
            },
            "required": ["name", "mood"],
            "additionalProperties": False,
        },
        "max_whitespace": 1,
    },
    {
        "json_schema": {
            "type": "array",
            "items": {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": -3, "maximum": 9}]},
            "minItems": 1,
            "maxItems": 3,
        },
        "any_whitespace": False,
    },
    {
        "json_schema": {
            "$ref": "#/$defs/node",
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {
                        "v": {"enum": [1, 2]},
                        "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                    },
                    "required": ["v", "next"],
                    "additionalProperties": False,
                }
            },
        },
        "max_whitespace": 1,
    },
]


def requests(grammars: list[dict[str, Any]], count: int, prompts: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields requests over all grammars: temperature 0 and 1, one to three choices, seeds."""
    draw = random.Random(7)
    for index in range(count):
        yield {
            "id": index,
            **draw.choice(prompts),
            **grammars[index % len(grammars)],
            "temperature": index // len(grammars) % 2,
            "n": draw.randint(1, 3),
            "seed": draw.getrandbits(64),
            "max_tokens": draw.choice([3, 24, 48, 64]),
        }


def generated(
    model: Path, lines: list[dict[str, Any]], folder: Path, *more: str, timeout_s: float = 120.0
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Returns each output of the requests, run on 2 x 2 ranks, with its request's grammar."""
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    files = ("--input", str(source), "--output", str(target))
    options = ("--model", str(model), "--tp", "2", "--pp", "2", "--max-batch-tokens", "64", *more)
    outcome = run(*LOCKSTEP, "generate", *options, *files, timeout_s=timeout_s)
    assert outcome.returncode == ExitCode.OK, outcome.stderr
    records = [json.loads(line) for line in target.read_text().split("\n") if line]
    by_id = {line["id"]: line for line in lines}
    assert [(record["id"], record["index"]) for record in records] == [
        (line["id"], index) for line in lines for index in range(line["n"])
    ]
    return [(grammar_of(by_id[record["id"]]), record) for record in records]


def wrong(judge: Judge, outputs: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[Any]:
    """Returns the outputs that their grammars do not allow."""
    return [(fields, record) for fields, record in outputs if not judge.is_right(fields, record)]


def finished_kinds(outputs: list[tuple[dict[str, Any], dict[str, Any]]]) -> set[str]:
    """Returns the kinds of grammars of which an output came to its end."""
    ended = (fields.keys() for fields, record in outputs if record["finish_reason"] == "stop")
    return set().union(*ended) & set(GRAMMAR_FIELDS)


def test_every_kind_greedy_and_drawn(tmp_path: Path) -> None:
    model = write_tiny_checkpoint(tmp_path / "tiny", "qwen3")
    prompts: list[dict[str, Any]] = [{"prompt": "One two"}, {"prompt": "a"}, {"prompt_token_ids": [5, 6, 7]}]
    lines = list(requests(GRAMMARS, 44, prompts))
    outputs = generated(model, lines, tmp_path)
    assert wrong(Judge(model), outputs) == []
    assert finished_kinds(outputs) >= set(GRAMMAR_FIELDS) - {"json_object"}


def test_grammars_that_come_at_once_wait_for_each_other_as_long_as_it_takes(tmp_path: Path) -> None:
    """Together they take much longer than the time that a single one has."""
    model = write_tiny_checkpoint(tmp_path / "tiny", "qwen3")
    lines = [
        {"id": number, "prompt": "a", "n": 1, "max_tokens": 2, "temperature": 0, "regex": f"[a-z]{{2,{number + 4}}}"}
        for number in range(40)
    ]
    outputs = generated(model, lines, tmp_path, "--pp", "1", "--grammar-timeout", "0.3")
    assert wrong(Judge(model), outputs) == []


@pytest.mark.sweep
@pytest.mark.model
@pytest.mark.timeout(1800)
def test_300_requests_of_the_default_model(tmp_path: Path) -> None:
    model = default_model_path()
    judge = Judge(model)
    grammars = [*GRAMMARS]
    if CASES_PATH.is_file():
        cases = [json.loads(line) for line in CASES_PATH.read_text().splitlines()]
        fields = [{case["kind"]: True if case["kind"] == "json_object" else case["spec"]} for case in cases]
        grammars += [one for one in fields if judge.takes(one)]
    prompts = [{"prompt_token_ids": ids} for ids in DEFAULT_MODEL_PROMPTS.values()]
    lines = list(requests(grammars, 300, prompts))
    # A hundred and fifty grammars come at once: the last ones wait for all others.
    outputs = generated(model, lines, tmp_path, timeout_s=1500.0)
    assert wrong(judge, outputs) == []
    assert finished_kinds(outputs) >= set(GRAMMAR_FIELDS)
