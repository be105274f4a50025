"""``lockstep score`` and logprobs, processors and bad words of ``lockstep generate``, through the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import LOCKSTEP, Outcome, run
from tiny_checkpoints import write_tiny_checkpoint

from launch.exit_codes import ExitCode
from runtime.tokenizer import Tokenizer

PROCESSOR = '''
class OnlyEven:
    """Bans odd ids from ``first`` on."""

    needs_row_values = False

    def check(self, args):
        if type(args.get("first", 0)) is not int:
            raise ValueError(f"first is {args['first']!r}: an integer is needed")

    def process(self, rows):
        for row, args in zip(rows.logits, rows.args):
            start = max(args.get("first", 0) - rows.slice_start, 0)
            odd = start + (rows.slice_start + start + 1) % 2
            row[odd::2] = float("-inf")
'''
REQUEST: dict[str, Any] = {
    "prompt": "One two three",
    "temperature": 1,
    "seed": 4,
    "max_tokens": 10,
    "logprobs": 2,
    "prompt_logprobs": 1,
}
CALL = {"logit_processors": [{"name": "OnlyEven", "args": {"first": 0}}]}
PROCESSED: dict[str, Any] = {
    **REQUEST,
    "logprobs_mode": "processed",
    "temperature": 0.7,
    "frequency_penalty": 0.6,
    "presence_penalty": 0.4,
    "repetition_penalty": 1.3,
    "logit_bias": {"7": 3.0},
    "banned_token_ids": [3, 4],
    "min_tokens": 4,
    "top_k": 300,
}
LINES: dict[str, dict[str, Any]] = {
    "asked": REQUEST,
    "named": {**REQUEST, "logprobs": None, "logprob_token_ids": [7, 2000]},
    "plain": {name: value for name, value in REQUEST.items() if "logprobs" not in name},
    "even": {**REQUEST, **CALL, "return_support": True},
    "even, processed": {**REQUEST, **CALL, "logprobs_mode": "processed"},
    "bad argument": {**REQUEST, "logit_processors": [{"name": "OnlyEven", "args": {"first": "x"}}]},
    "no such processor": {**REQUEST, "logit_processors": [{"name": "Odd"}]},
    "too many": {**REQUEST, "logprobs": 21},
    "one token": {**REQUEST, "prompt": None, "prompt_token_ids": [5], "max_tokens": 1},
    "processed": PROCESSED,
    "no score": {**REQUEST, "prompt_tokens": 2},
    "choices": {**REQUEST, "n": 2},
    "bad words": {**REQUEST, "temperature": 0, "logprobs": None, "bad_words": ["a", "e", " the"], "max_tokens": 30},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", vocab_size=2048))


@pytest.fixture(scope="module")
def import_path(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("processors")
    (folder / "my_processors.py").write_text(PROCESSOR)
    root = str(Path(__file__).resolve().parents[2])
    return {"PYTHONPATH": f"{root}:{folder}"}


@pytest.fixture(scope="module")
def generated(model: str, import_path: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    lines = "\n".join(json.dumps({"id": name, **fields}) for name, fields in LINES.items())
    outcome = run(
        *(*LOCKSTEP, "generate", "--model", model, "--tp", "2", "--input", "-"),
        *("--audit", "--logit-processor", "my_processors:OnlyEven"),
        environ=import_path,
        stdin=lines.encode(),
    )
    assert outcome.returncode == ExitCode.REQUESTS_FAILED
    records: dict[str, list[dict[str, Any]]] = {}
    for record in outcome.records():
        records.setdefault(record["id"], []).append(record)
    return records


def test_logprobs_of_tokens_and_prompt(generated: dict[str, list[dict[str, Any]]]) -> None:
    (asked,), (plain,) = generated["asked"], generated["plain"]
    assert asked["token_ids"] == plain["token_ids"]
    assert plain["logprobs"] is None
    assert "prompt_logprobs" not in plain
    assert [info["token_id"] for info in asked["logprobs"]] == asked["token_ids"]
    assert len(asked["prompt_logprobs"]) == asked["usage"]["prompt_tokens"]
    assert asked["prompt_logprobs"][0] is None
    for info in [*asked["logprobs"], *asked["prompt_logprobs"][1:]]:
        assert -9999 <= info["logprob"] <= 0
        top = [one["logprob"] for one in info["top_logprobs"]]
        assert top == sorted(top, reverse=True)
        assert info["logprob"] <= top[0]


def test_named_ids_are_told_of_generated_tokens_alone(generated: dict[str, list[dict[str, Any]]]) -> None:
    (asked,), (named,) = generated["asked"], generated["named"]
    assert named["token_ids"] == asked["token_ids"]
    assert named["prompt_logprobs"] == asked["prompt_logprobs"]
    for info, other in zip(named["logprobs"], asked["logprobs"], strict=True):
        assert "top_logprobs" not in info
        assert info["logprob"] == other["logprob"]
        assert [one["token_id"] for one in info["named_logprobs"]] == [7, 2000]


def test_a_prompt_of_one_token_has_nothing_to_tell(generated: dict[str, list[dict[str, Any]]]) -> None:
    (record,) = generated["one token"]
    assert record["usage"]["prompt_tokens"] == 1
    assert record["prompt_logprobs"] == [None]


def test_choices_have_their_own_logprobs_and_one_prompt(generated: dict[str, list[dict[str, Any]]]) -> None:
    first, second = generated["choices"]
    assert first["logprobs"] == generated["asked"][0]["logprobs"]
    assert first["logprobs"] != second["logprobs"]
    assert "prompt_logprobs" in first
    assert "prompt_logprobs" not in second


def test_processor(generated: dict[str, list[dict[str, Any]]]) -> None:
    (even,) = generated["even"]
    assert even["error"] is None
    assert all(token_id % 2 == 0 for token_id in even["token_ids"])
    for info in even["logprobs"]:
        assert info["support"]["status"] == "OK"
        assert info["token_id"] in info["support"]["token_ids"]
        assert all(token_id % 2 == 0 for token_id in info["support"]["token_ids"])
    refusals = {"bad argument": "'x'", "no such processor": "Odd", "too many": "21", "no score": "prompt_tokens"}
    for name, named in refusals.items():
        (record,) = generated[name]
        assert named in record["error"]["message"]
    assert generated["too many"][0]["error"]["param"] == "logprobs"


def test_bad_words(generated: dict[str, list[dict[str, Any]]]) -> None:
    (record,) = generated["bad words"]
    assert record["error"] is None
    assert len(record["token_ids"]) > 0


def score(model: str, lines: list[dict[str, Any]], *options: str, environ: dict[str, str]) -> Outcome:
    stdin = "\n".join(map(json.dumps, lines)).encode()
    return run(*LOCKSTEP, "score", "--model", model, "--input", "-", *options, stdin=stdin, environ=environ)


def test_score_equals_recorded_logprobs(
    model: str, generated: dict[str, list[dict[str, Any]]], import_path: dict[str, str]
) -> None:
    (asked,) = generated["asked"]
    prompt = Tokenizer.load(Path(model)).encode(REQUEST["prompt"])
    ids = [*prompt, *asked["token_ids"]]
    (processed,) = generated["processed"]
    replayed = {name: value for name, value in PROCESSED.items() if name not in ("prompt", "logprobs", "max_tokens")}
    replayed |= {"prompt_token_ids": [*prompt, *processed["token_ids"]], "prompt_tokens": len(prompt)}
    replayed |= {"prompt_logprobs": 2}
    lines = [{"prompt_token_ids": ids}, {"prompt": REQUEST["prompt"]}, {"prompt": "x", "n": 2}, {"prompt": ""}]
    lines[0] |= {"logprob_token_ids": [5, 2000]}
    replayed |= {"logprob_token_ids": [7, 3]}
    lines += [replayed, {**replayed, "prompt_tokens": 0}, {**replayed, "temperature": 1.4, "prompt_tokens": None}]
    (even,) = generated["even, processed"]
    mended = {**CALL, "logprobs_mode": "processed", "prompt_tokens": len(prompt)}
    lines += [{"prompt_token_ids": [*prompt, *even["token_ids"]], **mended}]
    everything_banned = {"logprobs_mode": "processed", "allowed_token_ids": [3], "banned_token_ids": [3]}
    lines += [{"prompt_token_ids": [5]}, {"prompt_token_ids": ids[:3], "logprob_token_ids": [7], **everything_banned}]
    options = ("--tp", "2", "--top", "3", "--logit-processor", "my_processors:OnlyEven")
    outcome = score(model, lines, *options, environ=import_path)
    assert outcome.returncode == ExitCode.REQUESTS_FAILED
    scored, text, several, empty, again, nothing, hotter, evened, one, untold = outcome.records()
    assert [info["logprob"] for info in evened["prompt_logprobs"][len(prompt) :]] == pytest.approx(
        [info["logprob"] for info in even["logprobs"]], abs=1e-4
    )
    assert nothing["error"]["param"] == "prompt_tokens"
    assert one["prompt_logprobs"] == [None]
    for info in untold["prompt_logprobs"][1:]:
        assert (info["logprob"], info["top_logprobs"], info["named_logprobs"]) == (None, [], [])
    # Of every scored token: raw of any id, processed with its bias, or the floor for a banned one.
    for info in scored["prompt_logprobs"][1:]:
        named = {one["token_id"]: one["logprob"] for one in info["named_logprobs"]}
        assert set(named) == {5, 2000}
        assert named.get(info["token_id"], info["logprob"]) == info["logprob"]
        assert all(-30 < value < info["top_logprobs"][0]["logprob"] + 1e-6 for value in named.values())
    for info in again["prompt_logprobs"][1:]:
        named = {one["token_id"]: one["logprob"] for one in info["named_logprobs"]}
        assert named[3] == -9999
        assert -9999 < named[7] < 0
    for info, drawn in zip(again["prompt_logprobs"][len(prompt) :], processed["logprobs"], strict=True):
        assert info["token_id"] == drawn["token_id"]
        assert info["logprob"] == pytest.approx(drawn["logprob"], abs=1e-4)
        assert [one["logprob"] for one in info["top_logprobs"]] == pytest.approx(
            [one["logprob"] for one in drawn["top_logprobs"]], abs=1e-4
        )
    # Without a word about it no token counts as generated, which penalties and min_tokens tell from the prompt.
    assert [info["logprob"] for info in hotter["prompt_logprobs"][1:]] != [
        info["logprob"] for info in again["prompt_logprobs"][1:]
    ]
    assert several["error"]["code"] == empty["error"]["code"] == "invalid_request"
    assert several["error"]["param"] == "n"
    assert scored["token_ids"] == []
    assert scored["usage"] == {"prompt_tokens": len(ids), "completion_tokens": 0, "total_tokens": len(ids)}
    told = scored["prompt_logprobs"]
    assert [info["token_id"] for info in told[1:]] == ids[1:]
    assert all(len(info["top_logprobs"]) == 3 for info in told[1:])
    recorded = [*asked["prompt_logprobs"][1:], *asked["logprobs"]]
    assert [info["logprob"] for info in told[1:]] == pytest.approx([info["logprob"] for info in recorded], abs=1e-4)
    assert text["prompt_logprobs"][1:] == [
        {
            **{name: value for name, value in info.items() if name != "named_logprobs"},
            "logprob": pytest.approx(info["logprob"], abs=1e-4),
            "top_logprobs": other["top_logprobs"],
        }
        for info, other in zip(told[1 : len(prompt)], text["prompt_logprobs"][1:], strict=True)
    ]
