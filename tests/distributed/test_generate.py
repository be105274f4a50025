"""``lockstep generate`` as a user runs it: real processes, files in and out, good lines beside bad ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from command_line import LOCKSTEP, Outcome, run
from tiny_checkpoints import write_tiny_checkpoint

from launch.exit_codes import ExitCode
from runtime.tokenizer import Tokenizer

GOOD: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": "One two", "temperature": 0, "max_tokens": 9},
    "greedy again": {"prompt": "One two", "temperature": 0, "max_tokens": 9},
    "ids": {"prompt_token_ids": [5, 6, 7], "temperature": 0, "max_tokens": 5},
    "seeded": {"prompt": "One two", "seed": 11, "max_tokens": 12},
    "seeded again": {"prompt": "One two", "seed": 11, "max_tokens": 12},
    "largest seed": {"prompt": "x", "seed": 2**64 - 1, "max_tokens": 3},
    "choices": {"prompt": "One two", "seed": 11, "n": 3, "max_tokens": 12},
    "filters": {"prompt": "a", "top_k": 3, "top_p": 0.9, "min_p": 0.05, "filter_order": "top_k_first", "max_tokens": 4},
    "penalties": {
        "prompt": "a",
        "frequency_penalty": 1,
        "presence_penalty": 1,
        "repetition_penalty": 1.5,
        "max_tokens": 9,
    },
    "bias": {"prompt": "a", "logit_bias": {"42": 100}, "max_tokens": 3, "temperature": 0},
    "stop id": {"prompt": "a", "logit_bias": {"42": 100}, "stop_token_ids": [42], "max_tokens": 9, "temperature": 0},
    "min tokens": {"prompt": "a", "logit_bias": {"0": 100}, "min_tokens": 3, "max_tokens": 9, "temperature": 0},
    "ignored eos": {"prompt": "a", "logit_bias": {"0": 100}, "ignore_eos": True, "max_tokens": 4, "temperature": 0},
    "regex": {"prompt": "a", "regex": "[a-c]{4}-[0-9]{2}", "max_tokens": 30},
    "choice": {"prompt": "a", "choice": ["yes", "no"], "max_tokens": 30},
    "ebnf": {"prompt": "a", "ebnf": 'root ::= "<" [a-z]+ ">"', "max_tokens": 3},
    "schema": {
        "prompt": "a",
        "json_schema": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]},
        "max_tokens": 60,
    },
    "logprobs": {"prompt": "a", "logprobs": 1, "max_tokens": 2},
    "not ascii": {"prompt": "心情 😀", "stop": ["é", "\u0301"], "max_tokens": 4},
    "nulls": {"prompt": "a", "stop": None, "regex": None, "json_object": False, "max_tokens": 1},
    "prompt longer than a step": {"prompt": "One two three " * 20, "temperature": 0, "max_tokens": 3},
}
BAD: dict[str, tuple[dict[str, Any], str | None]] = {
    "no prompt": ({"max_tokens": 1}, "prompt"),
    "two prompts": ({"prompt": "a", "prompt_token_ids": [1]}, "prompt_token_ids"),
    "empty prompt": ({"prompt": ""}, "prompt"),
    "empty ids": ({"prompt_token_ids": []}, "prompt_token_ids"),
    "id out of range": ({"prompt_token_ids": [320]}, "prompt_token_ids"),
    "unknown field": ({"prompt": "a", "temprature": 1}, "temprature"),
    "temperature": ({"prompt": "a", "temperature": -0.1}, "temperature"),
    "top_p": ({"prompt": "a", "top_p": 0}, "top_p"),
    "seed": ({"prompt": "a", "seed": 2**64}, "seed"),
    "max_tokens": ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    "beyond the context": ({"prompt": "a", "max_tokens": 512}, "max_tokens"),
    "long prompt": ({"prompt": "a b " * 600}, "prompt"),
    "bias key": ({"prompt": "a", "logit_bias": {"320": 1}}, "logit_bias"),
    "two grammars": ({"prompt": "a", "regex": "a", "choice": ["b"]}, "choice"),
    "bad regex": ({"prompt": "a", "regex": "("}, "regex"),
    "bad ebnf": ({"prompt": "a", "ebnf": "root ::= foo"}, "ebnf"),
    "surrogate": ({"prompt": "a", "stop": ["\ud800"]}, "stop"),
    "deep surrogate": ({"prompt": "a", "json_schema": {"enum": ["\udfff"]}}, "json_schema"),
    "template": ({"messages": [{"role": "user", "content": "hi"}]}, "messages"),
}
NOT_JSON = '{"prompt": "a", '


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3")


@pytest.fixture(scope="module")
def outcome(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Runs good and bad requests together, in one engine, on 2 x 2 ranks."""
    folder = tmp_path_factory.mktemp("files")
    lines = [json.dumps({"id": name, **fields}) for name, fields in GOOD.items()]
    bad = [json.dumps({"id": name, **fields}) for name, (fields, _) in BAD.items()]
    mixed = [line for pair in zip(lines, [*bad, NOT_JSON, "[]"], strict=True) for line in pair]
    (folder / "in.jsonl").write_text("\n".join([*mixed, ""]))
    files = ("--input", str(folder / "in.jsonl"), "--output", str(folder / "out.jsonl"))
    options = ("--model", str(model), "--tp", "2", "--pp", "2", "--max-batch-tokens", "50")
    ended = run(*LOCKSTEP, "generate", *options, *files)
    return Outcome(ended.returncode, (folder / "out.jsonl").read_text(), ended.stderr, ended.seconds)


