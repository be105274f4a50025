"""The same (seed, choice, position, logits) draws the same id at any tp_size, batch, row, neighbour and history."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
import torch
from simulated_ranks import SimulatedRank, SlicedSampler, mask_of, padded_logits, run_simulated

from sampler.batch import SamplingBatchInfo
from sampler.params import RowSampling, SamplingParams
from sampler.sampler import Sampler
from tp.partition import VocabularyBlocks

_VOCAB = 1000
_ROWS = 64


def _params(source: random.Random, vocab_size: int) -> SamplingParams:
    fields: dict[str, Any] = {"temperature": source.choice([0.0, 0.2, 0.9, 1.0, 2.5])}
    if source.random() < 0.5:
        fields["top_k"] = source.choice([1, 2, 10, 40, 400])
    if source.random() < 0.5:
        fields["top_p"] = source.choice([0.1, 0.6, 0.95, 0.999])
    if source.random() < 0.3:
        fields["min_p"] = source.choice([0.001, 0.05, 0.5])
    if source.random() < 0.3:
        fields["filter_order"] = "top_k_first"
    if source.random() < 0.3:
        fields |= {"frequency_penalty": 0.5, "presence_penalty": -0.25, "repetition_penalty": 1.3}
    if source.random() < 0.3:
        fields["logit_bias"] = {source.randrange(vocab_size): source.uniform(-5, 5) for _ in range(3)}
    if source.random() < 0.2:
        fields["min_tokens"] = 50
    return SamplingParams(**fields)


def _batch(seed: int, vocab_size: int = _VOCAB) -> tuple[torch.Tensor, list[RowSampling], list[int], torch.Tensor]:
    source = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(_ROWS, vocab_size, generator=generator) * torch.tensor([0.5, 2.0, 6.0, 12.0]).repeat(
        16
    ).unsqueeze(1)
    logits[::5] = (logits[::5] * 2).round() / 2
    rows = [
        RowSampling(
            params=_params(source, vocab_size),
            seed=source.getrandbits(64),
            choice=source.randrange(4),
            stop_ids=(7, 9),
            prompt_ids=[source.randrange(vocab_size) for _ in range(20)],
            output_ids=[source.randrange(vocab_size) for _ in range(10)],
        )
        for _ in range(_ROWS)
    ]
    allowed = [
        source.sample(range(vocab_size), source.choice([1, 3, vocab_size // 2])) if source.random() < 0.3 else None
        for _ in rows
    ]
    return logits, rows, [source.randrange(100) for _ in rows], mask_of(allowed, vocab_size)


@pytest.mark.parametrize("candidates", [128, 2])
def test_many_draws_of_one_step_are_the_draws_of_many_steps(candidates: int) -> None:
    logits, rows, _, mask = _batch(5)
    # A ban that ends at a position stands as at the step's: not here.
    rows = [msgspec.structs.replace(row, params=msgspec.structs.replace(row.params, min_tokens=0)) for row in rows]
    logits[3], logits[4, 17] = float("-inf"), float("nan")
    at = [0, 1, 2, 7, 1_000, 2**33]
    expected = torch.stack(
        [
            SlicedSampler(1, _VOCAB, candidates=candidates).sample(logits, rows, [place] * _ROWS, mask).token_ids
            for place in at
        ],
        dim=1,
    )
    assert expected[3].tolist() == expected[4].tolist() == [-1] * len(at)
    for size in (1, 3, 8):
        sampler = SlicedSampler(size, _VOCAB, candidates=candidates)
        assert torch.equal(sampler.draw_many(logits, rows, [0] * _ROWS, at, mask), expected)


def test_many_draws_keep_the_bans_of_their_step() -> None:
    logits = torch.zeros(2, _VOCAB)
    row = RowSampling(params=SamplingParams(min_tokens=5), seed=4, stop_ids=tuple(range(1, _VOCAB)))
    drawn = SlicedSampler(2, _VOCAB).draw_many(logits, [row, row], [4, 5], range(100))
    assert drawn[0].tolist() == [0] * 100
    assert len(set(drawn[1].tolist())) > 50


@pytest.mark.parametrize("candidates", [128, 2])
@pytest.mark.parametrize("seed", range(4))
def test_tp_size_batch_and_row_order_change_nothing(seed: int, candidates: int) -> None:
    logits, rows, positions, mask = _batch(seed)
    expected = SlicedSampler(1, _VOCAB, candidates=candidates).sample(logits, rows, positions, mask).token_ids
    assert bool((expected >= 0).all())
    for size in (2, 3, 4, 8):
        sampler = SlicedSampler(size, _VOCAB, candidates=candidates)
        assert torch.equal(sampler.sample(logits, rows, positions, mask).token_ids, expected)
    source = random.Random(seed)
    for size, count in ((1, 1), (1, 1), (1, 7), (2, 33), (8, 9), (1, _ROWS)):
        for _ in range(6 if count == 1 else 1):
            chosen = source.sample(range(_ROWS), count)
            got = SlicedSampler(size, _VOCAB, candidates=candidates).sample(
                logits[chosen], [rows[index] for index in chosen], [positions[index] for index in chosen], mask[chosen]
            )
            assert torch.equal(got.token_ids, expected[chosen])


_POOLS = 160


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, 1, *(pytest.param(part, marks=pytest.mark.sweep) for part in range(2, 8))])
def test_ten_thousand_random_cases_in_batches_of_every_size(part: int) -> None:
    """Each row is drawn in a batch of 64 at tp 1 and again in another batch, order and tp_size: 10,240 rows in all."""
    sizes_seen = set()
    for pool in range(part * _POOLS // 8, (part + 1) * _POOLS // 8):
        source = random.Random(pool)
        vocab_size = source.choice([40, 150, 600, _VOCAB])
        logits, rows, positions, mask = _batch(1000 + pool, vocab_size)
        candidates = source.choice([128, 16, 2])
        expected = SlicedSampler(1, vocab_size, candidates=candidates).sample(logits, rows, positions, mask).token_ids
        order = source.sample(range(_ROWS), _ROWS)
        while order:
            # Small batches come often enough for all sizes to be tried.
            count = min(len(order), source.choice([1 + source.randrange(8), 1 + source.randrange(_ROWS)]))
            chosen, order = order[:count], order[count:]
            sizes_seen.add(count)
            size = source.choice([1, 1, 2, 3, 5])
            got = SlicedSampler(size, vocab_size, candidates=candidates).sample(
                logits[chosen], [rows[index] for index in chosen], [positions[index] for index in chosen], mask[chosen]
            )
            assert torch.equal(got.token_ids, expected[chosen]), (pool, chosen)
    assert len(sizes_seen) > 20
    assert min(sizes_seen) == 1


def test_thread_count_changes_nothing() -> None:
    vocab_size = 40_000
    logits = torch.randn(8, vocab_size, generator=torch.Generator().manual_seed(9)) * 3
    fields: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.05}] * 2
    rows = [RowSampling(params=SamplingParams(**field), seed=index) for index, field in enumerate(fields)]
    before = torch.get_num_threads()
    drawn = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            sampler = SlicedSampler(1, vocab_size)
            supports = sampler.support(logits, rows, [0] * 8)
            tokens = sampler.sample(logits, rows, [5] * 8).token_ids
            drawn.append((tokens.tolist(), [support.probabilities.tolist() for support in supports]))
    finally:
        torch.set_num_threads(before)
    assert drawn[0] == drawn[1] == drawn[2]


def test_seed_choice_and_position_each_count() -> None:
    logits = torch.zeros(1, _VOCAB).expand(200, _VOCAB)

    def draw(seeds: list[int], choices: list[int], positions: list[int]) -> list[int]:
        rows = [
            RowSampling(params=SamplingParams(), seed=seed, choice=choice)
            for seed, choice in zip(seeds, choices, strict=True)
        ]
        return SlicedSampler(1, _VOCAB).sample(logits.contiguous(), rows, positions).token_ids.tolist()

    same, counting = [42] * 200, list(range(200))
    zeros = [0] * 200
    assert len(set(draw(same, zeros, zeros))) == 1
    for drawn in (draw(counting, zeros, zeros), draw(same, counting, zeros), draw(same, zeros, counting)):
        assert len(set(drawn)) > 150
    assert draw([2**64 - 1] * 200, zeros, counting) != draw([2**63 - 1] * 200, zeros, counting)


def test_the_history_of_a_batch_changes_nothing() -> None:
    logits, rows, positions, _ = _batch(11)
    blocks = VocabularyBlocks(_VOCAB)
    whole = padded_logits(logits, _VOCAB)

    def run(group: SimulatedRank) -> None:
        own = blocks.slice_of(group.rank, group.size)
        sampler = Sampler(group, vocab_size=_VOCAB, slice_start=own.start, block_length=own.block_length)

        def sample(batch: SamplingBatchInfo, index: list[int]) -> list[int]:
            part = whole[index][:, own.start : own.stop].clone()
            return sampler.sample(part, batch, [positions[row] for row in index]).token_ids.tolist()

        expected = sample(SamplingBatchInfo.from_rows(rows), list(range(_ROWS)))
        batch = SamplingBatchInfo.from_rows(rows[:20])
        sample(batch, list(range(20)))
        batch.filter([3, 0, 19])
        batch.merge(SamplingBatchInfo.from_rows(rows[40:]))
        index = [3, 0, 19, *range(40, _ROWS)]
        assert sample(batch, index) == [expected[row] for row in index]

    run_simulated(2, run)


def test_no_collective_grows_with_the_vocabulary() -> None:
    fields: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"top_k": 50, "top_p": 0.9},
        {"top_p": 0.95},
        {"min_p": 0.05},
        {"top_k": 3000},
        {"min_tokens": 5},
    ]
    for field in fields:
        rows = [RowSampling(params=SamplingParams(**field), seed=1, stop_ids=(3,))] * 2
        largest = {}
        for vocab_size in (4_000, 64_000):
            logits = torch.randn(2, vocab_size, generator=torch.Generator().manual_seed(2)) * 2
            sampler = SlicedSampler(4, vocab_size)
            sampler.sample(logits, rows, [0, 0], mask_of([None, None], vocab_size))
            largest[vocab_size] = max(count for _, count in sampler.payload_bytes)
        assert largest[64_000] <= max(largest[4_000], 4096), field
        assert largest[64_000] < 64_000
