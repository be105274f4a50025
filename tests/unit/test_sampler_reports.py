"""What rows ask to know beside their token: logprobs raw and processed, scores, supports, ranks at fault."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
import torch
from dense_rows import processed_logits
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_ranks import SlicedSampler, assert_same_logprobs, assert_same_output, mask_of

from sampler.logprobs import LogprobRows
from sampler.params import RowSampling, SamplingParams
from sampler.sampler import MAX_SUPPORT, RowReason
from sampler.supports import RowStatus

_VOCAB = 500


def _row(source: random.Random) -> RowSampling:
    fields: dict[str, Any] = {"temperature": source.choice([0.0, 0.3, 1.0, 1.7])}
    if source.random() < 0.4:
        fields["top_p"] = source.choice([0.3, 0.9])
    if source.random() < 0.4:
        fields["top_k"] = source.choice([1, 5, 300])
    if source.random() < 0.3:
        fields |= {"frequency_penalty": 0.5, "presence_penalty": -0.25, "repetition_penalty": 1.3}
    if source.random() < 0.3:
        fields["logit_bias"] = {source.randrange(_VOCAB): source.uniform(-5, 5) for _ in range(3)}
    if source.random() < 0.2:
        fields["allowed_token_ids"] = tuple(source.sample(range(_VOCAB), 40))
    if source.random() < 0.2:
        fields["banned_token_ids"] = tuple(source.sample(range(_VOCAB), 40))
    if source.random() < 0.2:
        fields["min_tokens"] = 50
    if source.random() < 0.7:
        fields["logprobs"] = source.choice([0, 1, 5, 20])
    if source.random() < 0.3:
        fields["logprob_token_ids"] = tuple(source.sample(range(_VOCAB), 3))
    fields["logprobs_mode"] = source.choice(["raw", "processed"])
    fields["return_support"] = source.random() < 0.3
    return RowSampling(
        params=SamplingParams(**fields),
        seed=source.getrandbits(64),
        stop_ids=(7, 9),
        bad_words_token_ids=((3, 4), (5,)) if source.random() < 0.3 else (),
        prompt_ids=[source.randrange(_VOCAB) for _ in range(8)],
        output_ids=[*(source.randrange(_VOCAB) for _ in range(5)), 3],
    )


def _batch(seed: int, count: int) -> tuple[torch.Tensor, list[RowSampling], list[int], list[list[int] | None]]:
    source = random.Random(seed)
    logits = torch.randn(count, _VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    if source.random() < 0.5:
        logits = logits.bfloat16().float()
    rows = [_row(source) for _ in range(count)]
    masked = source.random() < 0.5
    allowed = [
        source.sample(range(_VOCAB), source.choice([250, 490])) if masked and source.random() < 0.5 else None
        for _ in rows
    ]
    return logits, rows, [source.choice([6, 60]) for _ in rows], allowed


def _asking(rows: list[RowSampling]) -> list[int]:
    return [place for place, row in enumerate(rows) if row.params.has_logprobs]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6))
def test_logprobs_are_of_the_right_token_by_either_definition(seed: int) -> None:
    logits, rows, positions, allowed = _batch(seed, 8)
    output = SlicedSampler(random.Random(seed).choice([1, 3]), _VOCAB).sample(
        logits, rows, positions, mask_of(allowed, _VOCAB) if any(allowed) else None
    )
    asking = _asking(rows)
    if not asking:
        assert output.logprobs is None
        return
    assert output.logprobs is not None
    found = output.logprobs
    for place, index in enumerate(asking):
        row, token = rows[index], int(output.token_ids[index])
        if output.status[index] == RowStatus.INVALID:
            continue
        raw = row.params.logprobs_mode == "raw"
        values = (
            logits[index].double() if raw else processed_logits(logits[index], row, positions[index], allowed[index])
        )
        expected = values.log_softmax(dim=0)
        assert found.token_ids[place] == token
        assert float(found.logprobs[place]) == pytest.approx(float(expected[token]), abs=1e-5)
        count = row.params.logprobs or 0
        ids = found.top_ids[place, :count]
        torch.testing.assert_close(found.top_logprobs[place, :count], expected[ids], rtol=0, atol=1e-5)
        best = expected.sort(descending=True).values[:count]
        torch.testing.assert_close(found.top_logprobs[place, :count], best, rtol=0, atol=1e-5)
        named = dict(zip(found.named_ids[place].tolist(), found.named_logprobs[place].tolist(), strict=True))
        assert set(row.params.logprob_token_ids) == {token_id for token_id in named if token_id >= 0}
        for token_id in row.params.logprob_token_ids:
            assert named[token_id] == pytest.approx(float(expected[token_id]), abs=1e-5)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6))
def test_what_is_reported_depends_on_the_row_alone(seed: int) -> None:
    logits, rows, positions, allowed = _batch(seed, 10)
    mask = mask_of(allowed, _VOCAB)
    source = random.Random(seed)
    together = SlicedSampler(1, _VOCAB).sample(logits, rows, positions, mask)
    candidates = source.choice([2, 128])
    assert_same_output(
        together,
        SlicedSampler(source.choice([2, 3, 4, 8]), _VOCAB, candidates=candidates).sample(logits, rows, positions, mask),
    )
    chosen = source.sample(range(10), source.randrange(1, 5))
    part = SlicedSampler(source.choice([1, 4]), _VOCAB).sample(
        logits[chosen], [rows[row] for row in chosen], [positions[row] for row in chosen], mask[chosen]
    )
    assert torch.equal(part.token_ids, together.token_ids[chosen])
    asking = _asking(rows)
    for place, index in enumerate(_asking([rows[row] for row in chosen])):
        whole = asking.index(chosen[index])
        assert together.logprobs is not None
        assert part.logprobs is not None
        count = rows[chosen[index]].params.logprobs or 0
        for name in ("logprobs", "token_ids"):
            ours, theirs = getattr(together.logprobs, name), getattr(part.logprobs, name)
            assert ours[whole].tolist() == theirs[place].tolist() or bool(ours[whole].isnan())
        if together.status[chosen[index]] != RowStatus.INVALID:
            ours, theirs = together.logprobs.top_logprobs[whole], part.logprobs.top_logprobs[place]
            assert torch.equal(ours[:count], theirs[:count])


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6))
def test_asking_changes_no_token_and_replay_gives_the_recorded_logprobs(seed: int) -> None:
    logits, rows, positions, allowed = _batch(seed, 8)
    mask = mask_of(allowed, _VOCAB)
    recorded = SlicedSampler(2, _VOCAB).sample(logits, rows, positions, mask)
    silent = [
        msgspec.structs.replace(
            row,
            params=msgspec.structs.replace(row.params, logprobs=None, logprob_token_ids=(), return_support=False),
        )
        for row in rows
    ]
    plain = SlicedSampler(2, _VOCAB).sample(logits, silent, positions, mask)
    assert torch.equal(plain.token_ids, recorded.token_ids)
    assert plain.logprobs is None
    assert plain.supports == []
    replayed = SlicedSampler(3, _VOCAB).score(logits, rows, positions, recorded.token_ids.tolist(), mask)
    assert torch.equal(replayed.token_ids, recorded.token_ids)
    assert (replayed.logprobs is None) == (recorded.logprobs is None)
    if recorded.logprobs is not None and replayed.logprobs is not None:
        assert_same_logprobs(recorded.logprobs, replayed.logprobs)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("masked", [False, True])
def test_prefill_and_decode_agree_bit_for_bit(temperature: float, masked: bool) -> None:
    logits = torch.randn(12, 3000, generator=torch.Generator().manual_seed(8)) * 5
    fields: list[dict[str, Any]] = [{}, {"logit_bias": {3: 1.0}}, {"top_p": 0.9}, {"top_k": 40}]
    rows = [
        RowSampling(params=SamplingParams(temperature=temperature, logprobs=20, **field), seed=seed)
        for seed, field in enumerate(fields * 3)
    ]
    mask = mask_of([list(range(1500))] * 12, 3000) if masked else None
    decoded = SlicedSampler(2, 3000).sample(logits, rows, [0] * 12, mask)
    assert decoded.logprobs is not None
    for size in (1, 2, 3, 4, 8):
        sampler = SlicedSampler(size, 3000)
        prefilled = sampler.token_logprobs(logits, decoded.token_ids.tolist(), 20)
        assert_same_logprobs(decoded.logprobs, prefilled)
        alone = sampler.token_logprobs(logits[5:6], decoded.token_ids.tolist()[5:6], 20)
        assert_same_logprobs(decoded.logprobs, alone, [5])


def test_sanitize_means_the_same_for_prompts_and_tokens() -> None:
    logits = torch.randn(3, _VOCAB, generator=torch.Generator().manual_seed(8))
    logits[0, 5], logits[1, 6] = float("nan"), float("inf")
    rows = [RowSampling(params=SamplingParams(logprobs=5), seed=seed) for seed in range(3)]
    for nan_policy in ("sanitize", "error"):
        sampler = SlicedSampler(2, _VOCAB, nan_policy=nan_policy)
        output = sampler.sample(logits, rows, [0] * 3, mask_of([None] * 3, _VOCAB))
        prompt = sampler.token_logprobs(logits, output.token_ids.tolist(), 5)
        assert output.logprobs is not None
        if nan_policy == "sanitize":
            assert_same_logprobs(output.logprobs, prompt)
            assert not bool(prompt.logprobs.isnan().any())
        else:
            assert prompt.logprobs.isnan().tolist() == [True, True, False]


@pytest.mark.parametrize("size", [1, 3])
def test_supports_are_reported_for_those_who_ask(size: int) -> None:
    fields: list[dict[str, Any]] = [
        {"top_k": 5},
        {"top_p": 0.8},
        {},
        {"temperature": 0.0},
        {"min_p": 0.2, "temperature": 0.5},
        {"top_k": 7},
        {"allowed_token_ids": (1, 499)},
    ]
    rows = [
        RowSampling(params=SamplingParams(return_support=place != 5, **field), seed=place)
        for place, field in enumerate(fields)
    ]
    logits = torch.randn(7, _VOCAB, generator=torch.Generator().manual_seed(8)) * 3
    for candidates in (128, 2):
        sampler = SlicedSampler(size, _VOCAB, candidates=candidates)
        output = sampler.sample(logits, rows, [0] * 7)
        expected = sampler.support(logits, rows, [0] * 7)
        asking = [0, 1, 2, 3, 4, 6]
        assert len(output.supports) == len(asking)
        for place, got in zip(asking, output.supports, strict=True):
            assert got.status is RowStatus.OK
            assert torch.equal(got.ids, expected[place].ids)
            assert torch.equal(got.logprobs, expected[place].logprobs)
            torch.testing.assert_close(got.logprobs.exp(), expected[place].probabilities)
            assert int(output.token_ids[place]) in got.ids.tolist()
        assert len(output.supports[0].ids) == 5
        assert output.supports[3].logprobs.tolist() == [0.0]


@pytest.mark.parametrize("size", [1, 4])
def test_a_support_too_large_is_said_to_be(size: int) -> None:
    vocab_size = MAX_SUPPORT + 10
    fields: list[dict[str, Any]] = [
        {},
        {"top_k": MAX_SUPPORT + 1},
        {"top_k": MAX_SUPPORT},
        {"banned_token_ids": tuple(range(10))},
    ]
    rows = [RowSampling(params=SamplingParams(return_support=True, **field), seed=1) for field in fields]
    logits = torch.arange(vocab_size, dtype=torch.float32).div(1000).expand(5, vocab_size).contiguous()
    logits[4] = float("nan")
    rows.append(RowSampling(params=SamplingParams(return_support=True), seed=1))
    output = SlicedSampler(size, vocab_size).sample(logits, rows, [0] * 5)
    expected = [RowStatus.OVERFLOW, RowStatus.OVERFLOW, RowStatus.OK, RowStatus.OK, RowStatus.INVALID]
    assert [support.status for support in output.supports] == expected
    assert output.status.tolist() == expected
    assert [len(support.ids) for support in output.supports] == [0, 0, MAX_SUPPORT, MAX_SUPPORT, 0]
    assert bool((output.token_ids[:4] >= 0).all())


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"temperature": 0.8}, {"top_p": 0.9}])
def test_a_bad_row_names_the_lowest_rank_that_saw_it(fields: dict[str, Any]) -> None:
    vocab_size = 64 * 32
    logits = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(8))
    clean = logits.clone()
    logits[1, 40 * 32] = float("nan")
    logits[2] = float("nan")
    logits[3, [17 * 32, 63 * 32]] = float("inf")
    logits[4] = float("-inf")
    rows = [RowSampling(params=SamplingParams(logprobs=3, **fields), seed=seed) for seed in range(6)]
    output = SlicedSampler(4, vocab_size).sample(logits, rows, [0] * 6)
    assert output.fault_ranks.tolist() == [-1, 2, 0, 1, -1, -1]
    assert output.reasons.tolist() == [0, *[RowReason.NON_FINITE] * 3, RowReason.EMPTY_SUPPORT, 0]
    expected = SlicedSampler(4, vocab_size).sample(clean, rows, [0] * 6)
    assert expected.fault_ranks.tolist() == [-1] * 6
    assert output.token_ids[[0, 5]].tolist() == expected.token_ids[[0, 5]].tolist()
    assert output.logprobs is not None
    assert expected.logprobs is not None
    for name in LogprobRows.__dataclass_fields__:
        assert torch.equal(getattr(output.logprobs, name)[[0, 5]], getattr(expected.logprobs, name)[[0, 5]])


def test_nobody_asked_costs_nothing() -> None:
    logits = torch.randn(2, 4096, generator=torch.Generator().manual_seed(8))
    sizes = {}
    asked: dict[str, dict[str, Any]] = {
        "none": {},
        "logprobs": {"logprobs": 5},
        "own": {"logprobs": 0},
        "support": {"return_support": True},
    }
    for name, fields in asked.items():
        sampler = SlicedSampler(2, 4096)
        rows = [
            RowSampling(params=SamplingParams(top_k=5, **fields), seed=1),
            RowSampling(params=SamplingParams(), seed=1),
        ]
        sampler.sample(logits, rows, [0, 0])
        sizes[name] = sampler.payload_bytes
    assert len(sizes["none"]) == 2
    assert len(sizes["logprobs"]) == 3
    assert len(sizes["support"]) == 5
    assert sizes["support"][:3] == sizes["own"], "its own logprob comes with it"
    # 64 block maxima and masses, 5 best ids, for one row; then one number.
    assert sizes["logprobs"][0][1] == sizes["none"][0][1] + 4 * (2 * 32 + 2 * 5)
    assert sizes["logprobs"][2][1] == 4


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": 20},
        {"logprobs": 20, "logprobs_mode": "processed", "temperature": 0.5, "logprob_token_ids": (1, 2)},
        {"logprobs": 20, "logit_bias": {3: 1.0}},
        {"return_support": True, "top_k": 300},
        {"return_support": True},
    ],
)
def test_no_collective_grows_with_the_vocabulary(fields: dict[str, Any]) -> None:
    largest = {}
    for vocab_size in (8_000, 64_000):
        rows = [RowSampling(params=SamplingParams(**fields), seed=seed) for seed in range(2)]
        logits = torch.randn(2, vocab_size, generator=torch.Generator().manual_seed(2)) * 2
        sampler = SlicedSampler(4, vocab_size)
        sampler.sample(logits, rows, [0, 0])
        largest[vocab_size] = max(size for _, size in sampler.payload_bytes)
    assert largest[64_000] <= max(largest[8_000], 2 * 8 * 300)