@pytest.fixture(scope="module")
def records(outcome: Outcome) -> dict[Any, list[dict[str, Any]]]:
    by_id: dict[Any, list[dict[str, Any]]] = {}
    for record in outcome.records():
        by_id.setdefault(record["id"], []).append(record)
    return by_id


def test_summary_and_exit_code(outcome: Outcome) -> None:
    assert outcome.returncode == ExitCode.REQUESTS_FAILED
    total, failed = len(GOOD) + len(BAD) + 2, len(BAD) + 2
    assert outcome.message.startswith(f"lockstep: {total} requests, {failed} failed, ")
    assert len(outcome.stderr.splitlines()) == 1


def test_output_is_in_input_order(outcome: Outcome) -> None:
    ids = list(dict.fromkeys(record["id"] for record in outcome.records()))
    wanted = [
        name
        for pair in zip(GOOD, [*BAD, f"line-{2 * len(BAD) + 2}", f"line-{2 * len(BAD) + 4}"], strict=True)
        for name in pair
    ]
    assert ids == wanted


@pytest.mark.parametrize("name", GOOD)
def test_good_request_beside_bad_ones(name: str, records: dict[Any, list[dict[str, Any]]], model: Path) -> None:
    fields = GOOD[name]
    tokenizer = Tokenizer.load(model)
    assert [record["index"] for record in records[name]] == list(range(fields.get("n", 1)))
    for record in records[name]:
        assert record["error"] is None
        assert record["finish_reason"] in ("stop", "length")
        usage = record["usage"]
        assert usage["completion_tokens"] == len(record["token_ids"]) <= fields["max_tokens"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        if record["finish_reason"] == "length":
            assert len(record["token_ids"]) == fields["max_tokens"]
            assert record["text"] == tokenizer.decode(record["token_ids"])


def test_what_the_good_requests_gave(records: dict[Any, list[dict[str, Any]]]) -> None:
    def ids(name: str) -> list[list[int]]:
        return [record["token_ids"] for record in records[name]]

    assert ids("greedy") == ids("greedy again")
    assert ids("seeded") == ids("seeded again") == ids("choices")[:1]
    assert len(set(map(tuple, ids("choices")))) == 3
    assert ids("bias") == [[42, 42, 42]]
    assert ids("stop id") == [[42]]
    assert records["stop id"][0]["finish_reason"] == "stop"
    assert records["stop id"][0]["text"] == ""
    assert len(ids("min tokens")[0]) == 4
    assert ids("min tokens")[0][-1] == 0
    assert ids("ignored eos") == [[0, 0, 0, 0]]
    assert records["ignored eos"][0]["finish_reason"] == "length"
    assert re.fullmatch("[a-c]{4}-[0-9]{2}", records["regex"][0]["text"])
    assert records["choice"][0]["text"] in ("yes", "no")
    assert records["ebnf"][0]["finish_reason"] in ("stop", "length")
    assert re.match("<[a-z]", records["ebnf"][0]["text"])
    if records["schema"][0]["finish_reason"] == "stop":
        assert json.loads(records["schema"][0]["text"])["a"] in (1, 2)


@pytest.mark.parametrize("name", BAD)
def test_bad_request_gets_its_own_error(name: str, records: dict[Any, list[dict[str, Any]]]) -> None:
    fields, param = BAD[name]
    (record,) = records[name]
    assert record["finish_reason"] == "error"
    assert record["text"] == ""
    assert record["error"]["param"] == param
    assert len(record["error"]["message"].splitlines()) == 1
    if param is not None:
        assert param in record["error"]["message"]
        value = fields.get(param)
        if isinstance(value, (int, float)) and name != "unknown field":
            assert str(value) in record["error"]["message"]


def test_line_that_is_no_request(records: dict[Any, list[dict[str, Any]]]) -> None:
    broken, not_an_object = (records[f"line-{2 * len(BAD) + number}"][0] for number in (2, 4))
    assert "is no JSON" in broken["error"]["message"]
    assert "is no JSON object" in not_an_object["error"]["message"]


def test_stop_strings_and_stdin(model: Path) -> None:
    """A stop string of the greedy text's middle cuts it there, whatever token borders it spans; read from stdin."""
    request = {"prompt": "One two", "temperature": 0, "max_tokens": 40, "regex": "[a-z]{24}"}
    arguments = (*LOCKSTEP, "generate", "--model", str(model), "--input", "-")
    (whole,) = run(*arguments, stdin=json.dumps(request).encode()).records()
    text: str = whole["text"]
    stops = [text[at : at + 3] for at in range(4, 12)]
    lines = [json.dumps({**request, "stop": stop}) for stop in stops]
    cut = run(*arguments, stdin="\n".join(lines).encode())
    assert cut.returncode == ExitCode.OK
    for stop, record in zip(stops, cut.records(), strict=True):
        assert record["finish_reason"] == "stop"
        assert record["text"] == text[: text.index(stop)]
        assert len(record["token_ids"]) < len(whole["token_ids"])


def test_text_from_arguments(model: Path) -> None:
    arguments = ("--max-tokens", "30", "--choice", "red,green", "--seed", "3")
    one = run(*LOCKSTEP, "generate", "--model", str(model), "colour:", *arguments)
    assert one.returncode == ExitCode.OK
    assert one.stdout in ("red\n", "green\n")
    two = run(*LOCKSTEP, "generate", "--model", str(model), "colour:", "other:", "-n", "2", *arguments)
    assert re.fullmatch("(== prompt-[12]\\[[01]\\]\n(red|green)\n){4}", two.stdout)
