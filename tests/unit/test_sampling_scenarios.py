"""Faults that users of comparable systems met, as far as they live in the sampler; tests are named by scenario."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from dense_rows import processed_logits
from simulated_ranks import SlicedSampler, assert_same_output, mask_of

from sampler.batch import SamplingBatchInfo
from sampler.logprobs import LOGPROB_FLOOR, finite_logprob
from sampler.params import RowSampling, SamplingParams, SamplingParamsError
from sampler.sampler import RowReason, SamplerError
from sampler.supports import RowStatus

pytestmark = pytest.mark.long(30)

_VOCAB = 320
_SIZES = (1, 2, 3, 4, 8)


def _parse(**fields: Any) -> SamplingParams:
    return SamplingParams.parse(fields, vocab_size=_VOCAB, max_model_len=2048)


def _row(seed: int = 1, **fields: Any) -> RowSampling:
    own = {name: fields.pop(name) for name in ("choice", "stop_ids", "prompt_ids", "output_ids") if name in fields}
    params = _parse(**fields)
    words = tuple(word for word in params.bad_words if isinstance(word, tuple))
    return RowSampling(params=params, seed=seed, bad_words_token_ids=words, **own)


def _logits(count: int, seed: int = 4) -> torch.Tensor:
    return torch.randn(count, _VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def _tokens(size: int, logits: torch.Tensor, rows: list[RowSampling], position: int = 0) -> list[int]:
    return SlicedSampler(size, _VOCAB).sample(logits, rows, [position] * len(rows)).token_ids.tolist()


@pytest.mark.parametrize("size", _SIZES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_t11_a_grammar_beats_min_tokens_and_an_empty_mask_ends_its_row(size: int, temperature: float) -> None:
    eos = 319
    bias = {"5": -100, "6": -100}
    rows = [
        _row(temperature=temperature, min_tokens=64, stop_ids=(eos,)),
        _row(temperature=temperature, logit_bias=bias),
        _row(temperature=temperature),
        _row(temperature=temperature),
    ]
    output = SlicedSampler(size, _VOCAB).sample(_logits(4), rows, [3] * 4, mask_of([[eos], [5, 6], [], None], _VOCAB))
    assert output.status.tolist() == [RowStatus.OK, RowStatus.OK, RowStatus.INVALID, RowStatus.OK]
    assert output.reasons[2] == RowReason.EMPTY_SUPPORT
    tokens = output.token_ids.tolist()
    assert tokens[0] == eos
    assert tokens[1] in (5, 6)
    assert tokens[3] == _tokens(size, _logits(4)[3:], rows[3:], 3)[0]


@pytest.mark.parametrize("size", _SIZES)
def test_t12_rows_of_a_mixed_batch_equal_their_solo_runs(size: int) -> None:
    logits = _logits(5)
    rows = [
        _row(1, temperature=0.9),
        _row(2, top_p=0.9, logprobs=3),
        _row(3, temperature=0.7, frequency_penalty=1.0, output_ids=[4, 4, 5], return_support=True),
        _row(4, top_k=9, bad_words=[[3, 4]]),
        _row(5, temperature=0.0),
    ]
    allowed = [None, [1, 2, 3, 200], None, list(range(100, 300)), None]
    sampler = SlicedSampler(size, _VOCAB)
    together = sampler.sample(logits, rows, [2] * 5, mask_of(allowed, _VOCAB))
    solo = [sampler.sample(logits[i : i + 1], rows[i : i + 1], [2], mask_of([allowed[i]], _VOCAB)) for i in range(5)]
    assert together.token_ids.tolist() == [int(one.token_ids[0]) for one in solo]
    # Row 1 ends, the rest moves up, another joins.
    batch = SamplingBatchInfo.from_rows(rows)
    batch.filter([0, 2, 3, 4])
    batch.merge(SamplingBatchInfo.from_rows([_row(6, min_p=0.1)]))
    kept = [0, 2, 3, 4]
    again = sampler.sample(
        torch.cat((logits[kept], _logits(1, seed=9))),
        batch.rows,
        [2] * 5,
        mask_of([*(allowed[i] for i in kept), None], _VOCAB),
    )
    assert again.token_ids[:4].tolist() == together.token_ids[kept].tolist()
    with pytest.raises(SamplerError, match="mask_words must be"):
        sampler.sample(logits, rows, [2] * 5, mask_of(allowed[:4], _VOCAB))


@pytest.mark.parametrize("size", _SIZES)
def test_t13_padding_ids_are_never_sampled(size: int) -> None:
    # The mask leaves the bits of padding set, as grammar engines do.
    logits = torch.full((60, 257), -50.0)
    rows = [_row(seed, temperature=temperature) for seed in range(30) for temperature in (1.0, 1e9)]
    tokens = SlicedSampler(size, 257).sample(logits, rows, [0] * 60, mask_of([None] * 60, 257)).token_ids
    assert bool(((tokens >= 0) & (tokens < 257)).all())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("size", _SIZES)
@pytest.mark.parametrize("bad", ["all NaN", "one NaN", "+inf", "-inf"])
def test_t14_a_bad_row_ends_alone_and_names_its_rank(temperature: float, size: int, bad: str) -> None:
    logits = _logits(3)
    rows = [_row(seed, temperature=temperature, logprobs=2, return_support=True) for seed in range(3)]
    sampler = SlicedSampler(size, _VOCAB)
    clean = sampler.sample(logits, rows, [0] * 3)
    if bad == "one NaN":
        logits[1, 100] = float("nan")
    else:
        logits[1] = {"all NaN": float("nan"), "+inf": float("inf"), "-inf": float("-inf")}[bad]
    output = sampler.sample(logits, rows, [0] * 3)
    reason = RowReason.EMPTY_SUPPORT if bad == "-inf" else RowReason.NON_FINITE
    assert output.reasons.tolist() == [0, reason, 0]
    assert output.token_ids[1] == -1
    assert output.fault_ranks[[0, 2]].tolist() == [-1, -1]
    assert (int(output.fault_ranks[1]) >= 0) is (bad != "-inf")
    assert output.token_ids[[0, 2]].tolist() == clean.token_ids[[0, 2]].tolist()
    assert output.logprobs is not None
    assert clean.logprobs is not None
    assert torch.equal(output.logprobs.top_logprobs[[0, 2]], clean.logprobs.top_logprobs[[0, 2]])
    assert torch.equal(output.supports[2].logprobs, clean.supports[2].logprobs)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"191222": -100}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1.5": 1}}, "logit_bias"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"1": math.inf}}, "logit_bias"),
        ({"logit_bias": {"1": math.nan}}, "logit_bias"),
        ({"stop_token_ids": [151645]}, "stop_token_ids"),
        ({"allowed_token_ids": [_VOCAB]}, "allowed_token_ids"),
        ({"banned_token_ids": [-1]}, "banned_token_ids"),
        ({"bad_words": [[_VOCAB]]}, "bad_words"),
        ({"logprob_token_ids": [_VOCAB]}, "logprob_token_ids"),
    ],
)
def test_t15_ids_out_of_range_are_refused_at_the_door(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(SamplingParamsError) as error:
        _parse(**fields)
    assert error.value.param == param


@pytest.mark.parametrize("size", _SIZES)
def test_t16_a_seed_means_the_same_beside_whomever(size: int) -> None:
    logits = torch.zeros(1, _VOCAB)
    alone = [_tokens(size, logits, [_row(42)], position)[0] for position in range(12)]
    for mates in (
        [_row(43)],
        [_row(9, top_k=3)],
        [_row(5, temperature=0.0)],
        [_row(8, logprobs=2), _row(7, top_p=0.5)],
    ):
        for position in range(12):
            beside = _tokens(size, logits.expand(1 + len(mates), _VOCAB).contiguous(), [*mates, _row(42)], position)
            assert beside[-1] == alone[position]
    choices = [
        [_tokens(size, logits, [_row(42, choice=choice)], position)[0] for position in range(12)] for choice in range(4)
    ]
    assert choices[0] == alone
    assert len({tuple(choice) for choice in choices}) == 4


@pytest.mark.parametrize("seed", [2**64, -1, 1.5, True, "7"])
def test_t16_a_bad_seed_is_refused(seed: object) -> None:
    with pytest.raises(SamplingParamsError, match="seed must be an integer from 0 to 18446744073709551615"):
        _parse(seed=seed)


@pytest.mark.parametrize("size", _SIZES)
@pytest.mark.parametrize("batch_size", [1, 9])
@pytest.mark.parametrize("candidates", [128, 1])
def test_t17_ties_follow_one_rule_on_every_path(size: int, batch_size: int, candidates: int) -> None:
    minus = float("-inf")
    cases: list[tuple[list[float], dict[str, Any], list[int]]] = [
        ([math.log(0.4), math.log(0.3), math.log(0.3), minus], {"top_k": 2}, [0, 1, 2]),
        ([3.0, 2.0, 2.0, 2.0, 1.0], {"top_k": 2}, [0, 1, 2, 3]),
        ([1.0] * 6, {"top_k": 3}, list(range(6))),
        ([1.0] * 6, {"top_p": 0.1}, list(range(6))),
        ([1.0] * 6, {"min_p": 1.0}, list(range(6))),
        ([1.0] * 6, {"temperature": 0.0}, [0]),
        ([1.0, 5.0, 5.0], {"temperature": 0.01, "top_k": 1, "top_p": 0.8}, [1]),
        ([1.0, 5.0, 4.0], {"top_p": 1e-9}, [1]),
    ]
    for values, fields, expected in cases:
        logits = torch.tensor(values).expand(batch_size, len(values)).contiguous()
        rows = [_row(seed, return_support=True, **fields) for seed in range(batch_size)]
        output = SlicedSampler(size, len(values), candidates=candidates).sample(logits, rows, [0] * batch_size)
        assert [support.ids.tolist() for support in output.supports] == [expected] * batch_size
        assert all(token in expected for token in output.token_ids.tolist())


@pytest.mark.parametrize("size", _SIZES)
def test_t18_logprobs_are_raw_or_processed_by_name_and_finite(size: int) -> None:
    logits = _logits(4)
    rows = [
        _row(1, logprobs=5),
        _row(1, logprobs=5, logprobs_mode="processed"),
        _row(2, logprobs=0, top_p=0.3),
        _row(3, logprob_token_ids=[7]),
    ]
    allowed = [[5, 300], [5, 300], None, None]
    output = SlicedSampler(size, _VOCAB).sample(logits, rows, [0] * 4, mask_of(allowed, _VOCAB))
    assert output.logprobs is not None
    found = output.logprobs
    raw = logits.double().log_softmax(dim=1)
    assert found.top_ids[0].tolist() == raw[0].topk(5).indices.tolist()
    assert sorted(found.top_ids[1, :2].tolist()) == [5, 300]
    assert float(found.top_logprobs[1, :2].exp().sum()) == pytest.approx(1.0)
    # Only two ids can be drawn: the other three are there, at the floor.
    sent = [finite_logprob(value) for value in found.top_logprobs[1].tolist()]
    assert sent[2:] == [LOGPROB_FLOOR] * 3
    assert all(math.isfinite(value) for value in sent)
    # Raw means raw: top_p moves nothing, and the number asked for is zero.
    assert float(found.logprobs[2]) == pytest.approx(float(raw[2, output.token_ids[2]]), abs=1e-5)
    assert float(found.named_logprobs[3, 0]) == pytest.approx(float(raw[3, 7]), abs=1e-5)


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_t18_more_than_twenty_are_refused(field: str) -> None:
    with pytest.raises(SamplingParamsError, match=f"{field} must be an integer from 0 to 20, not 21"):
        _parse(**{field: 21})


def test_extremes_are_clamped_or_refused_by_rule() -> None:
    assert _parse(temperature=1e-40).is_greedy
    assert _parse(top_k=10**9).top_k == -1
    assert _parse(top_k=0).top_k == 0
    for fields in (
        {"temperature": math.nan},
        {"temperature": -0.1},
        {"top_p": 0},
        {"top_p": 1.0001},
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"max_tokens": 2049},
    ):
        with pytest.raises(SamplingParamsError):
            _parse(**fields)
    logits = _logits(3)
    rows = [_row(1, temperature=0.0), _row(2, temperature=1e9), _row(3, temperature=1e-6)]
    tokens = _tokens(2, logits, rows)
    assert tokens[0] == int(logits[0].argmax())
    assert tokens[2] == int(logits[2].argmax())


def test_s1_penalties_have_one_order_in_every_process() -> None:
    code = (
        "import torch; from simulated_ranks import SlicedSampler; from sampler.params import *\n"
        "p = SamplingParams(frequency_penalty=0.7, presence_penalty=0.3, repetition_penalty=1.7, logit_bias={5: 1.1},"
        " logprobs=20, logprobs_mode='processed', min_tokens=9)\n"
        "row = RowSampling(params=p, seed=1, stop_ids=(2, 3), prompt_ids=[5, 6, 7], output_ids=[5, 5, 8, 9, 1])\n"
        "x = torch.linspace(-5, 5, 64).view(1, 64)\n"
        "o = SlicedSampler(2, 64).sample(x, [row], [5])\n"
        "print(o.logprobs.top_ids.tolist(), o.logprobs.top_logprobs.tolist())"
    )
    root = Path(__file__).resolve().parents[2]
    printed = set()
    for seed in ("0", "1", "7"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}"}
        command = [sys.executable, "-c", code]
        printed.add(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
    assert len(printed) == 1


@pytest.mark.parametrize("size", _SIZES)
def test_s1_the_one_order_is_the_documented_one(size: int) -> None:
    row = _row(
        frequency_penalty=0.7,
        presence_penalty=0.3,
        repetition_penalty=1.7,
        logit_bias={"5": 1.1, "319": -2},
        banned_token_ids=[9],
        min_tokens=9,
        temperature=0.6,
        stop_ids=(2, 3),
        prompt_ids=[5, 6, 319],
        output_ids=[5, 5, 8, 319, 1],
        logprobs=20,
        logprobs_mode="processed",
    )
    logits = _logits(1)
    output = SlicedSampler(size, _VOCAB).sample(logits, [row], [5], mask_of([list(range(1, _VOCAB))], _VOCAB))
    assert output.logprobs is not None
    expected = processed_logits(logits[0], row, 5, list(range(1, _VOCAB))).log_softmax(dim=0).topk(20)
    assert output.logprobs.top_ids[0].tolist() == expected.indices.tolist()
    torch.testing.assert_close(output.logprobs.top_logprobs[0], expected.values, rtol=0, atol=1e-5)


def test_s2_s9_s14_token_and_logprob_do_not_change_with_batch_mates() -> None:
    logits = _logits(40)
    source = random.Random(3)
    rows = [
        _row(
            seed,
            temperature=source.choice([0.0, 0.5, 1.0]),
            top_k=source.choice([1, -1, 5]),
            logprobs=2,
            logprobs_mode=source.choice(["raw", "processed"]),
        )
        for seed in range(40)
    ]
    together = SlicedSampler(2, _VOCAB).sample(logits, rows, [7] * 40)
    assert together.logprobs is not None
    assert torch.equal(together.logprobs.token_ids, together.token_ids)
    for place in range(40):
        alone = SlicedSampler(1, _VOCAB).sample(logits[place : place + 1], rows[place : place + 1], [7])
        assert alone.logprobs is not None
        assert alone.token_ids[0] == together.token_ids[place]
        assert float(alone.logprobs.logprobs[0]) == float(together.logprobs.logprobs[place])


@pytest.mark.parametrize("size", _SIZES)
def test_s3_min_p_works_with_seeds(size: int) -> None:
    logits = _logits(1).expand(50, _VOCAB).contiguous()
    rows = [_row(seed, min_p=0.2) for seed in range(50)]
    probabilities = logits[0].double().softmax(dim=0)
    inside = set((probabilities >= 0.2 * probabilities.max()).nonzero().squeeze(1).tolist())
    assert set(_tokens(size, logits, rows)) <= inside


@pytest.mark.parametrize("size", _SIZES)
def test_s4_nan_or_banned_rows_raise_for_nobody_else(size: int) -> None:
    logits = _logits(4)
    rows = [_row(1), _row(2, allowed_token_ids=[3], banned_token_ids=[3]), _row(3), _row(4, top_p=0.5)]
    expected = _tokens(size, logits[[0, 3]], [rows[0], rows[3]])
    logits[2] = float("nan")
    output = SlicedSampler(size, _VOCAB).sample(logits, rows, [0] * 4)
    assert output.status.tolist() == [RowStatus.OK, RowStatus.INVALID, RowStatus.INVALID, RowStatus.OK]
    assert output.token_ids[[0, 3]].tolist() == expected


@pytest.mark.parametrize("size", _SIZES)
def test_s5_no_bias_lifts_a_masked_id(size: int) -> None:
    with pytest.raises(SamplingParamsError):
        _parse(logit_bias={"7": math.inf})
    rows = [
        _row(seed, logit_bias={"7": 100}, temperature=temperature) for seed in range(20) for temperature in (0.0, 1.0)
    ]
    mask = mask_of([[1, 2, 3]] * 40, _VOCAB)
    output = SlicedSampler(size, _VOCAB).sample(torch.zeros(40, _VOCAB), rows, [0] * 40, mask)
    assert set(output.token_ids.tolist()) <= {1, 2, 3}


@pytest.mark.parametrize("candidates", [128, 2])
def test_s8_no_tail_token_is_lost_at_top_p_1(candidates: int) -> None:
    vocab_size = 151_936
    logits = torch.linspace(0, -12, vocab_size).view(1, -1)
    rows = [_row(1), _row(2, top_p=0.9), _row(3, min_p=1e-30)]
    supports = SlicedSampler(2, vocab_size, candidates=candidates).support(
        logits.expand(3, vocab_size).contiguous(), rows, [0] * 3
    )
    assert len(supports[0].ids) == vocab_size
    assert len(supports[2].ids) == vocab_size
    assert len(supports[1].ids) < vocab_size


def test_s13_flags_fall_when_the_last_such_row_leaves() -> None:
    asking = _row(
        frequency_penalty=1,
        logit_bias={"3": 1},
        min_tokens=3,
        top_p=0.5,
        logprobs=3,
        logprob_token_ids=[3],
        return_support=True,
        allowed_token_ids=[1, 2],
        banned_token_ids=[3],
        stop_ids=(2,),
    )
    batch = SamplingBatchInfo.from_rows([_row(), asking])
    assert batch.flags.has_penalties
    assert batch.flags.support_rows == batch.flags.logprob_rows == batch.flags.restricted_rows == (1,)
    batch.filter([0])
    assert batch.flags == SamplingBatchInfo.from_rows([_row()]).flags
    assert (batch.penalties, batch.bias, batch.banned, batch.bans, batch.allowed, batch.named) == (None,) * 6


def test_s15_ignore_eos_leaves_the_users_stop_ids() -> None:
    params = _parse(ignore_eos=True, stop_token_ids=[7])
    assert params.ignore_eos
    assert params.stop_token_ids == (7,)


def test_s16_penalties_see_the_newest_token_at_once() -> None:
    batch = SamplingBatchInfo.from_rows([_row(presence_penalty=2.0)])
    for token in (3, 200, 3):
        batch.append_tokens(torch.tensor([token]))
        assert batch.penalties is not None
        logits = torch.zeros(1, _VOCAB)
        batch.penalties.apply_(logits, 0)
        assert logits[0, token] == -2.0


@pytest.mark.parametrize("size", _SIZES)
def test_s17_a_restarted_request_is_as_if_it_had_never_stopped(size: int) -> None:
    fields = {
        "frequency_penalty": 0.5,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.2,
        "min_tokens": 6,
        "temperature": 0.8,
        "logprobs": 2,
        "logprobs_mode": "processed",
    }
    row = msgspec.structs.replace(
        _row(11, **fields), prompt_ids=[1, 2, 3], stop_ids=(5,), bad_words_token_ids=((8, 9), (4,))
    )
    batch = SamplingBatchInfo.from_rows([row])
    output: list[int] = []
    sampler = SlicedSampler(size, _VOCAB)
    for position in range(8):
        logits = _logits(1, seed=position)
        restarted = msgspec.structs.replace(row, output_ids=tuple(output))
        once = sampler.sample(logits, [restarted], [position])
        went_on = msgspec.structs.replace(row, output_ids=tuple(batch.output_ids[0]) if batch.output_ids else ())
        assert_same_output(once, sampler.sample(logits, [went_on], [position]))
        rebuilt = SamplingBatchInfo.from_rows([restarted])
        assert batch.penalties is not None
        assert rebuilt.penalties is not None
        by_state, by_replay = torch.zeros(1, _VOCAB), torch.zeros(1, _VOCAB)
        batch.penalties.apply_(by_state, 0)
        rebuilt.penalties.apply_(by_replay, 0)
        assert torch.equal(by_state, by_replay)
        output.append(int(once.token_ids[0]))
        batch.append_tokens(once.token_ids)
    assert not {4, 5} & set(output[:6])
