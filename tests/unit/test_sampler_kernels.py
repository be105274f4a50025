"""The kernels under the sampler: their bits depend on the row and the block alone, and they hold at the edges."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_ranks import SimulatedRank, run_simulated

from sampler.adjust import apply_mask_, mask_table
from sampler.greedy import masked_largest
from sampler.search import Goals, Head, find_thresholds, hold
from sampler.slices import (
    BlockParts,
    block_masses,
    first_largest,
    folded_sum,
    group_maxima,
    lane_maxima,
    largest_in_blocks,
    largest_values,
)
from sampler.support import pick, strictly_greater

_NONE = float("-inf")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("length", [32, 96, 416, 2400])
@pytest.mark.parametrize("temperature", [0.01, 0.7, 3.0])
def test_block_masses_depend_on_nothing_but_the_block(length: int, temperature: float) -> None:
    blocks, rows = 64, 5
    logits = torch.randn(rows, blocks * length, generator=torch.Generator().manual_seed(length)) * 5
    logits[torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)) < 0.1] = _NONE
    logits[2, : 3 * length] = _NONE
    maxima = logits.view(rows, blocks, length).amax(dim=-1)
    inverse = torch.full((rows,), 1 / temperature)
    torch.set_num_threads(1)
    whole = block_masses(logits, maxima, inverse)
    assert bool((whole[2, :3] == 0).all())
    assert bool((whole[2, 3:] >= 1).all())
    expected = (
        logits.double().view(rows, blocks, length) - maxima.double().clamp_min(-1e30).unsqueeze(-1)
    ) / temperature
    assert torch.allclose(whole.double(), expected.exp().sum(dim=-1), rtol=2e-5)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert torch.equal(block_masses(logits, maxima, inverse), whole)
        for row in range(rows):
            for run in (range(1), range(11), range(3, 64), range(63, 64), range(8, 16)):
                part = logits[row : row + 1, run.start * length : run.stop * length].contiguous()
                got = block_masses(part, maxima[row : row + 1, run.start : run.stop].contiguous(), inverse[:1])
                assert torch.equal(got[0], whole[row, run.start : run.stop])
        floors = torch.tensor([-3.0, 0.0, 1.0, 2.0, 30.0])
        floored = block_masses(logits, maxima, inverse, floor=floors)
        for row in range(rows):
            one = block_masses(logits[row : row + 1], maxima[row : row + 1], inverse[:1], floor=floors[row : row + 1])
            assert torch.equal(one[0], floored[row])


def test_exp_is_elementwise_at_every_alignment_and_length() -> None:
    values = -torch.rand(100_003, generator=torch.Generator().manual_seed(3)) * 90
    for threads in (1, 2):
        torch.set_num_threads(threads)
        whole = values.exp()
        for start in (0, 1, 3, 17):
            for length in (1, 2, 7, 31, 33, 1000, 40_001, 99_900):
                assert torch.equal(values[start : start + length].exp(), whole[start : start + length])
                assert torch.equal(values[start : start + length].clone().exp(), whole[start : start + length])


@pytest.mark.parametrize("length", [1, 2, 3, 7, 32, 75, 2400])
def test_the_folded_sum_is_a_sum_of_each_row_alone(length: int) -> None:
    weights = torch.rand(3, 5, length, generator=torch.Generator().manual_seed(length))
    sums = folded_sum(weights)
    assert torch.allclose(sums.double(), weights.double().sum(dim=-1), rtol=1e-6)
    assert torch.equal(folded_sum(weights[1:2, 3:4])[0, 0], sums[1, 3])


def test_first_largest_takes_the_smallest_column() -> None:
    logits = torch.zeros(4, 4 * 64)
    logits[1, [70, 71, 200]] = 2.0
    logits[2, -1] = 1.0
    logits[3] = _NONE
    maxima = logits.view(4, 4, 64).amax(dim=-1)
    assert first_largest(logits, maxima).tolist() == [0, 70, 255, 0]


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 2**31), st.sampled_from([1, 3, 8, 64]), st.sampled_from([32, 96]), st.sampled_from([0.0, 0.02, 0.5])
)
def test_the_largest_allowed_value_is_that_of_masked_logits(
    seed: int, blocks: int, length: int, allowed: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, blocks * length, generator=generator) * 2
    # Coarse values tie across blocks.
    logits[::2] = logits[::2].round()
    logits[torch.rand(logits.shape, generator=generator) < 0.1] = _NONE
    bits = torch.rand(logits.shape, generator=generator) < allowed
    # Rows of every kind: one open throughout, one whose allowed ids all lie in one block.
    bits[0], bits[1, length:] = True, False
    words = (bits.view(5, -1, 32).to(torch.int64) << torch.arange(32)).sum(dim=-1)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    table = mask_table(logits.device)
    maxima = largest_in_blocks(logits, blocks)
    assert torch.equal(maxima, logits.view(5, blocks, length).amax(dim=-1))
    found, columns = masked_largest(logits.clone(), maxima, words, table)
    apply_mask_(logits, words, table)
    assert torch.equal(logits, torch.where(bits, logits, _NONE))
    assert torch.equal(found, logits.amax(dim=1))
    assert torch.equal(columns, first_largest(logits, largest_in_blocks(logits, blocks)))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 40), st.sampled_from([32, 320, 3200]), st.booleans())
def test_largest_values_are_complete_above_the_cut(seed: int, count: int, width: int, coarse: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, width, generator=generator) * 2
    if coarse:
        logits = logits.round()
    logits[torch.rand(3, width, generator=generator) < 0.3] = _NONE
    rows = torch.tensor([2, 0])
    values, columns = largest_values(logits, group_maxima(logits)[rows], rows, count)
    assert values.shape == columns.shape == (2, count)
    for place, row in enumerate(rows.tolist()):
        expected = logits[row].sort(descending=True).values
        expected = torch.nn.functional.pad(expected[:count], (0, max(0, count - width)), value=_NONE)
        assert torch.equal(values[place].sort(descending=True).values, expected)
        real = values[place] > _NONE
        assert torch.equal(logits[row, columns[place][real]], values[place][real])
        assert len(set(columns[place][real].tolist())) == int(real.sum())


@pytest.mark.parametrize("lanes", [True, False])
def test_parts_cover_their_block_and_have_its_largest_values(lanes: bool) -> None:
    rows, blocks, length = 3, 5, 96
    logits = torch.randn(rows, blocks * length, generator=torch.Generator().manual_seed(8))
    maxima = lane_maxima(logits, blocks) if lanes else group_maxima(logits).view(rows, blocks, -1)
    parts = BlockParts(maxima, lanes)
    count = maxima.shape[2]
    assert count == (32 if lanes else 3)
    block = torch.tensor([[4, 0], [2, 3], [1, 1]])
    of_parts = parts.in_blocks(block)
    columns = parts.columns(
        block.repeat_interleave(count, dim=1), torch.arange(count).repeat(rows, 2), block_length=length
    )
    members = logits.gather(1, columns).view(rows, 2 * count, length // count)
    assert torch.equal(members.amax(dim=-1), of_parts)
    whole = (block.unsqueeze(-1) * length + torch.arange(length)).view(rows, -1)
    assert torch.equal(columns.view(rows, 2, length).sort(dim=-1).values.view(rows, -1), whole)


def test_pick_never_takes_an_index_of_no_weight() -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0, 3.0, 0.0]], dtype=torch.float64).expand(6, 5).contiguous()
    uniform = torch.tensor([0.0, 0.2499, 0.25, 0.5, 0.999, 1 - 2.0**-53], dtype=torch.float64)
    index, fraction = pick(weights, uniform)
    assert index.tolist() == [1, 1, 3, 3, 3, 3]
    assert bool(((fraction >= 0) & (fraction < 1)).all())
    assert fraction[3].item() == pytest.approx(1 / 3)


def test_strictly_greater_counts_ties_once() -> None:
    values = torch.tensor([[3.0, 2.0, 2.0, 2.0, 1.0, _NONE]])
    weights = torch.tensor([[8.0, 4.0, 4.0, 4.0, 1.0, 0.0]], dtype=torch.float64)
    count, mass = strictly_greater(values, weights)
    assert count.tolist() == [[0, 1, 1, 1, 4, 5]]
    assert mass.tolist() == [[0.0, 8.0, 8.0, 8.0, 20.0, 21.0]]


def _goals(logits: torch.Tensor, top_k: list[float]) -> Goals:
    maximum = float(logits.max())
    mass = float((logits.double() - maximum).exp().sum())
    rows = len(top_k)
    return Goals(
        maxima=torch.full((rows,), maximum),
        temperature=torch.ones(rows, dtype=torch.float64),
        total=torch.full((rows,), mass, dtype=torch.float64),
        top_k=torch.tensor(top_k, dtype=torch.float64),
        limit=torch.full((rows,), float("inf"), dtype=torch.float64),
        floor=torch.full((rows,), _NONE),
    )


def _crowded(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    match kind:
        case "equal":
            return torch.full((64 * 512,), -2.5)
        case "two values":
            return torch.where(torch.arange(64 * 512) % 3 == 0, 1.0, 1.0 - 2**-23)
        case "many scales":
            exponent = torch.linspace(-120, 3, 64 * 512)
            return torch.where(torch.rand(64 * 512, generator=generator) < 0.5, 1.0, -1.0) * torch.exp2(exponent)
        case "denormal":
            return torch.arange(64 * 512) * 1e-45
        case "huge":
            return torch.linspace(-3e38, 3e38, 64 * 512, dtype=torch.float64).to(torch.float32)
        case _:
            return torch.randn(64 * 512, generator=generator)


@pytest.mark.parametrize("kind", ["equal", "two values", "many scales", "denormal", "huge", "normal"])
def test_the_search_ends_and_is_exact_however_values_crowd(kind: str) -> None:
    logits = _crowded(kind)
    ordered = logits.sort(descending=True).values.numpy()
    top_k = [1.0, 300.0, 5_000.0, 20_000.0, 1e9]
    goals = _goals(logits, top_k)
    rows = torch.arange(len(top_k))
    heads = (
        Head(1, goals.maxima, torch.ones(len(top_k), dtype=torch.float64)),
        # A guess from a head this small is too high for some rows, which must be told.
        Head(1, torch.full_like(goals.maxima, float(ordered[40])), torch.ones(len(top_k), dtype=torch.float64)),
        None,
    )

    def run(group: SimulatedRank, head: Head | None) -> tuple[list[float], list[bool], int]:
        own = slice(group.rank * len(logits) // group.size, (group.rank + 1) * len(logits) // group.size)
        slices = logits[own].expand(len(top_k), -1).contiguous()
        held, lacking = hold(group, slices, group_maxima(slices), rows, goals, head=head, extra_bins=0)
        found = find_thresholds(group, held, goals)
        return found.threshold.tolist(), lacking.tolist(), len(group.payload_bytes)

    for size, head in itertools.product((1, 4), heads):
        for thresholds, lacking, collectives in run_simulated(size, partial(run, head=head)):
            assert head is not None or not any(lacking)
            for limit, threshold, useless in zip(top_k, thresholds, lacking, strict=True):
                expected = ordered[min(int(limit), len(ordered)) - 1]
                assert useless or np.float32(threshold) == expected
            assert collectives <= 2 * 11 + 5
