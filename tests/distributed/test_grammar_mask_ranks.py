"""Real ranks over gloo: masks over the pipeline, and compiles of different length on each rank (T1, T12)."""

from __future__ import annotations

import random
import time

import msgspec
import pytest
import torch
from grammars import InlineVetter, allowed_ids, encode, local_compiler, small_vocabulary
from ranks import run_ranks

from grammar_sync.agreed_compiler import AgreedCompiler
from grammar_sync.agreement import Verdict, agree
from grammar_sync.compiler import ThreadedGrammarCompiler
from grammar_sync.engines.backend import CompiledGrammar
from grammar_sync.engines.prepared import PreparedGrammar
from grammar_sync.engines.xgrammar_backend import XGrammarBackend
from grammar_sync.manager import GrammarManager
from grammar_sync.masks import MaskError, MaskExchange, RowFault
from grammar_sync.relay import relay_verdict
from grammar_sync.spec import GrammarSpec, parse_grammar
from grammar_sync.vocabulary import GrammarVocabulary
from launch.rank.groups import RankGroups, build_groups
from pp.link import LinkError

TIMEOUT_S = 30.0


def begin(groups: RankGroups, step: int) -> None:
    groups.tensor_parallel.begin_step(step)
    groups.link.begin_step(step)


def spec_of(**fields: object) -> GrammarSpec:
    spec = parse_grammar(fields)
    assert spec is not None
    return spec


def ready_manager(vocabulary: GrammarVocabulary, specs: list[GrammarSpec]) -> GrammarManager:
    manager = GrammarManager(vocabulary, local_compiler(XGrammarBackend(vocabulary)))
    waiting = list(range(len(specs)))
    for sequence_id, spec in enumerate(specs):
        manager.submit(sequence_id, spec)
    while len(manager.local_report(waiting).ready) < len(specs):
        time.sleep(0.002)
    for sequence_id in waiting:
        manager.start(sequence_id)
    return manager


def mask_rank(rank: int, world_size: int, tp_size: int) -> list[list[list[int]]]:
    """Returns the ids each step's masks allow in this rank's slice, by row; on last-stage ranks only."""
    groups = build_groups(tp_size, world_size // tp_size, timeout_s=TIMEOUT_S)
    vocabulary = small_vocabulary(5000)
    own = vocabulary.blocks.slice_of(groups.tensor_parallel.rank, tp_size)
    exchange = MaskExchange(groups.link, own.words)
    specs = [spec_of(regex="abc|xyz"), spec_of(json_object=True), spec_of(choice=["hello", "yes"])]
    manager = ready_manager(vocabulary, specs) if groups.link.is_first else None
    steps = []
    # The plan's rows that are constrained, and the sequences that sit there; a step without any sends nothing.
    for step, (rows, sequences) in enumerate([([1, 2, 5], [0, 1, 2]), ([], []), ([0, 3], [2, 0])], start=1):
        begin(groups, step)
        if manager is not None:
            filled = manager.finish_masks(manager.begin_masks(sequences))
            exchange.send(rows, filled.words, filled.faults)
            if step == 1:
                manager.accept(0, encode("x")[0])
        if groups.link.is_last:
            received = exchange.receive(rows).words
            assert received.shape == (len(rows), own.words.stop - own.words.start)
            steps.append([allowed_ids(row, own.start) for row in received])
    groups.link.drain()
    return steps


@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 2), (2, 2)])
def test_masks_reach_the_last_stage_slice_by_slice(tp_size: int, pp_size: int) -> None:
    results = run_ranks(mask_rank, tp_size * pp_size, tp_size)
    last_stage = results[-tp_size:]
    assert all(steps == [] for steps in results[:-tp_size])
    whole = [
        [[token_id for part in parts for token_id in part] for parts in zip(*rows, strict=True)]
        for rows in zip(*last_stage, strict=True)
    ]
    first, empty, third = whole
    assert empty == []
    assert len(first) == 3
    first_of = {letter: encode(letter)[0] for letter in "axy{"}
    assert set(first[0]) & set(first_of.values()) == {first_of["a"], first_of["x"]}
    assert set(first[1]) & set(first_of.values()) == {first_of["{"]}
    assert set(third[1]) & set(first_of.values()) == {first_of["y"]}, "the mask is the one after x was accepted"
    assert third[0] == first[2]
    assert all(ids == sorted(ids) and ids[-1] < 330 for ids in [*first, *third])


