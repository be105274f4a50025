"""Supports against the definition in float64: ties, near cuts, and the exact rounds forced by few candidates."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_ranks import SlicedSampler

from sampler.params import RowSampling, SamplingParams
from sampler.supports import RowStatus


def _row(**fields: Any) -> RowSampling:
    return RowSampling(params=SamplingParams(**fields), seed=1)


def _supports(logits: list[list[float]] | torch.Tensor, rows: list[RowSampling], **options: Any) -> list[list[int]]:
    table = torch.as_tensor(logits, dtype=torch.float32)
    sampler = SlicedSampler(options.pop("size", 1), table.shape[1], **options)
    return [support.ids.tolist() for support in sampler.support(table, rows, [0] * len(rows))]


def _by_definition(logits: torch.Tensor, params: SamplingParams, margin: float) -> tuple[set[int], set[int]]:
    """Returns the ids that are surely in the support and those that may be, cuts moved by a relative margin."""
    z = logits.double().numpy()
    p = np.exp((z - z.max()) / params.temperature)
    p /= p.sum()
    k = params.top_k if params.top_k > 0 else len(z) + 1
    greater_count = (z[None, :] > z[:, None]).sum(axis=1)
    in_k = (greater_count < k) & np.isfinite(z)
    base = p[in_k].sum() if params.filter_order == "top_k_first" else 1.0
    greater_mass = ((z[None, :] > z[:, None]) * p[None, :]).sum(axis=1)
    sets = []
    for sign in (-1, 1):
        slack = 1 + sign * margin
        in_p = (greater_mass < params.top_p * base * slack) | (params.top_p == 1)
        in_m = (p >= params.min_p * p.max() / slack) | (z == z.max())
        sets.append(set(np.flatnonzero(in_k & in_p & in_m).tolist()))
    return sets[0], sets[1]


@pytest.mark.parametrize("candidates", [128, 2, 1])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_ties_stay_together(candidates: int, size: int) -> None:
    probabilities = [float(np.log(p)) if p else float("-inf") for p in (0.4, 0.3, 0.3, 0.0)]
    options: dict[str, Any] = {"candidates": candidates, "size": size}
    assert _supports([probabilities], [_row(top_k=2)], **options) == [[0, 1, 2]]
    assert _supports([probabilities], [_row(top_p=0.5)], **options) == [[0, 1, 2]]
    assert _supports([probabilities], [_row(top_p=0.39)], **options) == [[0]]
    assert _supports([probabilities], [_row()], **options) == [[0, 1, 2]]
    for row in (_row(top_k=2), _row(top_k=2, filter_order="top_k_first", top_p=0.9)):
        assert _supports([[3.0, 2.0, 2.0, 2.0, 1.0]] * 9, [row] * 9, **options) == [[0, 1, 2, 3]] * 9
    equal = [[1.5] * 70]
    for fields in ({"top_k": 3}, {"top_p": 1e-6}, {"min_p": 1.0}, {"top_k": 2, "top_p": 0.1, "min_p": 0.9}):
        assert _supports(equal, [_row(**fields)], **options) == [list(range(70))]
    assert _supports([[3.0, 2.0, 2.0]], [_row(temperature=0.01, top_k=1, top_p=0.8)], **options) == [[0]]
    assert _supports([[0.0, -0.0, 0.0, -1.0]], [_row(top_k=1)], **options) == [[0]]
    assert _supports([[0.0, -0.0, 0.0, -1.0]], [_row(top_k=2)], **options) == [[0, 1, 2]]


def test_filter_orders_differ_as_defined() -> None:
    logits = [[float(np.log(p)) for p in (0.4, 0.3, 0.2, 0.1)]]
    # Of all mass 0.7 lies above the third id; of the mass of the first three, 0.78.
    assert _supports(logits, [_row(top_k=3, top_p=0.75)]) == [[0, 1, 2]]
    assert _supports(logits, [_row(top_k=3, top_p=0.75, filter_order="top_k_first")]) == [[0, 1]]


@pytest.mark.parametrize("candidates", [128, 3])
def test_all_equal_over_a_large_vocabulary(candidates: int) -> None:
    vocab_size = 151_936
    logits = torch.full((3, vocab_size), 0.25)
    rows = [_row(top_k=5), _row(top_p=0.3), _row(top_k=700, top_p=0.2, filter_order="top_k_first")]
    for ids in _supports(logits, rows, candidates=candidates, size=2):
        assert ids == list(range(vocab_size))


def test_minus_infinity_is_never_in_a_support() -> None:
    logits = torch.full((3, 1000), float("-inf"))
    logits[:, 777] = -5.0
    rows = [_row(), _row(top_k=50), _row(top_p=0.9, min_p=0.1)]
    for candidates in (128, 1):
        assert _supports(logits, rows, candidates=candidates, size=3) == [[777]] * 3


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    spread=st.sampled_from([0.0, 0.3, 2.0, 20.0]),
    coarse=st.booleans(),
    size=st.sampled_from([1, 2, 5]),
    candidates=st.sampled_from([1, 5, 40, 128]),
)
def test_random_rows_follow_the_definition(seed: int, spread: float, coarse: bool, size: int, candidates: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)
    vocab_size = int(rng.integers(2, 1500))
    logits = torch.randn(6, vocab_size, generator=generator) * spread
    if coarse:
        logits = (logits * 4).round() / 4
    logits[:, 1:][torch.rand(6, vocab_size - 1, generator=generator) < 0.2] = float("-inf")
    order: tuple[Literal["joint", "top_k_first"], ...] = ("joint", "top_k_first")
    rows = [
        _row(
            temperature=float(rng.choice([0.1, 0.7, 1.0, 3.0])),
            top_k=int(rng.choice([-1, 2, 5, 50, 500])),
            top_p=float(rng.choice([0.05, 0.5, 0.9, 0.999, 1.0])),
            min_p=float(rng.choice([0.0, 0.01, 0.3])),
            filter_order=order[int(rng.integers(2))],
        )
        for _ in range(6)
    ]
    for row, z, ids in zip(rows, logits, _supports(logits, rows, candidates=candidates, size=size), strict=True):
        sure, possible = _by_definition(z, row.params, margin=1e-5)
        assert sure <= set(ids) <= possible, row.params


def test_a_wide_nucleus_at_a_large_vocabulary() -> None:
    vocab_size = 151_936
    logits = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(5)) * 3
    rows = [
        _row(top_p=0.9),
        _row(top_k=3000),
        _row(top_k=2000, top_p=0.8, filter_order="top_k_first"),
        _row(min_p=1e-4),
    ]
    sampler = SlicedSampler(3, vocab_size)
    for row, z, support in zip(rows, logits, sampler.support(logits, rows, [0] * 4), strict=True):
        assert support.status is RowStatus.OK
        assert bool((support.ids.diff() > 0).all())
        ordered = z.double().sort(descending=True).values
        weights = (ordered - ordered[0]).exp()
        share = weights.cumsum(0) / weights.sum()
        if row.params.top_k == 3000:
            assert len(support.ids) == 3000
        elif row.params.top_k == 2000:
            expected = 1 + int((weights[:2000].cumsum(0) < 0.8 * weights[:2000].sum()).sum())
            assert abs(len(support.ids) - expected) <= 1
        elif row.params.top_p == 0.9:
            assert len(support.ids) > 2000
            assert abs(len(support.ids) - 1 - int((share < 0.9).sum())) <= 2
        else:
            assert len(support.ids) == int((weights >= 1e-4).sum())
        assert bool((z[support.ids] >= float(ordered[len(support.ids) - 1])).all())
