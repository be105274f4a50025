"""Invariant mode: tokens, logits and logprobs are the same bits at any size, in any batch, chunk, cache and place."""

from __future__ import annotations

import math
import random
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_ranks import Case, Job, Output, run_engine
from invariant_cases import (
    Variant,
    all_jobs,
    differences,
    expected_steps,
    logits_of_rank,
    random_variant,
    random_walk,
    run_variants,
    tokens,
    walk_logits,
)
from invariant_ways import random_way, run_ways, small_jobs
from model_pipeline import ModelPipeline
from ranks import run_ranks
from tiny_checkpoints import write_tiny_checkpoint

from sampler.params import SamplingParams
from tp.reduction_tree import ReductionTree

pytestmark = pytest.mark.long(60)

Expected = dict[tuple[str, str], tuple[Output, ...]]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# The second has KV heads enough for eight ranks.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 104},
    "mistral": {"sliding_window": 70},
}
SUITE = (("llama", 2, 1, 1), ("mistral", 1, 2, 1))
WAYS = {
    1: (80, (("llama", 1, 1), ("qwen3", 1, 1), ("mistral", 1, 1))),
    2: (75, (("llama", 2, 1), ("llama", 1, 2), ("qwen3", 2, 1), ("mistral", 2, 1), ("mistral", 1, 2))),
    3: (35, (("llama", 3, 1), ("llama", 1, 3), ("qwen3", 3, 1))),
    4: (15, (("llama", 2, 2), ("qwen3", 4, 1))),
}
"""For each number of ranks how many small ways they run one after the other, and of which models, tp and pp."""
FEW_STEPS = 400
"""Half of all ways take less than 20. One in twelve takes more than this, up to 5,000: such are in the sweep alone."""
WIDE = (("llama", 1, 2), ("llama", 2, 2), ("llama", 3, 1), ("qwen3", 8, 1), ("qwen3", 3, 2), ("mistral", 2, 3))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {family: write_tiny_checkpoint(root / family, family, seed=4, **MODELS[family]) for family in MODELS}


@pytest.fixture(scope="module")
def expected_of_all(models: dict[str, Path]) -> tuple[Expected, Expected]:
    """What one rank gives for each model and dtype, all jobs in one batch; and of the small jobs."""
    keys = [(family, dtype) for family in MODELS for dtype in DTYPES]
    large = [base_case(models[family], dtype) for family, dtype in keys]
    small = [replace(case, jobs=small_jobs()) for case in large]
    (outputs,) = run_ranks(run_ways, 1, large + small)
    return dict(zip(keys, outputs[: len(keys)], strict=True)), dict(zip(keys, outputs[len(keys) :], strict=True))


@pytest.fixture(scope="module")
def expected(expected_of_all: tuple[Expected, Expected]) -> Expected:
    return expected_of_all[0]


def base_case(model: Path, dtype: str) -> Case:
    """What all ways are compared with: one rank, without compiled kernels."""
    return Case(model, all_jobs(), invariant=True, compiled=False, dtype=DTYPES[dtype])


def check_variants(
    models: dict[str, Path],
    expected: Expected,
    layout: tuple[str, int, int],
    count: int,
    seed: int,
    most_steps: float = math.inf,
) -> None:
    family, tp, pp = layout
    draw = random.Random(seed)
    variants: list[Variant] = []
    keys: list[tuple[str, str]] = []
    while len(variants) < count:
        dtype = draw.choice(list(DTYPES))
        variant = random_variant(draw, base_case(models[family], dtype), tp, pp)
        if expected_steps(variant.case) <= most_steps:
            keys.append((family, dtype))
            variants.append(variant)
    records = run_ranks(run_variants, tp * pp, variants, timeout_s=280)
    for key, variant, record in zip(keys, variants, records[0], strict=True):
        assert differences(expected[key], variant, record) == [], f"seed {seed}: {key}, {variant}"


@pytest.mark.parametrize(("family", "tp", "pp", "count"), SUITE)
def test_requests_give_the_same_bits_however_they_run(
    models: dict[str, Path],
    expected: Expected,
    family: str,
    tp: int,
    pp: int,
    count: int,
) -> None:
    check_variants(models, expected, (family, tp, pp), count, secrets.randbits(32), FEW_STEPS)


@pytest.mark.parametrize("ranks", WAYS)
def test_two_hundred_small_ways_give_the_same_bits(
    models: dict[str, Path], expected_of_all: tuple[Expected, Expected], ranks: int
) -> None:
    _, expected = expected_of_all
    seed = secrets.randbits(32)
    draw = random.Random(seed)
    bases = {family: replace(base_case(models[family], "float32"), jobs=small_jobs()) for family in MODELS}
    keys, ways = [], []
    count, layouts = WAYS[ranks]
    for index in range(count):
        family, tp, pp = layouts[index % len(layouts)]
        dtype = draw.choice(list(DTYPES))
        keys.append((family, dtype))
        ways.append(random_way(draw, bases[family], tp, pp, DTYPES[dtype]))
    found = run_ranks(run_ways, ranks, [way.case for way in ways])[0]
    for key, way, outputs in zip(keys, ways, found, strict=True):
        right = tuple(expected[key][index] for index in way.order)
        assert outputs == right, f"seed {seed}: {key}, {way}"


