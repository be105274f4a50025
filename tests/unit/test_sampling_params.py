"""Sampling parameters: every field, every bad value, and a message that says what is allowed."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sampler.params import ProcessorCall, SamplingParams, SamplingParamsError

_VOCAB = 49_152
_CONTEXT = 2_048
_NAN, _INF = float("nan"), float("inf")


def _parse(**fields: Any) -> SamplingParams:
    return SamplingParams.parse(fields, vocab_size=_VOCAB, max_model_len=_CONTEXT)


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def test_defaults_and_nulls() -> None:
    params = _parse()
    assert params == SamplingParams()
    assert params == _parse(**dict.fromkeys(SamplingParams.__struct_fields__))
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.n) == (1.0, 1.0, -1, 0.0, 1)
    assert params.max_tokens is None
    assert params.seed is None
    assert params.filter_order == "joint"
    assert not params.is_greedy
    assert not params.has_penalties


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("max_tokens", 1, 1),
        ("max_tokens", _CONTEXT, _CONTEXT),
        ("temperature", 0, 0.0),
        ("temperature", 1e-40, 1e-40),
        ("temperature", 1e9, 1e9),
        ("top_p", 1e-6, 1e-6),
        ("top_p", 1, 1.0),
        ("top_k", 0, 0),
        ("top_k", -1, -1),
        ("top_k", 50, 50),
        ("top_k", 10**9, -1),
        ("top_k", _VOCAB, -1),
        ("top_k", _VOCAB - 1, _VOCAB - 1),
        ("min_p", 0, 0.0),
        ("min_p", 1.0, 1.0),
        ("filter_order", "top_k_first", "top_k_first"),
        ("seed", 0, 0),
        ("seed", 2**64 - 1, 2**64 - 1),
        ("n", 1, 1),
        ("n", 128, 128),
        ("stop", "END", ("END",)),
        ("stop", ["a", "b,c"], ("a", "b,c")),
        ("stop", [], ()),
        ("stop_token_ids", [0, _VOCAB - 1, 0], (0, _VOCAB - 1)),
        ("ignore_eos", True, True),
        ("min_tokens", 5, 5),
        ("logit_bias", {"7": -100, 8: 1.5}, {7: -100.0, 8: 1.5}),
        ("logit_bias", {"7": 1, "07": 1.0, 7: 1}, {7: 1.0}),
        ("logit_bias", {}, {}),
        ("frequency_penalty", -2, -2.0),
        ("presence_penalty", 2.0, 2.0),
        ("repetition_penalty", 0.5, 0.5),
        ("allowed_token_ids", [5, 0, 5], (5, 0)),
        ("banned_token_ids", [], ()),
        ("banned_token_ids", [_VOCAB - 1], (_VOCAB - 1,)),
        ("bad_words", ["damn", [5, 6], [7]], ("damn", (5, 6), (7,))),
        ("logit_processors", [{"name": "a"}], (ProcessorCall(name="a"),)),
        ("logit_processors", [{"name": "a", "args": {"x": 1}}], (ProcessorCall(name="a", args={"x": 1}),)),
        ("logprobs", 0, 0),
        ("logprobs", 20, 20),
        ("logprob_token_ids", [3, 3, 4], (3, 4)),
        ("prompt_logprobs", 0, 0),
        ("logprobs_mode", "processed", "processed"),
        ("return_support", True, True),
    ],
)
def test_good_values(field: str, value: object, expected: object) -> None:
    parsed = getattr(_parse(**{field: value}), field)
    assert parsed == expected
    assert type(parsed) is type(expected)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", [0, -1, 1.0, 1.5, True, "7", _CONTEXT + 1, [], 10**5000]),
        ("temperature", [-0.1, _NAN, _INF, -_INF, True, "1", 1.0001e9, [1], 10**400]),
        ("top_p", [0, 0.0, -0.1, 1.0001, _NAN, _INF, False, "0.9"]),
        ("top_k", [-2, 1.5, 5.0, True, "5", 2**31, _NAN]),
        ("min_p", [-0.01, 1.01, _NAN, True, "0"]),
        ("filter_order", ["sorted", "", 1, True, ["joint"]]),
        ("seed", [-1, 2**64, 1.5, True, "7", 42.0, _NAN]),
        ("n", [0, 129, -1, 1.0, True, "2"]),
        ("stop", ["", ["a", ""], [1], ["a"] * 17, 5, {"a": 1}, [None]]),
        ("stop_token_ids", [[_VOCAB], [151_645], [-1], [1.5], [True], ["7"], 7, "7", {"7": 1}]),
        ("ignore_eos", [0, 1, "true", []]),
        ("min_tokens", [-1, _CONTEXT + 1, 1.5, True, "1"]),
        (
            "logit_bias",
            [
                {"191222": -100},
                {"-1": 1},
                {"1.5": 1},
                {"abc": 1},
                {"": 1},
                {" 7": 1},
                {"٣": 1},
                {"9" * 5000: 1},
                {"7": 1, "07": 2},
                {"007": 0, 7: -1},
                {True: 1},
                {1.5: 1},
                {"7": _INF},
                {"7": -_INF},
                {"7": _NAN},
                {"7": 100.5},
                {"7": True},
                {"7": "1"},
                {"7": None},
                [7],
                7,
            ],
        ),
        ("frequency_penalty", [2.01, -2.01, _NAN, True, "1"]),
        ("presence_penalty", [2.01, -2.01, _INF, False, "1"]),
        ("repetition_penalty", [0, -1, 0.0001, 1001, _NAN, _INF, True, "1"]),
        ("logprobs", [-1, 21, 1.5, True, "5"]),
        ("prompt_logprobs", [-1, 21, 1.5, True, "5"]),
        ("allowed_token_ids", [[], [_VOCAB], [-1], ["5"], [True], 5, {"5": 1}]),
        ("banned_token_ids", [[_VOCAB], [-1], [1.0], "5", 5]),
        ("bad_words", [[""], [[]], [[_VOCAB]], [[True]], [5], "damn", ["a"] * 257, [[1] * 65], [None]]),
        (
            "logit_processors",
            [
                "a",
                ["a"],
                [{}],
                [{"name": 5}],
                [{"name": "a", "args": []}],
                [{"name": "a", "code": "x"}],
                [{"name": "a"}] * 17,
                [{"name": "a", "args": {"x": 2**64}}],
                [{"name": "a", "args": {"x": _nested(40)}}],
                [{"name": "a", "args": {"x": _nested(100_000)}}],
            ],
        ),
        ("logprob_token_ids", [[_VOCAB], [-1], 5, list(range(129))]),
        ("logprobs_mode", ["RAW", "", 1, True, ["raw"], "logits"]),
        ("return_support", [0, 1, "true", []]),
    ],
)
def test_bad_values_name_field_and_range(field: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(SamplingParamsError) as error:
            _parse(**{field: value})
        message = str(error.value)
        assert error.value.param == field
        assert isinstance(error.value, ValueError)
        assert message.startswith(f"{field} must be "), message
        assert ", not " in message
        assert len(message) < 250
        assert "\n" not in message


def test_two_keys_of_one_id_that_differ_are_named() -> None:
    with pytest.raises(SamplingParamsError, match=r"by an id once \(id 7 has 1.5 already\), not '07'$"):
        _parse(logit_bias={"3": 2, "7": 1.5, "07": 2})


@pytest.mark.parametrize("bias", [101, -100.5, True, "1", None, math.nan])
def test_a_bias_out_of_range_is_named_by_its_id(bias: object) -> None:
    with pytest.raises(SamplingParamsError, match=r"^logit_bias must be numbers from -100 to 100, not .* \(id 3\)$"):
        _parse(logit_bias={"2": 1, "03": bias})


def test_unknown_fields_are_refused_by_name() -> None:
    with pytest.raises(SamplingParamsError, match="best_of is no sampling parameter") as error:
        _parse(best_of=3)
    assert error.value.param == "best_of"


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({}, False),
        ({"logprobs": 0}, True),
        ({"logprob_token_ids": [4]}, True),
        ({"prompt_logprobs": 3}, False),
        ({"return_support": True}, True),
    ],
)
def test_who_asks_for_logprobs(fields: dict[str, object], asked: bool) -> None:
    assert _parse(**fields).has_logprobs is asked


def test_parameters_travel_as_json() -> None:
    params = _parse(
        logit_processors=[{"name": "a", "args": {"x": [1, {"y": None}]}}],
        bad_words=["x", [1, 2]],
        allowed_token_ids=[3],
        logit_bias={"4": 1},
    )
    assert msgspec.json.decode(msgspec.json.encode(params), type=SamplingParams) == params
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_min_tokens_is_at_most_max_tokens() -> None:
    assert _parse(min_tokens=5, max_tokens=5).min_tokens == 5
    with pytest.raises(SamplingParamsError, match=r"min_tokens must be an integer from 0 to max_tokens \(5\), not 6"):
        _parse(min_tokens=6, max_tokens=5)


@pytest.mark.parametrize(
    ("fields", "greedy"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 1e-40}, True),
        ({"temperature": 9.9e-7}, True),
        ({"temperature": 1e-6}, False),
        ({"temperature": 1, "top_k": 1}, True),
        ({"temperature": 0.01, "top_k": 1, "top_p": 0.8}, True),
        ({"top_k": 2}, False),
    ],
)
def test_what_is_greedy(fields: dict[str, object], greedy: bool) -> None:
    assert _parse(**fields).is_greedy is greedy


def test_numbers_are_finite_after_parsing() -> None:
    params = _parse(temperature=1e9, repetition_penalty=1000, logit_bias={"1": 100})
    assert math.isfinite(params.temperature * params.repetition_penalty)


def test_the_module_needs_no_torch() -> None:
    code = "import sys, sampler.params; sys.exit('torch' in sys.modules)"
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
