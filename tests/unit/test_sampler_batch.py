"""The state of a batch after any history equals the state built from its rows and their outputs so far."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sampler.adjust import PenaltyState, SparseRows
from sampler.batch import SamplingBatchInfo
from sampler.params import ProcessorCall, RowSampling, SamplingParams

_VOCAB = 12
_TENSORS = (
    "greedy",
    "truncated",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "top_k_first",
    "seeds",
    "choices",
)
_SPARSE = ("bias", "banned", "bans", "allowed", "named")

_ids = st.integers(0, _VOCAB - 1)
_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    top_k=st.sampled_from([-1, 0, 1, 5]),
    top_p=st.sampled_from([0.5, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    filter_order=st.sampled_from(["joint", "top_k_first"]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    presence_penalty=st.sampled_from([0.0, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    min_tokens=st.sampled_from([0, 3]),
    logit_bias=st.none() | st.dictionaries(_ids, st.sampled_from([-1.0, 2.0]), max_size=4),
    allowed_token_ids=st.none() | st.lists(_ids, min_size=1, max_size=4, unique=True).map(tuple),
    banned_token_ids=st.lists(_ids, max_size=3, unique=True).map(tuple),
    logit_processors=st.sampled_from([(), (ProcessorCall(name="a"),)]),
    logprobs=st.sampled_from([None, 0, 3]),
    logprob_token_ids=st.lists(_ids, max_size=2, unique=True).map(tuple),
    return_support=st.booleans(),
)
_row = st.builds(
    RowSampling,
    params=_params,
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 5),
    stop_ids=st.lists(_ids, max_size=3).map(tuple),
    bad_words_token_ids=st.lists(st.lists(_ids, min_size=1, max_size=3).map(tuple), max_size=2).map(tuple),
    prompt_ids=st.lists(_ids, max_size=6),
    output_ids=st.lists(_ids, max_size=3),
)


class _Mirror:
    """A batch, and what its rows would be built from."""

    def __init__(self, rows: list[RowSampling]) -> None:
        self.rows = rows
        self.batch = SamplingBatchInfo.from_rows(rows)

    def append(self, tokens: list[int]) -> None:
        self.batch.append_tokens(torch.tensor(tokens, dtype=torch.int64))
        self.rows = [
            msgspec.structs.replace(row, output_ids=[*row.output_ids, token]) if token >= 0 else row
            for row, token in zip(self.rows, tokens, strict=True)
        ]


def _sparse(part: SparseRows | None) -> list[dict[int, float]] | None:
    if part is None:
        return None
    return [
        {token: value for token, value in zip(ids, values, strict=True) if token >= 0}
        for ids, values in zip(part.ids.tolist(), part.values.tolist(), strict=True)
    ]


def _penalties(state: PenaltyState | None) -> list[Any] | None:
    if state is None:
        return None
    assert state.lengths.tolist() == [sum(token >= 0 for token in ids) for ids in state.ids.tolist()]
    seen = [_sparse(SparseRows(state.ids, table)) for table in (state.counts, state.additive)]
    strengths = torch.cat((state.frequency, state.presence, state.repetition), dim=1).tolist()
    return [seen, strengths, state.active.tolist()]


def _differences(batch: SamplingBatchInfo, rebuilt: SamplingBatchInfo) -> list[str]:
    """Returns in which fields two batches differ."""
    fields = ("row_count", "flags", "output_ids")
    found = [name for name in fields if getattr(batch, name) != getattr(rebuilt, name)]
    found += [name for name in _TENSORS if not torch.equal(getattr(batch, name), getattr(rebuilt, name))]
    found += [name for name in _SPARSE if _sparse(getattr(batch, name)) != _sparse(getattr(rebuilt, name))]
    same = _penalties(batch.penalties) == _penalties(rebuilt.penalties)
    if not same or not _penalize_alike(batch.penalties, rebuilt.penalties):
        found.append("penalties")
    return found


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_history_equals_rebuilding(data: st.DataObject) -> None:
    for batch, rebuilt in _history(data):
        assert _differences(batch, rebuilt) == []


@pytest.mark.sweep
@settings(max_examples=1000, deadline=None)
@given(st.data())
def test_any_of_many_histories_equals_rebuilding(data: st.DataObject) -> None:
    for batch, rebuilt in _history(data):
        assert _differences(batch, rebuilt) == []


def _history(data: st.DataObject) -> Iterator[tuple[SamplingBatchInfo, SamplingBatchInfo]]:
    """Takes a batch through a random history; yields it and one built anew after each step of it."""
    mirror = _Mirror(data.draw(st.lists(_row, max_size=4)))
    for _ in range(data.draw(st.integers(1, 6))):
        match data.draw(st.sampled_from(["append", "filter", "merge"])):
            case "append":
                count = len(mirror.rows)
                mirror.append(data.draw(st.lists(st.integers(-1, _VOCAB - 1), min_size=count, max_size=count)))
            case "filter":
                places = st.sampled_from(range(len(mirror.rows))) if mirror.rows else st.nothing()
                keep = data.draw(st.lists(places, unique=True, max_size=len(mirror.rows)))
                mirror.batch.filter(keep)
                mirror.rows = [mirror.rows[place] for place in keep]
            case _:
                joining = data.draw(st.lists(_row, max_size=3))
                mirror.batch.merge(SamplingBatchInfo.from_rows(joining))
                mirror.rows = [*mirror.rows, *joining]
        yield mirror.batch, SamplingBatchInfo.from_rows(mirror.rows)


def _penalize_alike(state: PenaltyState | None, rebuilt: PenaltyState | None) -> bool:
    """Whether both change a slice's logits alike, whichever slice they were asked about before."""
    if state is None or rebuilt is None:
        return state is rebuilt
    # The first is the one asked about last time, before tokens were added or rows moved.
    for start in (5, 0, 5):
        logits = torch.linspace(-3.0, 4.0, len(state.ids) * 6).view(-1, 6)
        expected = logits.clone()
        state.apply_(logits, start)
        rebuilt.apply_(expected, start)
        if not torch.equal(logits, expected):
            return False
    return True