@pytest.fixture(scope="module")
def roomy(models: dict[str, Path]) -> Case:
    draw = random.Random(2)
    params = SamplingParams(temperature=1.0, logprobs=2, min_tokens=60)
    jobs = tuple(Job(tokens(draw, 14), 60, params, seed=seed) for seed in range(8))
    return Case(models["llama"], jobs, invariant=True, compiled=False)


@pytest.fixture(scope="module")
def uninterrupted(roomy: Case) -> tuple[Output, ...]:
    (outputs,) = run_ranks(run_engine, 1, roomy)[0].outputs
    return outputs


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_preempted_requests_give_the_same_bits(
    roomy: Case, uninterrupted: tuple[Output, ...], *, prefix_cache: bool
) -> None:
    tight = replace(roomy, tp=2, compiled=True, kv_cache_tokens=192, prefix_cache=prefix_cache)
    record = run_ranks(run_engine, 2, tight)[0]
    assert sum(generated > 0 for _, generated in record.preempted[0]) > 3
    assert record.outputs[0] == uninterrupted


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize(("family", "tp", "pp"), WIDE)
def test_two_hundred_random_ways(
    models: dict[str, Path],
    expected: Expected,
    family: str,
    tp: int,
    pp: int,
    part: int,
) -> None:
    check_variants(models, expected, (family, tp, pp), 9, secrets.randbits(32) + part)


def test_expected_outputs_are_of_every_kind(expected: Expected) -> None:
    for outputs in expected.values():
        assert all(output.error is None and output.reports for output in outputs)
        assert sum(bool(output.prompt_reports) for output in outputs) > 5
        assert {output.finish_reason for output in outputs} >= {"length"}
    assert expected["llama", "float32"] != expected["llama", "bfloat16"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_the_same_bits_at_every_tp_size(models: dict[str, Path], dtype: str) -> None:
    seed = secrets.randbits(32)
    draw = random.Random(seed)
    ids = [tokens(draw, length) for length in (150, 1, 64, 65, 40)]
    lengths = [len(one) for one in ids]
    plain = ModelPipeline(models["llama"], dtype=DTYPES[dtype], invariant=True, compiled=False)
    alone = walk_logits(plain, ids, random_walk(draw, lengths))
    walks = [random_walk(draw, lengths) for _ in range(3)]
    for size in (1, 2, 3):
        for by_walk in run_ranks(logits_of_rank, size, models["llama"], DTYPES[dtype], ids, walks):
            for found in by_walk:
                for one, other in zip(found, alone, strict=True):
                    assert torch.equal(one.view(torch.int32), other.view(torch.int32)), f"seed {seed}, tp {size}"


@pytest.mark.parametrize("compiled", [False, True])
def test_a_tree_that_sums_in_another_order_is_noticed(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, *, compiled: bool
) -> None:
    draw = random.Random(3)
    ids = [tokens(draw, 20)]
    walk = random_walk(draw, [20])
    right = walk_logits(ModelPipeline(models["llama"], invariant=True, compiled=compiled), ids, walk)
    reduce, adds = ReductionTree.reduce, ReductionTree.adds

    def swapped(self: ReductionTree, partials: torch.Tensor) -> torch.Tensor:
        return reduce(self, partials[[0, 2, 1, *range(3, len(partials))]] if len(partials) > 2 else partials)

    def one_by_one(self: ReductionTree) -> list[int]:
        units = len(adds(self))
        return [0, *[1] * (units - 2), -2]

    monkeypatch.setattr(ReductionTree, "reduce", swapped)
    monkeypatch.setattr(ReductionTree, "adds", one_by_one)
    wrong = walk_logits(ModelPipeline(models["llama"], invariant=True, compiled=compiled), ids, walk)
    torch.testing.assert_close(wrong[0], right[0], atol=1e-4, rtol=0)
    assert not torch.equal(wrong[0], right[0])


def test_decode_logprobs_are_those_of_a_teacher_forced_prefill(models: dict[str, Path]) -> None:
    draw = random.Random(6)
    params = SamplingParams(temperature=1.0, logprobs=2)
    jobs = tuple(Job(tokens(draw, draw.randrange(1, 80)), 12, params, seed=seed) for seed in range(50))
    case = Case(models["llama"], jobs, tp=2, pp=1, invariant=True)
    (generated,) = run_ranks(run_engine, 2, case)[0].outputs
    scores = tuple(
        Job((*job.prompt, *output.token_ids), 0, SamplingParams(prompt_logprobs=2))
        for job, output in zip(jobs, generated, strict=True)
    )
    (scored,) = run_ranks(run_engine, 1, replace(case, jobs=scores, tp=1, max_batch_tokens=300))[0].outputs
    compared = 0
    for job, output, score in zip(jobs, generated, scored, strict=True):
        assert score.prompt_reports[len(job.prompt) - 1 :] == output.reports
        compared += len(output.reports)
    assert compared > 400


def test_one_thread_and_two_give_the_same_bits(models: dict[str, Path]) -> None:
    draw = random.Random(9)
    ids = [tokens(draw, length) for length in (90, 33)]
    walk = random_walk(draw, [90, 33])
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(walk_logits(ModelPipeline(models["llama"], invariant=True), ids, walk))
    finally:
        torch.set_num_threads(threads)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
