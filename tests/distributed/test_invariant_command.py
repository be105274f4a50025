"""``--invariant`` on the command line: what it prints and refuses, scores against recorded logprobs, its benchmark."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from command_line import LOCKSTEP, Outcome, run
from default_model import default_model_path
from tiny_checkpoints import write_tiny_checkpoint

from launch.exit_codes import ExitCode

pytestmark = pytest.mark.long(50)

REQUESTS: list[dict[str, Any]] = [
    {"prompt_token_ids": [504, 3575, 282, 4649, 314], "temperature": 0},
    {"prompt_token_ids": [6403, 1980, 253, 655, 665], "seed": 7},
    {"prompt_token_ids": [33, 28, 216, 34, 28, 216], "seed": 8, "temperature": 0.8, "regex": "[0-9, ]{1,}"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3")


def command(model: Path, folder: Path, name: str, requests: list[dict[str, Any]], *options: str) -> Outcome:
    (folder / "in.jsonl").write_text("".join(json.dumps(request) + "\n" for request in requests))
    arguments = ("--model", str(model), "--invariant", "--input", str(folder / "in.jsonl"), *options)
    return run(*LOCKSTEP, name, *arguments)


def test_importance_ratios_of_a_policy_against_itself_are_one(model: Path, tmp_path: Path) -> None:
    requests = [
        {"id": index, "prompt_token_ids": [5 + index, 9, 11], "seed": index, "max_tokens": 9, "logprobs": 0}
        for index in range(6)
    ]
    generated = command(model, tmp_path, "generate", requests, "--tp", "2", "--pp", "2")
    assert generated.returncode == 0, generated.stderr
    assert "lockstep: invariant: float32 products" in generated.stderr
    recorded = generated.records()
    texts = [
        {"id": one["id"], "prompt_token_ids": request["prompt_token_ids"] + one["token_ids"]}
        for request, one in zip(requests, recorded, strict=True)
    ]
    scored = command(model, tmp_path, "score", texts, "--max-batch-tokens", "16")
    assert scored.returncode == 0, scored.stderr
    for one, other in zip(recorded, scored.records(), strict=True):
        count = len(one["token_ids"])
        behaviour = [token["logprob"] for token in one["logprobs"]]
        trainer = [token["logprob"] for token in other["prompt_logprobs"][-count:]]
        assert [math.exp(new - old) for new, old in zip(trainer, behaviour, strict=True)] == [1.0] * count


@pytest.mark.parametrize(
    ("options", "named"), [(("--products", "plain"), "--products plain"), (("--tp", "5"), "--tp 5: --invariant")]
)
def test_what_would_break_it_is_refused(model: Path, tmp_path: Path, options: tuple[str, ...], named: str) -> None:
    result = command(model, tmp_path, "generate", REQUESTS, *options)
    assert result.returncode == ExitCode.USAGE
    assert named in result.message


def test_benchmark_compares_both_modes(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    sizes = ("--batches", "1,3", "--context", "5", "--prefill-tokens", "40", "--repeats", "1")
    result = run(*LOCKSTEP, "bench", "invariant", "--model", str(model), "--tp", "2", *sizes, "--json", str(path))
    assert result.returncode == 0, result.stderr
    document = json.loads(path.read_bytes())
    assert (document["bench"], document["tp"]) == ("invariant", 2)
    assert [(case["what"], case["rows"]) for case in document["cases"]] == [
        ("decode", 1),
        ("decode", 3),
        ("prefill", 40),
    ]
    for case in document["cases"]:
        assert case["ratio"] == pytest.approx(case["invariant_ms"] / case["default_ms"])


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([(3, 1, ("--max-batch-tokens", "4")), (2, 2, ())], id="two"),
        pytest.param([(2, 1, ()), (1, 2, ()), (1, 3, ())], marks=pytest.mark.sweep, id="more"),
        pytest.param([(2, 3, ()), (3, 2, ()), (3, 3, ())], marks=pytest.mark.sweep, id="most"),
    ],
)
def test_default_model_has_the_same_bits_at_every_size(
    tmp_path: Path, sizes: list[tuple[int, int, tuple[str, ...]]]
) -> None:
    path = default_model_path()
    requests = [{"id": index, "max_tokens": 10, "logprobs": 2} | one for index, one in enumerate(REQUESTS)]
    requests[0]["prompt_logprobs"] = 0
    outputs = []
    for tp, pp, others in [(1, 1, ()), *sizes]:
        layout = ("--tp", str(tp), "--pp", str(pp), "--threads-per-rank", "1")
        result = command(path, tmp_path, "generate", requests, *layout, *others)
        assert result.returncode == 0, result.stderr
        outputs.append(
            [(one["id"], one["token_ids"], one["logprobs"], one.get("prompt_logprobs")) for one in result.records()]
        )
    assert all(logprobs for _, _, logprobs, _ in outputs[0])
    assert all(one == outputs[0] for one in outputs)