def lost_mask_rank(rank: int, world_size: int) -> list[str]:
    """The first stage loses a row, then sends another row's mask, then one of the wrong width."""
    groups = build_groups(1, world_size, timeout_s=TIMEOUT_S)
    exchange = MaskExchange(groups.link, slice(0, 8))
    errors = []
    sent = [([1], 8), ([1, 2], 8), ([1, 3], 6)]
    for step, (rows, words) in enumerate(sent, start=1):
        begin(groups, step)
        if rank == 0:
            masks = torch.zeros((len(rows), words), dtype=torch.int32)
            exchange.send(rows, masks, [RowFault.NONE] * len(rows))
        else:
            with pytest.raises((MaskError, LinkError)) as caught:
                exchange.receive([1, 3])
            errors.append(f"{caught.typename}: {caught.value}")
    groups.link.drain()
    return errors


def test_a_lost_or_wrong_mask_is_an_error() -> None:
    lost, other_row, narrow = run_ranks(lost_mask_rank, 2)[1]
    assert lost.startswith("LinkError: MASK on pp0 from stage 0, step 1: got")
    assert "expected torch.int32 (2, 12)" in lost
    assert other_row == "MaskError: masks on pp0 at stage 1, step 2: got masks for rows [1, 2], expected rows [1, 3]"
    assert "(2, 10), expected torch.int32 (2, 12)" in narrow


class DelayedBackend:
    """Takes some time more for each compile, and fails on one rank alone where the grammar says so."""

    def __init__(self, vocabulary: GrammarVocabulary, rank: int, seed: int) -> None:
        self._backend = XGrammarBackend(vocabulary)
        self._random = random.Random(1000 * seed + rank)
        self._rank = rank

    def prepare(self, spec: GrammarSpec) -> tuple[PreparedGrammar, ...]:
        return self._backend.prepare(spec)

    def compile(self, prepared: PreparedGrammar) -> CompiledGrammar:
        time.sleep(self._random.random() * 0.05)
        broken = self._rank == 1 and prepared.source == "only-here"
        return self._backend.compile(msgspec.structs.replace(prepared, source="(") if broken else prepared)


def delayed_rank(rank: int, world_size: int, seeds: list[int]) -> list[list[Verdict]]:
    groups = build_groups(2, 2, timeout_s=TIMEOUT_S)
    return [verdicts_of_run(groups, rank, seed) for seed in seeds]


def verdicts_of_run(groups: RankGroups, rank: int, seed: int) -> list[Verdict]:
    """Runs steps until no request waits; returns the verdicts. Later stages hold no manager, and one stalls."""
    group, link = groups.tensor_parallel, groups.link
    vocabulary = small_vocabulary()
    manager = None
    if link.is_first:
        backend = DelayedBackend(vocabulary, rank, seed)
        vetter = InlineVetter(backend) if group.rank == 0 else None
        manager = GrammarManager(vocabulary, AgreedCompiler(ThreadedGrammarCompiler(backend), vetter))
    arrivals = [spec_of(regex="a+"), spec_of(regex="only-here"), spec_of(regex="("), spec_of(json_object=True)]
    waiting: list[int] = []
    verdicts: list[Verdict] = []
    step = 0
    while arrivals or waiting:
        step += 1
        begin(groups, step)
        if arrivals:
            if manager is not None:
                manager.submit(step, arrivals[0])
            arrivals.pop(0)
            waiting.append(step)
        if rank == 3 and step == 3:
            time.sleep(0.1)
        agreed = None
        if manager is not None:
            agreed = agree(group, step, manager.local_report(waiting), waiting)
            manager.adopt(agreed.vetted)
        verdict = relay_verdict(link, agreed)
        verdicts.append(verdict)
        done = {*verdict.ready, *(failure.request_id for failure in verdict.failed)}
        waiting = [request_id for request_id in waiting if request_id not in done]
    link.drain()
    return verdicts


def test_ranks_with_different_compile_times_stay_in_step() -> None:
    results = run_ranks(delayed_rank, 4, [1, 2, 3, 4, 5])
    assert all(runs == results[0] for runs in results)
    for verdicts in results[0]:
        ready = [request_id for verdict in verdicts for request_id in verdict.ready]
        failed = [failure.request_id for verdict in verdicts for failure in verdict.failed]
        assert sorted(ready) == [1, 4]
        assert sorted(failed) == [2, 3]
