"""Random ways to run the same requests in invariant mode, and the ranks that run many of them one after the other."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from engine_ranks import Case, Job, Output, RankRecord, grammar, run_engine
from model_pipeline import ModelPipeline, Part

from launch.rank.groups import build_groups
from sampler.params import SamplingParams

CHUNKS = (1, 7, 16, 512)
BATCHES = (1, 2, 3, 7, 8, 9, 33)


def tokens(draw: random.Random, length: int) -> tuple[int, ...]:
    return tuple(draw.randrange(1, 320) for _ in range(length))


def all_jobs() -> tuple[Job, ...]:
    """Returns 33 requests: greedy, seeded, filtered, under grammars; several begin alike; all report logprobs."""
    draw = random.Random(8)
    shared = tokens(draw, 70)
    kinds = (
        SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=1),
        SamplingParams(temperature=1.0, logprobs=2),
        SamplingParams(temperature=0.8, top_p=0.9, top_k=40, logprobs=0, logprobs_mode="processed"),
        SamplingParams(temperature=1.3, repetition_penalty=1.2, logprobs=1, return_support=True, top_k=5),
    )
    integers = {"type": "array", "items": {"type": "integer"}}
    specs = (None, None, grammar(regex="[a-z ]{6,}"), grammar(json_schema=integers))
    jobs = []
    for index in range(33):
        own = tokens(draw, draw.choice((1, 2, 5, 17, 63, 64, 65, 90)))
        prompt = shared[: draw.choice((0, 33, 70))] + own
        spec = specs[draw.randrange(4)]
        jobs.append(Job(prompt, draw.choice((3, 6, 10)), kinds[index % 4], seed=index, grammar=spec))
    return tuple(jobs)


@dataclass(frozen=True)
class Variant:
    """A way to run some of the jobs: ``order`` names them, ``case`` is how."""

    order: tuple[int, ...]
    case: Case


def expected_steps(case: Case) -> float:
    """Returns about how many steps a case takes."""
    prompts = sum(len(job.prompt) for job in case.jobs)
    outputs = sum(job.max_tokens for job in case.jobs)
    rows = min(case.max_num_seqs, len(case.jobs), case.max_batch_tokens)
    return case.rounds * max((prompts + outputs) / case.max_batch_tokens, outputs / rows)


def random_variant(draw: random.Random, base: Case, tp: int, pp: int) -> Variant:
    """Returns a random batch of the base case's jobs, in random order, under random limits."""
    order = list(range(len(base.jobs)))
    draw.shuffle(order)
    order = order[: draw.choice(BATCHES)]
    longest = max(len(base.jobs[index].prompt) + base.jobs[index].max_tokens for index in order)
    pressed = draw.random() < 0.3
    prefix_cache = draw.random() < 0.7
    rounds = 2 if draw.random() < 0.2 else 1
    compiled = draw.random() < 0.8
    case = replace(
        base,
        jobs=tuple(base.jobs[index] for index in order),
        tp=tp,
        pp=pp,
        max_num_seqs=draw.choice((3, 33)),
        max_batch_tokens=max(draw.choice(CHUNKS), draw.choice((1, 40))),
        kv_cache_tokens=-(-(longest + 40) // 16) * 16 if pressed else 1 << 13,
        prefix_cache=prefix_cache,
        rounds=rounds,
        compiled=compiled,
    )
    return Variant(tuple(order), case)


def run_variants(rank: int, world_size: int, variants: list[Variant]) -> list[RankRecord]:
    """Runs the variants one after the other on the same ranks; for ``ranks.run_ranks``."""
    return [run_engine(rank, world_size, variant.case) for variant in variants]


def differences(expected: tuple[Output, ...], variant: Variant, record: RankRecord) -> list[str]:
    """Returns which of a variant's outputs are not the very bits expected of their jobs."""
    found = []
    for number, outputs in enumerate(record.outputs):
        for index, output in zip(variant.order, outputs, strict=True):
            if output != expected[index]:
                found.append(f"round {number}, job {index}: {output} instead of {expected[index]}")
    return found


@dataclass(frozen=True)
class Walk:
    """How sequences run through a model: ``steps`` has the (sequence, tokens) of each step."""

    steps: tuple[tuple[tuple[int, int], ...], ...]


def random_walk(draw: random.Random, lengths: list[int]) -> Walk:
    """Returns steps that take sequences of these lengths to their ends in random chunks, rows and company."""
    left = dict(enumerate(lengths))
    steps = []
    while left:
        running = [index for index in left if draw.random() < 0.7] or [next(iter(left))]
        draw.shuffle(running)
        step = []
        for index in running:
            count = min(left[index], draw.choice((1, 1, 2, 7, 16, 90, 512)))
            left[index] -= count
            step.append((index, count))
        left = {index: count for index, count in left.items() if count}
        steps.append(tuple(step))
    return Walk(tuple(steps))


def walk_logits(pipeline: ModelPipeline, ids: list[tuple[int, ...]], walk: Walk) -> list[torch.Tensor]:
    """Returns the logits of every token of every sequence, [tokens, vocab_size] each."""
    done = [0] * len(ids)
    logits: list[list[torch.Tensor]] = [[] for _ in ids]
    for index, one in enumerate(ids):
        pipeline.add(index, len(one))
    for step in walk.steps:
        parts = [Part(index, ids[index][done[index] : done[index] + count], done[index], 1) for index, count in step]
        rows = pipeline.step(parts, all_rows=True)
        at = 0
        for index, count in step:
            logits[index].append(rows[at : at + count])
            done[index] += count
            at += count
    for index in range(len(ids)):
        pipeline.remove(index)
    return [torch.cat(parts) for parts in logits]


def logits_of_rank(
    rank: int, world_size: int, folder: Path, dtype: torch.dtype, ids: list[tuple[int, ...]], walks: list[Walk]
) -> list[list[torch.Tensor]]:
    """Returns the logits of each walk over ``world_size`` tensor-parallel ranks; for ``ranks.run_ranks``."""
    group = build_groups(world_size, 1, timeout_s=60).tensor_parallel
    pipeline = ModelPipeline(folder, group, dtype=dtype, invariant=True)
    return [walk_logits(pipeline, ids, walk) for walk in walks]
