"""Draws against the definition in float64: random logits and parameters, every filter, with and without a seed.

A chi-square test each. What is expected is computed from whole logits, without a line of the sampler.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from simulated_ranks import SlicedSampler, padded_logits

from sampler.batch import SamplingBatchInfo
from sampler.params import RowSampling, SamplingParams
from sampler.philox import uniform_53
from sampler.sampler import Sampler
from tp.group import TensorParallelGroup
from tp.partition import VocabularyBlocks

Probabilities = np.ndarray[Any, np.dtype[np.float64]]
Counts = np.ndarray[Any, np.dtype[np.int64]]

_VOCAB, _LARGE_VOCAB = 1000, 151_936
_DRAWS = 100_000
# Wider supports go to the exact rounds, which have their own test.
_MOST_CANDIDATES = 100
# The least p-value of 84 tests is below this once in 600 choices of seeds; these were not chosen.
_LEAST = 2e-5


def _by_definition(logits: torch.Tensor, params: SamplingParams) -> Probabilities:
    """Returns the probability of each id: [V] float64."""
    z = logits.double().numpy()
    p: Probabilities = np.exp((z - z.max()) / params.temperature)
    p /= p.sum()
    order = np.sort(z)
    greater_count = len(z) - np.searchsorted(order, z, side="right")
    in_k = greater_count < (params.top_k if params.top_k > 0 else len(z))
    by_value = np.argsort(z)
    above = np.append(np.cumsum(p[by_value][::-1])[::-1], 0.0)
    greater_mass = above[np.searchsorted(order, z, side="right")]
    base = p[in_k].sum() if params.filter_order == "top_k_first" else 1.0
    in_p = (greater_mass < params.top_p * base) | (params.top_p == 1)
    kept: Probabilities = np.where(in_k & in_p & (p >= params.min_p * p.max()), p, 0.0)
    kept /= kept.sum()
    return kept


def _repeated(value: Any, count: int, batch: SamplingBatchInfo) -> Any:
    """Returns a structure of one row with that row ``count`` times; ``batch`` stands for its parameters."""
    if isinstance(value, SamplingBatchInfo):
        return batch
    if isinstance(value, torch.Tensor):
        return value.expand(count, *value.shape[1:]) if len(value) else value
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields = {one.name: _repeated(getattr(value, one.name), count, batch) for one in dataclasses.fields(value)}
    # These are the numbers of the rows.
    rows = {name: torch.arange(count) for name in ("rows", "wide") if name in fields and len(fields[name])}
    return dataclasses.replace(value, **(fields | rows))


def _count(
    logits: torch.Tensor, params: SamplingParams, *, draws: int, batch: int, seeded: bool, candidates: int
) -> Counts:
    """Returns how often each id was drawn: at the positions of one seed, or with a seed of its own for each draw.

    The row is read and its support found once, alone; then it is drawn in batches, as the rows of any batch are.
    """
    vocab_size = logits.shape[0]
    own = VocabularyBlocks(vocab_size).slice_of(0, 1)
    sampler = Sampler(
        TensorParallelGroup(0, 1),
        vocab_size=vocab_size,
        slice_start=0,
        block_length=own.block_length,
        candidates=candidates,
    )
    row = RowSampling(params=params, seed=2**63 + 11)
    one = SamplingBatchInfo.from_rows([row])
    step = sampler._begin(padded_logits(logits.unsqueeze(0), vocab_size), one, [0], None).step
    assert bool(step.sampled)
    info = SamplingBatchInfo.from_rows([row] * batch)
    found = _repeated(sampler._find_supports(step), batch, info)
    step = _repeated(step, batch, info)
    generator = torch.Generator().manual_seed(draws)
    counts = np.zeros(vocab_size, dtype=np.int64)
    for first in range(0, draws, batch):
        if not seeded:
            info.seeds.random_(-(2**63), None, generator=generator)
        positions = torch.arange(first, first + batch) * seeded
        token_ids = torch.full((batch,), -1)
        sampler._draw.once_(token_ids, step, found, uniform_53(info.seeds, info.choices, positions))
        counts += torch.bincount(token_ids, minlength=vocab_size).numpy()
    assert counts.sum() == draws
    return counts


def _p_value(counts: Counts, probabilities: Probabilities) -> float:
    """Returns the chi-square p-value, ids of small expectation taken together; 1 when one id is certain."""
    assert not counts[probabilities == 0].any()
    expected = probabilities * counts.sum()
    common = expected >= 10
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    observed, wanted = observed[wanted > 5], wanted[wanted > 5]
    if len(wanted) == 1:
        return 1.0
    return float(stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue)


def _params(source: random.Random, kind: str) -> SamplingParams:
    """Returns random parameters of a kind of filter."""
    fields: dict[str, Any] = {"temperature": source.choice([0.5, 0.8, 1.0, 1.7])}
    if "k" in kind:
        fields["top_k"] = source.choice([5, 30, 90])
    if "p" in kind:
        fields["top_p"] = source.choice([0.5, 0.9, 0.98])
    if "m" in kind:
        fields["min_p"] = source.choice([0.005, 0.1])
    if kind.startswith("first"):
        fields["filter_order"] = "top_k_first"
    return SamplingParams(**fields)


_KINDS = ("", "k", "p", "m", "kp", "first kp", "km", "pm", "kpm", "first kpm")


def _logits(seed: int, vocab_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(vocab_size, generator=generator) * [1.0, 2.0, 4.0][seed % 3]
    # Every third has ties.
    return (logits * 2).round() / 2 if seed % 3 == 1 else logits


def _few(count: int, *, default: tuple[int, ...]) -> list[Any]:
    """Returns the numbers of cases, all but the default ones for the sweep."""
    return [index if index in default else pytest.param(index, marks=pytest.mark.sweep) for index in range(count)]


@pytest.mark.parametrize("seeded", [True, False])
@pytest.mark.parametrize("index", _few(30, default=(5, 9)))
def test_draws_follow_the_definition(index: int, seeded: bool) -> None:
    params = _params(random.Random(index), _KINDS[index % 10])
    logits = _logits(index, _VOCAB)
    while _KINDS[index % 10] and np.count_nonzero(_by_definition(logits, params)) > _MOST_CANDIDATES:
        # Steeper, and without the ties that keep a support wide.
        logits = 1.5 * logits + 0.01 * torch.randn(_VOCAB, generator=torch.Generator().manual_seed(index))
    counts = _count(logits, params, draws=_DRAWS, batch=10_000, seeded=seeded, candidates=128)
    assert _p_value(counts, _by_definition(logits, params)) > _LEAST, params


@pytest.mark.parametrize("seeded", [True, False])
@pytest.mark.parametrize("index", _few(9, default=(4,)))
def test_draws_after_the_exact_rounds_follow_the_definition(index: int, seeded: bool) -> None:
    params = _params(random.Random(70 + index), _KINDS[1 + index])
    logits = _logits(3 * index, _VOCAB)
    counts = _count(logits, params, draws=_DRAWS, batch=10_000, seeded=seeded, candidates=1)
    probabilities = _by_definition(logits, params)
    assert np.count_nonzero(probabilities) > 1
    assert _p_value(counts, probabilities) > _LEAST, params


_LARGE: list[dict[str, Any]] = [{}, {"top_k": 50, "top_p": 0.9}, {"top_p": 0.6, "temperature": 0.7}]


@pytest.mark.parametrize("seeded", [True, False])
@pytest.mark.parametrize("index", _few(3, default=(1,)))
def test_draws_from_a_large_vocabulary_follow_the_definition(index: int, seeded: bool) -> None:
    params = SamplingParams(**_LARGE[index])
    logits = _logits(2 + 3 * index, _LARGE_VOCAB)
    counts = _count(logits, params, draws=_DRAWS, batch=2_000, seeded=seeded, candidates=128)
    assert _p_value(counts, _by_definition(logits, params)) > _LEAST, params


def test_the_rows_of_a_batch_are_drawn_as_one_row_is() -> None:
    """What is drawn above from one row's support is what a batch draws from its rows'."""
    for candidates in (128, 1):
        params = SamplingParams(top_p=0.9, min_p=0.01)
        counts = _count(_logits(2, _VOCAB), params, draws=500, batch=250, seeded=True, candidates=candidates)
        sampler = SlicedSampler(1, _VOCAB, candidates=candidates)
        row = RowSampling(params=params, seed=2**63 + 11)
        drawn = sampler.sample(_logits(2, _VOCAB).expand(500, -1), [row] * 500, range(500)).token_ids
        assert torch.bincount(drawn, minlength=_VOCAB).tolist() == counts.tolist()
