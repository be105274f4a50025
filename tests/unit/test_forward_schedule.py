"""A rank that makes another operation than its forward passes have is told before it is made."""

from __future__ import annotations

import pytest
import torch

from tp.schedule import ForwardSchedule


def rows(tokens: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(tokens, 6, dtype=dtype)


@pytest.fixture
def learnt() -> ForwardSchedule:
    """Returns a schedule of two all_reduces and an all_gather, learnt over three tokens."""
    schedule = ForwardSchedule()
    schedule.begin(3)
    for operation in ("all_reduce", "all_gather", "all_reduce"):
        assert schedule.problem(operation, rows(3)) is None
    assert schedule.end() is None
    return schedule


@pytest.mark.parametrize("tokens", [1, 3, 17])
def test_the_same_operations_over_any_tokens_are_right(learnt: ForwardSchedule, tokens: int) -> None:
    learnt.begin(tokens)
    assert learnt.is_open
    for operation in ("all_reduce", "all_gather", "all_reduce"):
        assert learnt.problem(operation, rows(tokens)) is None
    assert learnt.end() is None
    assert not learnt.is_open


def test_what_is_outside_a_forward_pass_is_free(learnt: ForwardSchedule) -> None:
    assert learnt.problem("all_gather", torch.zeros(5, dtype=torch.int64)) is None


@pytest.mark.parametrize(
    ("operation", "tensor", "said"),
    [
        ("all_gather", rows(4), "operation 1 of a forward pass is all_reduce"),
        ("all_reduce", rows(4, torch.float64), "operation 1 of a forward pass has torch.float32, not torch.float64"),
        ("all_reduce", rows(2), "operation 1 of a forward pass over 4 tokens has 24 elements, not 12"),
    ],
)
def test_a_wrong_operation_is_named(learnt: ForwardSchedule, operation: str, tensor: torch.Tensor, said: str) -> None:
    learnt.begin(4)
    assert learnt.problem(operation, tensor) == said


def test_one_operation_more_or_less(learnt: ForwardSchedule) -> None:
    learnt.begin(2)
    for operation in ("all_reduce", "all_gather"):
        assert learnt.problem(operation, rows(2)) is None
    assert learnt.end() == "the forward pass made 2 operations of 3"
    learnt.begin(2)
    for operation in ("all_reduce", "all_gather", "all_reduce"):
        assert learnt.problem(operation, rows(2)) is None
    assert learnt.problem("all_reduce", rows(2)) == "a forward pass has 3 operations, this is one more"