def _rows(*fields: dict[str, Any]) -> list[RowSampling]:
    return [
        RowSampling(params=SamplingParams(**field), seed=index, stop_ids=(1,)) for index, field in enumerate(fields)
    ]


def test_nobody_asked_means_none_and_flags_follow_the_rows() -> None:
    plain = SamplingBatchInfo.from_rows(_rows({}, {"temperature": 0}))
    assert plain.penalties is None
    assert plain.bias is None
    assert plain.banned is None
    assert not plain.flags.any_truncated
    assert plain.flags.any_greedy
    assert not plain.flags.all_greedy
    assert plain.flags.needs_mass == (True, False)
    asking = _rows({"frequency_penalty": 1.0}, {"logit_bias": {3: 1.0}}, {"min_tokens": 2}, {"top_k": 5})
    plain.merge(SamplingBatchInfo.from_rows(asking))
    assert plain.row_count == 6
    assert plain.penalties is not None
    assert plain.bias is not None
    assert plain.banned is not None
    assert plain.flags.any_truncated
    assert plain.rows_below_min_tokens([0] * 6) == [4]
    assert plain.rows_below_min_tokens([9] * 6) == []
    plain.filter([1])
    assert (plain.penalties, plain.bias, plain.banned) == (None, None, None)
    assert (plain.bans, plain.allowed, plain.named, plain.output_ids) == (None, None, None, None)
    assert plain.flags.all_greedy
    assert not plain.flags.any_truncated


def test_an_empty_bias_asks_for_nothing() -> None:
    assert SamplingBatchInfo.from_rows(_rows({"logit_bias": {}})).bias is None


def test_an_index_that_is_no_row_is_an_error() -> None:
    for place in (2, -1):
        with pytest.raises(IndexError):
            SamplingBatchInfo.from_rows(_rows({}, {})).filter([place])


def _addresses(batch: SamplingBatchInfo) -> dict[str, int]:
    """Returns where each tensor of a batch is."""
    found = {name: getattr(batch, name).data_ptr() for name in _TENSORS}
    for name in _SPARSE:
        part = getattr(batch, name)
        assert part is not None
        found |= {f"{name}.ids": part.ids.data_ptr(), f"{name}.values": part.values.data_ptr()}
    assert batch.penalties is not None
    for name in ("ids", "counts", "additive", "lengths", "active", "frequency", "presence", "repetition"):
        found[f"penalties.{name}"] = getattr(batch.penalties, name).data_ptr()
    return found


def test_buffers_keep_their_addresses_while_rows_come_and_go() -> None:
    fields: dict[str, Any] = {
        "frequency_penalty": 1.0,
        "logit_bias": {3: 1.0},
        "min_tokens": 2,
        "allowed_token_ids": (1, 2, 3),
        "banned_token_ids": (2,),
        "logprob_token_ids": (1,),
    }
    batch = SamplingBatchInfo.from_rows(_rows(*[fields] * 5))
    for _ in range(10):
        batch.append_tokens(torch.tensor([3] * 5))
    first = _addresses(batch)
    for step in range(8):
        batch.filter([4, 0, 2])
        batch.merge(SamplingBatchInfo.from_rows(_rows(*[fields] * 6)))
        batch.append_tokens(torch.full((9,), step))
        batch.filter([8, 1, 0, 5, 6])
        assert _addresses(batch) == first
        assert batch.row_count == len(batch.seeds) == 5
    batch.merge(SamplingBatchInfo.from_rows(_rows(*[fields] * 12)))
    assert all(address != first[name] for name, address in _addresses(batch).items())


def test_penalties_count_output_and_see_the_prompt_once() -> None:
    row = RowSampling(
        params=SamplingParams(frequency_penalty=0.5, presence_penalty=1.0, repetition_penalty=2.0),
        seed=0,
        prompt_ids=[0, 0, 1],
        output_ids=[1, 2],
    )
    batch = SamplingBatchInfo.from_rows([row])
    for token in (2, 4, 2):
        batch.append_tokens(torch.tensor([token]))
    assert batch.penalties is not None
    for start, width in ((0, 6), (2, 4)):
        whole = torch.tensor([[4.0, 4.0, 4.0, 4.0, -4.0, float("-inf")]])
        logits = whole[:, start : start + width].contiguous()
        batch.penalties.apply_(logits, start)
        # 0: the prompt only; 1: once; 2: three times; 3: never; 4: once, below 0.
        expected = [2.0, (4 - 1.5) / 2, (4 - 2.5) / 2, 4.0, (-4 - 1.5) * 2, float("-inf")]
        assert logits.tolist() == [expected[start:]]
