"""What a line of ``lockstep sample`` may hold: what it cannot mean is said, and ends that line alone."""

from __future__ import annotations

import math
from typing import Any

import pytest

from launch.sample_rank import SampleLineError, parse_step


def test_numbers_and_names_of_what_is_no_number() -> None:
    step = parse_step({"logits": [1, -2.5, "nan", "inf", "-inf", 3.4e38]}, "a")
    assert step.logits[:2] == [1.0, -2.5]
    assert math.isnan(step.logits[2])
    assert step.logits[3:] == [math.inf, -math.inf, 3.4e38]


@pytest.mark.parametrize("value", [10**400, -(10**39), 1e39, "1", "Infinity", True, None, [1], {}])
def test_a_logit_that_is_none_is_named(value: Any) -> None:
    with pytest.raises(SampleLineError, match=r"^logits\[1\] is .* is needed$") as caught:
        parse_step({"logits": [0.5, value]}, "a")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("name", ["temperature", "top_k", "bad_words", "prompt", "allowed", "repetition"])
def test_a_parameter_beside_params_is_not_passed_over(name: str) -> None:
    with pytest.raises(SampleLineError, match=f"^{name} stands beside params"):
        parse_step({"logits": [1, 2], name: 0}, "a")


@pytest.mark.parametrize(
    ("name", "value"), [("bad_words", [[1]]), ("logit_processors", [{"name": "nobody_registered_this"}])]
)
def test_what_cannot_be_replayed_is_refused(name: str, value: Any) -> None:
    with pytest.raises(SampleLineError, match=f"^{name} cannot be replayed"):
        parse_step({"logits": [1, 2, 3], "params": {name: value}}, "a")
