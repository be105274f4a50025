"""What a line of ``lockstep sample`` may hold: what it cannot mean is said, and ends that line alone."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from launch.line_error import LineError
from launch.sample.lines import MEANINGLESS, SHORT_NAMES, STEP_FIELDS, parse_step
from sampler.params import SamplingParams

# A value for each parameter, and what stands for it in the step.
VALUES: dict[str, Any] = {
    "max_tokens": 9,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 2,
    "min_p": 0.5,
    "filter_order": "top_k_first",
    "seed": 7,
    "n": 2,
    "stop": ["x"],
    "stop_token_ids": [1],
    "ignore_eos": True,
    "min_tokens": 3,
    "logit_bias": {"1": 2.0},
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.5,
    "allowed_token_ids": [1],
    "banned_token_ids": [1],
    "bad_words": [[1], [1, 2]],
    "logprobs": 2,
    "logprob_token_ids": [1],
    "prompt_logprobs": 2,
    "logprobs_mode": "processed",
    "return_support": True,
}
REFUSED = ("logit_processors",)


def test_numbers_and_names_of_what_is_no_number() -> None:
    step = parse_step({"logits": [1, -2.5, "nan", "inf", "-inf", 3.4e38]})
    assert step.logits[:2] == [1.0, -2.5]
    assert math.isnan(step.logits[2])
    assert step.logits[3:] == [math.inf, -math.inf, 3.4e38]


def test_the_largest_float32_may_be_written_as_it_is_printed() -> None:
    largest = float(torch.finfo(torch.float32).max)
    assert parse_step({"logits": [3.4028235e38, -3.4028235e38, largest]}).logits == [largest, -largest, largest]
    with pytest.raises(LineError, match=r"a number in ±3\.4028235e\+38 \(float32\), or 'inf', is needed"):
        parse_step({"logits": [3.4028236e38]})


@pytest.mark.parametrize(
    "value", [10**400, -(10**39), 1e39, math.inf, -math.inf, math.nan, "1", "NaN", "Infinity", True, None, [1], {}]
)
def test_a_logit_that_is_none_is_named(value: Any) -> None:
    with pytest.raises(LineError, match=r"^logits\[1\] is .* is needed$") as caught:
        parse_step({"logits": [0.5, value]})
    assert len(str(caught.value)) < 200
    assert caught.value.info.param == "logits"


@pytest.mark.parametrize("name", ["temperature", "top_k", "bad_words", "prompt", "allowed", "repetition"])
def test_a_parameter_beside_params_is_not_passed_over(name: str) -> None:
    with pytest.raises(LineError, match=f"^{name} stands beside params") as caught:
        parse_step({"logits": [1, 2], name: 0})
    assert caught.value.info.param == name


@pytest.mark.parametrize(
    ("name", "value"), [("bad_words", ["x"]), ("logit_processors", [{"name": "nobody_registered_this"}])]
)
def test_what_cannot_be_replayed_is_refused(name: str, value: Any) -> None:
    with pytest.raises(LineError, match=f"^{name} ") as caught:
        parse_step({"logits": [1, 2, 3], "params": {name: value}})
    assert caught.value.info.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("choice", -1),
        ("choice", 128),
        ("choice", 2**70),
        ("choice", True),
        ("prompt", [3]),
        ("output", 1),
        ("allowed", [True]),
        ("allowed", {"1": 1}),
        ("stop_ids", [-1]),
        ("temperature", -1),
        ("heat", 1),
    ],
)
def test_a_wrong_value_names_its_field(name: str, value: Any) -> None:
    with pytest.raises(LineError, match=name) as caught:
        parse_step({"logits": [1, 2, 3], "params": {name: value}})
    assert caught.value.info.code == "invalid_request"
    assert caught.value.info.param == name


@pytest.mark.parametrize("short", sorted(SHORT_NAMES))
def test_one_parameter_by_two_names_is_refused(short: str) -> None:
    with pytest.raises(LineError, match=f"^{SHORT_NAMES[short]} has two names here"):
        parse_step({"logits": [1, 2], "params": {short: 1, SHORT_NAMES[short]: 1}})


def test_no_parameter_is_dropped_in_silence() -> None:
    assert {*VALUES, *REFUSED} == set(SamplingParams.__struct_fields__)
    plain = parse_step({"logits": [1, 2, 3]})
    for name, value in VALUES.items():
        step = parse_step({"logits": [1, 2, 3], "params": {name: value}})
        if name in MEANINGLESS:
            assert step.ignored == [name]
        elif name != "return_support":
            assert step.ignored == []
            assert step.row != plain.row, name


def test_fields_of_the_step_and_nulls() -> None:
    fields = {"prompt": [1], "output": [2, 2], "stop_ids": [0], "allowed": [0, 2], "choice": 127}
    assert set(fields) == set(STEP_FIELDS)
    step = parse_step({"logits": [1, 2, 3], "params": fields | {"stop_token_ids": [2], "bad_words": [[1], [2, 0]]}})
    assert (step.row.prompt_ids, step.row.output_ids, step.allowed) == ([1], [2, 2], [0, 2])
    assert (step.row.stop_ids, step.row.choice) == ((0, 2), 127)
    assert step.row.bad_words_token_ids == ((1,), (2, 0))
    nothing = dict.fromkeys((*STEP_FIELDS, *SHORT_NAMES, *SamplingParams.__struct_fields__))
    assert parse_step({"logits": [1, 2], "params": nothing}) == parse_step({"logits": [1, 2], "params": None})


def test_other_fields_of_a_line_are_named() -> None:
    line = {"id": 1, "logits": [1, 2], "parms": {}, "expect": {}, "note": "x", "params": {"n": 2, "max_tokens": None}}
    assert parse_step(line).ignored == ["parms", "note", "n"]


@pytest.mark.parametrize("name", ["foo", "top_K"])
def test_an_unknown_parameter_is_refused_though_it_is_null(name: str) -> None:
    with pytest.raises(LineError, match=f"^{name} is no sampling parameter") as caught:
        parse_step({"logits": [0.5], "params": {name: None}})
    assert caught.value.info.param == name
    known = dict.fromkeys((*VALUES, *STEP_FIELDS, *SHORT_NAMES, *REFUSED))
    assert parse_step({"logits": [0.5], "params": known}).ignored == []


@pytest.mark.parametrize("text", ["1e400", "-1e400", "NaN", "Infinity", "-Infinity"])
def test_a_number_that_is_none_is_refused_in_logits_and_params_alike(text: str) -> None:
    number = json.loads(text)
    with pytest.raises(LineError) as caught:
        parse_step({"logits": [0.5, number]})
    assert caught.value.info.param == "logits"
    with pytest.raises(LineError) as caught:
        parse_step({"logits": [0.5], "params": {"temperature": number}})
    assert caught.value.info.param == "temperature"
