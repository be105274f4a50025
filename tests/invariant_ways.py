"""Many small ways to run a few short requests in invariant mode, one after the other on ranks that keep their parts."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from compiled_kernels import invariant_factory
from engine_ranks import Case, Job, Output, RecordingScheduler, ScriptedLeader, grammar, limits_of, run_once
from grammars import InlineVetter
from invariant_cases import Variant, expected_steps, tokens

from grammar_sync.agreed_compiler import AgreedCompiler
from grammar_sync.compiler import ThreadedGrammarCompiler
from grammar_sync.engines.factory import make_backend
from grammar_sync.fill_pool import FillPool
from launch.rank.groups import RankGroups, build_groups, warm_up
from pp.partition import layer_ranges
from runtime.assembly import FirstStagePart, grammar_vocabulary
from runtime.checkpoint import Checkpoint, open_checkpoint
from runtime.model import DecoderStage
from runtime.tokenizer import Tokenizer
from runtime.weights import WeightReader
from sampler.params import SamplingParams

_CPU = torch.device("cpu")
_BATCHES = (1, 2, 3, 5, 8)
_CHUNKS = (1, 3, 7, 16, 64, 512)
_MOST_STEPS = 5


def small_jobs() -> tuple[Job, ...]:
    """Returns 36 short requests of every kind; many begin alike, some reach into a second block of keys."""
    draw = random.Random(12)
    shared = tokens(draw, 33)
    kinds = (
        SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=1),
        SamplingParams(temperature=1.0, logprobs=1),
        SamplingParams(temperature=0.8, top_p=0.9, min_p=0.01, logprobs=0, logprobs_mode="processed"),
        SamplingParams(temperature=1.2, repetition_penalty=1.1, top_k=6, logprobs=1, return_support=True),
    )
    specs = (
        None,
        None,
        grammar(regex="[a-z ]{4,}"),
        grammar(json_schema={"type": "array", "items": {"type": "integer"}}),
    )
    jobs = []
    for index in range(36):
        prompt = shared[: draw.choice((0, 16, 33))] + tokens(draw, draw.choice((1, 2, 3, 5, 9, 17, 31, 40)))
        jobs.append(
            Job(prompt, draw.choice((1, 2, 3, 4)), kinds[index % 4], seed=index, grammar=specs[draw.randrange(4)])
        )
    return tuple(jobs)


def random_way(draw: random.Random, base: Case, tp: int, pp: int, dtype: torch.dtype) -> Variant:
    """Returns a few of the base case's jobs in a random order, under random limits, that take few steps."""
    while True:
        order = draw.sample(range(len(base.jobs)), draw.choice(_BATCHES))
        longest = max(len(base.jobs[index].prompt) + base.jobs[index].max_tokens for index in order)
        case = replace(
            base,
            jobs=tuple(base.jobs[index] for index in order),
            tp=tp,
            pp=pp,
            dtype=dtype,
            max_num_seqs=draw.choice((1, 2, 3, 33)),
            max_batch_tokens=draw.choice(_CHUNKS),
            kv_cache_tokens=-(-(longest + draw.choice((1, 40))) // 16) * 16 if draw.random() < 0.4 else 1 << 12,
            prefix_cache=draw.random() < 0.7,
            compiled=draw.random() < 0.9,
        )
        if expected_steps(case) <= _MOST_STEPS:
            return Variant(tuple(order), case)


class _KeptParts:
    """What a rank makes once for all ways: groups, stages, compilers."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._groups: dict[tuple[object, ...], RankGroups] = {}
        self._stages: dict[tuple[object, ...], DecoderStage] = {}
        self._checkpoints: dict[object, Checkpoint] = {}
        self._compilers: list[ThreadedGrammarCompiler] = []
        self._first_stages: dict[object, FirstStagePart] = {}

    def run(self, case: Case) -> tuple[Output, ...]:
        """Returns the outputs of a case on the first rank, nothing elsewhere."""
        groups = self._groups_of(case)
        eos = self._checkpoint(case).config.eos_token_ids
        first_stage = self._first_stage(case) if groups.link.is_first else None
        leader = ScriptedLeader(case.jobs, case.more_ends) if self._rank == 0 else None
        scheduler = RecordingScheduler(limits_of(case), eos)
        run_once(groups, self._stage(case, groups), scheduler, eos, first_stage, leader, case, None, None)
        return () if leader is None else tuple(leader.outputs[index] for index in range(len(case.jobs)))

    def close(self) -> None:
        for compiler in self._compilers:
            compiler.close()

    def _checkpoint(self, case: Case) -> Checkpoint:
        if case.model not in self._checkpoints:
            self._checkpoints[case.model] = open_checkpoint(case.model)
        return self._checkpoints[case.model]

    def _groups_of(self, case: Case) -> RankGroups:
        # A group holds all passes of its own stage against one another.
        key = (case.model, case.tp, case.pp, case.dtype)
        if key not in self._groups:
            self._groups[key] = build_groups(case.tp, case.pp, timeout_s=60)
            warm_up(self._groups[key], _CPU)
        return self._groups[key]

    def _stage(self, case: Case, groups: RankGroups) -> DecoderStage:
        key = (case.model, case.tp, case.pp, case.dtype, case.compiled)
        if key not in self._stages:
            checkpoint = self._checkpoint(case)
            self._stages[key] = DecoderStage(
                checkpoint.config,
                WeightReader(checkpoint),
                layer_ranges(checkpoint.config.num_layers, case.pp)[groups.link.stage],
                groups.tensor_parallel,
                dtype=case.dtype,
                device=_CPU,
                products=invariant_factory(_CPU, compiled=case.compiled),
            )
        return self._stages[key]

    def _first_stage(self, case: Case) -> FirstStagePart:
        if case.model not in self._first_stages:
            config = self._checkpoint(case).config
            vocabulary = grammar_vocabulary(Tokenizer.load(case.model), config, config.eos_token_ids)
            backend = make_backend(vocabulary, "auto")
            self._compilers.append(ThreadedGrammarCompiler(backend))
            agreed = AgreedCompiler(self._compilers[-1], InlineVetter(backend) if self._rank == 0 else None)
            pool = FillPool(deadline_s=case.fill_deadline_s)
            self._first_stages[case.model] = FirstStagePart(vocabulary, agreed, None, pool)
        return self._first_stages[case.model]


def run_ways(rank: int, world_size: int, cases: list[Case]) -> list[tuple[Output, ...]]:
    """Returns the outputs of each case, on rank 0; for ``ranks.run_ranks``."""
    parts = _KeptParts(rank)
    try:
        return [parts.run(case) for case in cases]
    finally:
        parts.close()
