"""Values in messages: in JSON's words, and short whatever they are."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sampler.params import SamplingParams, SamplingParamsError
from sampler.shown_value import kind_of, shown


@pytest.mark.parametrize(
    ("value", "text", "kind"),
    [
        (None, "null", "null"),
        (True, "true", "true"),
        (math.nan, "NaN", "a number"),
        (-math.inf, "-Infinity", "a number"),
        (0.5, "0.5", "a number"),
        (7, "7", "an integer"),
        (1 << 200, "an integer of 201 bits", "an integer"),
        ("a'b", '"a\'b"', "a string"),
        ([1], "[1]", "a list"),
        ({}, "{}", "an object"),
    ],
)
def test_values_are_shown_as_json_has_them(value: Any, text: str, kind: str) -> None:
    assert (shown(value), kind_of(value)) == (text, kind)


def test_what_is_long_or_deep_is_cut() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert shown(deep) == "a list, deeply nested"
    assert len(shown("x" * 900)) == 80


@pytest.mark.parametrize(("value", "text"), [(True, "true"), (math.nan, "NaN"), (math.inf, "Infinity")])
def test_a_refused_parameter_is_shown_so(value: Any, text: str) -> None:
    with pytest.raises(SamplingParamsError, match=f", not {text}$"):
        SamplingParams.parse({"temperature": value}, vocab_size=8, max_model_len=8)
