"""Requests resumed by new ranks end as if nothing had been, wherever they were cut: on real ranks, to the byte."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ranks import run_ranks
from resumed_engine import EpochCase, EpochRun, run_epochs
from tiny_checkpoints import write_tiny_checkpoint

from launch.front.engine_output import RequestOutput

pytestmark = pytest.mark.long(25)

MARKERS = ("<think>", "</think>")
_PROMPT = list(range(40, 77))
BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"prompt_token_ids": _PROMPT, "max_tokens": 14, "temperature": 0},
    "sampled": {"prompt": "The quick", "max_tokens": 15, "seed": 2**64 - 1, "temperature": 1.2, "top_p": 0.95},
    "minted seed": {"prompt": "brown fox", "max_tokens": 12, "temperature": 1.0, "top_k": 50},
    "penalties": {
        "prompt": "One two",
        "max_tokens": 14,
        "temperature": 0.8,
        "frequency_penalty": 0.9,
        "presence_penalty": 0.4,
        "repetition_penalty": 1.3,
        "min_tokens": 9,
        "bad_words": ["e", "th"],
    },
    "regex": {"prompt": "x", "max_tokens": 20, "seed": 5, "regex": "[a-f]{3}(-[0-9]{2}){2}"},
    "schema": {
        "prompt": "y",
        "max_tokens": 60,
        "seed": 6,
        "any_whitespace": False,
        "json_schema": {
            "type": "object",
            "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "yy"]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
    "loose schema": {
        "prompt": "y",
        "max_tokens": 9,
        "seed": 6,
        "strict": False,
        "json_schema": {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "minItems": 2},
    },
    "stop string": {"prompt_token_ids": _PROMPT, "max_tokens": 30, "temperature": 0.0, "stop": ["STOP"]},
    "logprobs": {"prompt": "jumps over", "max_tokens": 8, "seed": 7, "logprobs": 2, "prompt_logprobs": 1},
    "prompt of one": {"prompt_token_ids": [41], "max_tokens": 4, "seed": 7, "prompt_logprobs": 0},
    "choices": {"prompt": "lazy dog", "max_tokens": 9, "seed": 8, "n": 3, "min_tokens": 2, "logprobs": 0},
    "choices of a pattern": {"prompt": "lazy", "max_tokens": 12, "n": 2, "regex": "[0-9]{1,9}"},
    "thinking": {"prompt": "then", "max_tokens": 30, "seed": 9, "thinking_budget": 3, "regex": "[a-c]{4}"},
    "thinking freely": {"prompt": "then", "max_tokens": 24, "seed": 9, "enable_thinking": True, "thinking_budget": 3},
    "characters": {"prompt_token_ids": _PROMPT, "max_tokens": 16, "seed": 3, "temperature": 2.0},
    "score": {"prompt_token_ids": [*_PROMPT, *_PROMPT], "prompt_logprobs": 1},
    "score of one": {"prompt_token_ids": [41]},
}
SCORES = frozenset(index for index, name in enumerate(BODIES) if name.startswith("score"))
SUITE = ((1, 1, (5, 40)), (2, 2, (11,)))
WIDE = ((1, 1, (1, 2, 3, 17)), (2, 1, (2, 7)), (1, 3, (4, 19)), (2, 2, (1, 3, 40)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", seed=4)


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> tuple[EpochCase, EpochRun]:
    """The requests, the stop string among them one that comes, and what one rank makes of them in one epoch."""
    case = EpochCase(model, list(BODIES.values()), (None,), scores=SCORES, markers=MARKERS)
    (run,) = run_ranks(run_epochs, 1, case)[0]
    bodies = {name: dict(body) for name, body in BODIES.items()}
    names = list(BODIES)
    text = "".join(run.outputs[names.index("stop string")].choices[0].text)
    bodies["stop string"]["stop"] = [text[len(text) // 2 : len(text) // 2 + 6], "never"]
    for name in ("minted seed", "penalties", "choices of a pattern"):
        bodies[name]["seed"] = run.seeds[names.index(name)]
    case = replace(case, bodies=list(bodies.values()))
    (run,) = run_ranks(run_epochs, 1, case)[0]
    assert run.epochs == 1
    return case, run


def shown(output: RequestOutput) -> dict[str, Any]:
    """Returns all that a client sees of a request, but what its grammar cost in seconds."""
    return {
        "prompt": output.prompt,
        "error": output.error,
        "choices": [
            {
                "text": "".join(choice.text),
                "reasoning": "".join(choice.reasoning),
                "token_ids": choice.token_ids,
                "logprobs": choice.logprobs,
                "finished": choice.finished and msgspec.structs.replace(choice.finished, grammar=None),
                "not_enforced": choice.finished and choice.finished.grammar and choice.finished.grammar.not_enforced,
            }
            for choice in output.choices
        ],
    }


def test_what_is_cut_covers_every_kind_of_end(undisturbed: tuple[EpochCase, EpochRun]) -> None:
    outputs = dict(zip(BODIES, undisturbed[1].outputs, strict=True))
    reasons = {
        name: [one.finished and one.finished.finish_reason for one in out.choices] for name, out in outputs.items()
    }
    assert reasons["regex"] == reasons["schema"] == reasons["stop string"] == ["stop"]
    assert reasons["greedy"] == ["length"]
    assert "".join(outputs["thinking"].choices[0].reasoning)
    assert "".join(outputs["thinking freely"].choices[0].reasoning)
    assert "".join(outputs["thinking freely"].choices[0].text)
    assert len({tuple(choice.token_ids) for choice in outputs["choices"].choices}) == 3
    loose = outputs["loose schema"].choices[0].finished
    assert loose is not None
    assert loose.grammar is not None
    assert loose.grammar.not_enforced
    assert len(outputs["score"].prompt or ()) == 2 * len(_PROMPT) - 1
    assert "\ufffd" in "".join(outputs["characters"].choices[0].text)


def check_cuts(undisturbed: tuple[EpochCase, EpochRun], tp: int, pp: int, heard: tuple[int, ...]) -> None:
    case, expected = undisturbed
    runs = run_ranks(run_epochs, tp * pp, replace(case, heard=heard, tp=tp, pp=pp), timeout_s=280)[0]
    for count, run in zip(heard, runs, strict=True):
        assert run.epochs > 100 / count, "not cut often enough"
        for name, output, wanted in zip(BODIES, run.outputs, expected.outputs, strict=True):
            assert shown(output) == shown(wanted), f"{name}, cut after every {count} messages"


@pytest.mark.parametrize(("tp", "pp", "heard"), SUITE)
def test_requests_go_on_to_the_byte(
    undisturbed: tuple[EpochCase, EpochRun], tp: int, pp: int, heard: tuple[int, ...]
) -> None:
    """Scenario: ranks die at any moment → every request goes on where it was; no byte of its output differs."""
    check_cuts(undisturbed, tp, pp, heard)


@pytest.mark.sweep
@pytest.mark.parametrize(("tp", "pp", "heard"), WIDE)
def test_requests_go_on_to_the_byte_at_every_cut(
    undisturbed: tuple[EpochCase, EpochRun], tp: int, pp: int, heard: tuple[int, ...]
) -> None:
    check_cuts(undisturbed, tp, pp, heard)


def test_a_prompt_told_in_parts_goes_on_in_parts(undisturbed: tuple[EpochCase, EpochRun]) -> None:
    case, expected = undisturbed
    pieces = replace(case, heard=(9,), max_batch_tokens=5)
    (run,) = run_ranks(run_epochs, 1, pieces, timeout_s=280)[0]
    for name, output, wanted in zip(BODIES, run.outputs, expected.outputs, strict=True):
        assert shown(output) == shown(wanted), name


def test_a_minted_seed_lasts(model: Path) -> None:
    case = EpochCase(model, [{"prompt": "brown fox", "max_tokens": 12, "n": 2}], (3,))
    (cut,) = run_ranks(run_epochs, 1, case)[0]
    (body,) = case.bodies
    (whole,) = run_ranks(run_epochs, 1, replace(case, bodies=[{**body, "seed": cut.seeds[0]}], heard=(None,)))[0]
    assert cut.epochs > 5
    assert shown(cut.outputs[0]) == shown(whole.outputs[0])
