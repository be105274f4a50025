"""Draws against the case file's probabilities: a chi-square test over 20,000 draws for cases of every filter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sampling_cases import SamplingCase, batch_of, sampling_cases
from scipy import stats
from simulated_ranks import SlicedSampler, mask_of

from sampler.params import RowSampling, SamplingParams
from sampler.supports import RowStatus

pytestmark = pytest.mark.long(18)

_DRAWS = 20_000
_KINDS = ("plain", "top_k", "top_p", "min_p", "joint", "top_k_first")


def _kind(case: SamplingCase) -> str:
    params = case.row.params
    filters = [
        name
        for name, used in (("top_k", params.top_k > 0), ("top_p", params.top_p < 1), ("min_p", params.min_p > 0))
        if used
    ]
    if len(filters) == 1:
        return filters[0]
    return "plain" if not filters else params.filter_order


def _chosen(kind: str) -> list[SamplingCase]:
    """Returns the three cases of a kind that have the widest supports, of one vocabulary size each."""
    cases = [case for case in sampling_cases() if _kind(case) == kind and 2 < len(case.support) <= 60]
    cases.sort(key=lambda case: (-len(case.support), case.case_id))
    return cases[:3]


def _p_value(
    counts: np.ndarray[Any, np.dtype[np.int64]], probabilities: np.ndarray[Any, np.dtype[np.float64]]
) -> float:
    """Returns the chi-square p-value, ids of small expectation taken together."""
    expected = probabilities / probabilities.sum() * counts.sum()
    rare = expected < 10
    if rare.any():
        expected = np.append(expected[~rare], expected[rare].sum())
        counts = np.append(counts[~rare], counts[rare].sum())
    if expected[-1] == 0:
        expected, counts = expected[:-1], counts[:-1]
    return float(stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue)


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("place", [0, 1, pytest.param(2, marks=pytest.mark.sweep)])
def test_draws_follow_the_probabilities(kind: str, place: int) -> None:
    case = _chosen(kind)[place]
    counts = _count(case, SlicedSampler(1, case.vocab_size, nan_policy="sanitize"), draws=_DRAWS, batch=2_000)
    assert set(np.flatnonzero(counts).tolist()) <= set(case.support)
    assert _p_value(counts[case.support], np.array(case.probabilities)) > 1e-4, f"case {case.case_id}"


@pytest.mark.parametrize("kind", ["top_p", "joint", "top_k_first"])
def test_draws_after_the_exact_rounds_follow_the_probabilities(kind: str) -> None:
    case = _chosen(kind)[0]
    sampler = SlicedSampler(1, case.vocab_size, nan_policy="sanitize", candidates=1)
    counts = _count(case, sampler, draws=2_000, batch=250)
    assert set(np.flatnonzero(counts).tolist()) <= set(case.support)
    assert _p_value(counts[case.support], np.array(case.probabilities)) > 1e-4, f"case {case.case_id}"


def _count(
    case: SamplingCase, sampler: SlicedSampler, *, draws: int, batch: int
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Returns how often each id was drawn at ``draws`` positions."""
    logits, (row,), _, _ = batch_of([case])
    # The position keys the draw; min_tokens must stay as the case has it, reached or not.
    row = _with(row, min_tokens=2 * draws if row.params.min_tokens > case.position else 0)
    mask = mask_of([case.allowed], case.vocab_size).expand(batch, -1)
    counts = np.zeros(case.vocab_size, dtype=np.int64)
    for first in range(0, draws, batch):
        output = sampler.sample(logits.expand(batch, -1), [row] * batch, list(range(first, first + batch)), mask)
        assert not output.status.any()
        counts += torch.bincount(output.token_ids, minlength=case.vocab_size).numpy()
    assert counts.sum() == draws
    return counts


def _with(row: RowSampling, *, min_tokens: int) -> RowSampling:
    fields = {name: getattr(row.params, name) for name in row.params.__struct_fields__}
    return RowSampling(
        params=SamplingParams(**{**fields, "min_tokens": min_tokens}),
        seed=row.seed,
        stop_ids=row.stop_ids,
        prompt_ids=row.prompt_ids,
        output_ids=row.output_ids,
    )


def test_a_wide_draw_over_slices_follows_the_probabilities() -> None:
    vocab_size, batch = 1000, 2_500
    logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(3)) * 2
    row = RowSampling(params=SamplingParams(temperature=1.3), seed=2**63 + 5)
    sampler = SlicedSampler(3, vocab_size)
    (support,) = sampler.support(logits, [row], [0])
    assert support.status is RowStatus.OK
    counts = np.zeros(vocab_size, dtype=np.int64)
    for first in range(0, _DRAWS, batch):
        output = sampler.sample(logits.expand(batch, -1), [row] * batch, list(range(first, first + batch)))
        counts += torch.bincount(output.token_ids, minlength=vocab_size).numpy()
    ids = support.ids.numpy()
    assert counts[ids].sum() == _DRAWS
    assert _p_value(counts[ids], support.probabilities.numpy()) > 1e-4
