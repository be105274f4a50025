"""A sequence's tokens by position, and the rules by which it ends."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar_sync.spec import GrammarSpec, parse_grammar
from runtime.messages import Action, AddSequence, ErrorInfo
from runtime.sequence import Sequence, SequenceState
from sampler.params import SamplingParams

EOS = frozenset({1, 2})
GRAMMAR = GrammarSpec("regex", "a+")


def sequence_of(
    output: list[int], *, max_tokens: int = 10, prompt: int = 3, grammar: GrammarSpec | None = None, **params: Any
) -> Sequence:
    sequence = Sequence.from_action(
        AddSequence(
            sequence_id=7,
            choice=2,
            prompt_token_ids=list(range(100, 100 + prompt)),
            max_tokens=max_tokens,
            params=SamplingParams(**params),
            seed=2**64 - 1,
            grammar=grammar,
        )
    )
    sequence.output_token_ids += output
    return sequence


@pytest.mark.parametrize(
    ("output", "grammar", "params", "expected"),
    [
        ([5], None, {}, None),
        ([5, 1], None, {}, "stop"),
        ([5, 2], None, {}, "stop"),
        ([1, 5], None, {"ignore_eos": True}, None),
        ([5, 1], None, {"ignore_eos": True}, None),
        ([5, 1], GRAMMAR, {}, "stop"),
        ([5, 1], GRAMMAR, {"ignore_eos": True}, "stop"),
        ([5], GRAMMAR, {"ignore_eos": True}, None),
        ([9], None, {"stop_token_ids": (8, 9)}, "stop"),
        ([9], None, {"stop_token_ids": (8, 9), "ignore_eos": True}, "stop"),
        ([7], None, {"stop_token_ids": (8, 9)}, None),
        ([1], None, {"stop_token_ids": (1,), "ignore_eos": True}, "stop"),
        ([5] * 9, None, {}, None),
        ([5] * 10, None, {}, "length"),
        ([5] * 10, GRAMMAR, {}, "length"),
        ([5] * 9 + [1], None, {}, "stop"),
        ([5] * 9 + [1], None, {"ignore_eos": True}, "length"),
        ([5] * 9 + [9], None, {"stop_token_ids": (9,)}, "stop"),
    ],
)
def test_why_a_sequence_ends(
    output: list[int], grammar: GrammarSpec | None, params: dict[str, Any], expected: str | None
) -> None:
    assert sequence_of(output, grammar=grammar, **params).reason_to_finish(EOS) == expected


def test_s6_ignore_eos_with_a_grammar_adds_nothing_after_its_end() -> None:
    for ignore_eos in (False, True):
        assert sequence_of([5, 1], grammar=GRAMMAR, ignore_eos=ignore_eos).reason_to_finish(EOS) == "stop"
    assert sequence_of([5, 1], grammar=None, ignore_eos=True).reason_to_finish(EOS) is None


def test_s15_ignore_eos_leaves_the_users_own_stop_ids_in_force() -> None:
    for token_id, expected in ((9, "stop"), (1, None), (5, None)):
        sequence = sequence_of([5, token_id], ignore_eos=True, stop_token_ids=(9,))
        assert sequence.reason_to_finish(EOS) == expected
    # Even where the user's own stop id is one of the model's ends.
    assert sequence_of([5, 1], ignore_eos=True, stop_token_ids=(1,)).reason_to_finish(EOS) == "stop"


def test_without_any_eos_only_length_and_stop_ids_end_it() -> None:
    assert sequence_of([1]).reason_to_finish(frozenset()) is None
    assert sequence_of([1], max_tokens=1).reason_to_finish(frozenset()) == "length"


@given(prompt=st.integers(1, 6), output=st.lists(st.integers(0, 50), max_size=6), data=st.data())
@settings(max_examples=100, deadline=None)
def test_tokens_by_position(prompt: int, output: list[int], data: st.DataObject) -> None:
    sequence = sequence_of(output, prompt=prompt)
    whole = [*sequence.prompt_token_ids, *output]
    start = data.draw(st.integers(0, len(whole)))
    length = data.draw(st.integers(0, len(whole) - start))
    assert sequence.token_ids(start, length) == whole[start : start + length]
    assert sequence.num_tokens == len(whole)
    assert sequence.capacity_tokens == prompt + 10
    assert sequence.prompt_token_ids == whole[:prompt]
    assert sequence.output_token_ids == output


def test_one_with_a_grammar_waits_for_it() -> None:
    assert sequence_of([]).state is SequenceState.WAITING
    assert sequence_of([], grammar=GRAMMAR).state is SequenceState.WAITING_FOR_GRAMMAR


def test_finishing_notes_reason_and_error() -> None:
    sequence = sequence_of([5])
    error = ErrorInfo("timeout", "late")
    sequence.finish("error", error)
    assert (sequence.state, sequence.finish_reason, sequence.error) == (SequenceState.FINISHED, "error", error)


def test_an_action_survives_the_wire_as_it_is() -> None:
    add: Action = AddSequence(
        sequence_id=7,
        choice=2,
        prompt_token_ids=[1, 2, 3],
        max_tokens=4,
        params=SamplingParams(stop=("x", "\n"), stop_token_ids=(3,), logit_bias={5: -1.5, 0: 2.0}, temperature=0.1),
        seed=2**64 - 1,
        grammar=parse_grammar({"json_schema": {"type": "object", "properties": {"b": {}, "a": {}}}}),
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode([add]), type=list[Action]) == [add]
