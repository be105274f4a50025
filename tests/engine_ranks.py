"""Runs the real engine on real ranks, with a scripted leader in place of the client socket."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from compiled_kernels import invariant_factory
from faulty_parts import FaultyStage, FillFault, faulty_managers
from grammars import InlineVetter

from grammar_sync.agreed_compiler import AgreedCompiler
from grammar_sync.compiler import CompileOutcome, GrammarCompiler, Pending, ThreadedGrammarCompiler
from grammar_sync.engines.factory import make_backend
from grammar_sync.engines.prepared import PreparedGrammar
from grammar_sync.fill_pool import FillPool
from grammar_sync.spec import GrammarSpec, parse_grammar
from grammar_sync.thinking import ThinkingRules
from launch.node.progress_record import ProgressRecord
from launch.rank.groups import RankGroups, build_groups, warm_up
from pp.partition import layer_ranges
from runtime.assembly import FirstStagePart, build_engine, grammar_vocabulary, load_audit_heads
from runtime.checkpoint import open_checkpoint
from runtime.engine_statistics import SchedulerStatistics
from runtime.intake import Patience
from runtime.leader_needs import GrammarWatch
from runtime.messages import Action, AddSequence, EndSequence, ErrorInfo, FinishReason, StopRanks
from runtime.model import DecoderStage
from runtime.plan import PlanRow, StepPlan
from runtime.reports import TokenReport
from runtime.scheduler import Scheduler
from runtime.sequence import Sequence
from runtime.speculation import SpeculationLimits
from runtime.step_planner import SchedulerLimits
from runtime.thinking import reasoning_of
from runtime.tokenizer import Tokenizer
from runtime.weights import WeightReader
from sampler.params import SamplingParams
from tp.embedding import ParallelLMHead


@dataclass(frozen=True)
class Job:
    """One sequence for the scripted leader."""

    prompt: Many[int]
    max_tokens: int = 16
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    seed: int = 0
    choice: int = 0
    prefill_of: int | None = None
    grammar: GrammarSpec | None = None
    thinking: ThinkingRules | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    abort_at_step: int | None = None
    priority: int = 0
    cache_salt: str = ""


@dataclass(frozen=True)
class Case:
    """What a group of ranks runs.

    ``device`` is ``cpu``, or ``cuda`` for one GPU a rank. ``compile_delay_s`` and ``stall_s`` bound random delays of
    first-stage compiles and of one forward pass on a later stage; ``seed`` draws them. ``fill_faults`` befall matchers.
    ``more_ends`` are aborts beside those of the jobs: (step, sequence). ``compiled``: whether there are
    compiled kernels in invariant mode.
    """

    model: Path
    jobs: tuple[Job, ...]
    tp: int = 1
    pp: int = 1
    max_num_seqs: int = 64
    max_batch_tokens: int = 2048
    kv_cache_tokens: int = 1 << 16
    block_tokens: int = 16
    prefix_cache: bool = True
    draft_tokens: int = 0
    more_ends: tuple[tuple[int, int], ...] = ()
    rounds: int = 1
    device: str = "cpu"
    invariant: bool = False
    compiled: bool = True
    dtype: torch.dtype = torch.float32
    audit: bool = False
    audit_every: int = 0
    noisy_rank: int = -1
    seed: int = 0
    compile_delay_s: float = 0.0
    stall_s: float = 0.0
    fill_faults: tuple[FillFault, ...] = ()
    fill_deadline_s: float = 60.0
    markers: tuple[str, str] | None = None


@dataclass(frozen=True)
class Output:
    """What the leader heard of one job."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    error: str | None
    reports: tuple[TokenReport, ...] = ()
    prompt_reports: tuple[TokenReport, ...] = ()


@dataclass(frozen=True)
class RankRecord:
    """What one rank saw: its plans with rows, per round; the leader's outputs; what it built.

    ``preempted``: each preempted sequence with its output tokens by then; ``holders``: who held KV blocks after each
    step's plan; ``statistics``: as the rounds ended;
    ``lags``: how many steps each token waited until the leader let it go.
    """

    plans: tuple[tuple[tuple[PlanRow, ...], ...], ...]
    outputs: tuple[tuple[Output, ...], ...]
    tokenizers_built: int
    compilers_built: int
    observed: tuple[tuple[str, str, int], ...] = ()
    preempted: tuple[tuple[tuple[int, int], ...], ...] = ()
    holders: tuple[tuple[frozenset[int], ...], ...] = ()
    statistics: tuple[SchedulerStatistics, ...] = ()
    lags: tuple[int, ...] = ()


@dataclass
class Watched:
    """What a test sees of a rank that may fail: its record, and its leaders, if it is the one that has any."""

    record: ProgressRecord
    leaders: list[ScriptedLeader] = field(default_factory=list)


class ScriptedLeader:
    """Adds all jobs in the first step, aborts as told, and stops the ranks when all jobs have ended."""

    def __init__(self, jobs: Many[Job], more_ends: tuple[tuple[int, int], ...] = ()) -> None:
        self._jobs = jobs
        self._more_ends = more_ends
        self._step = 0
        self._open = set(range(len(jobs)))
        self._ends: list[Action] = []
        self.outputs: dict[int, Output] = {}
        self.prompts: dict[int, list[TokenReport]] = {}
        self.reports: dict[int, list[TokenReport]] = {}
        self.errors: dict[int, str] = {}
        self.unagreed: list[tuple[int, int, int]] = []
        self.emitted: dict[int, list[int]] = {}
        self.lags: list[int] = []

    def begin_step(self, step: int) -> None:
        self._step = step

    def agreed(self, before_step: int) -> None:
        for _, sequence_id, token_id in (late for late in self.unagreed if late[0] < before_step):
            self.emitted.setdefault(sequence_id, []).append(token_id)
        self.lags += [self._step - late[0] for late in self.unagreed if late[0] < before_step]
        self.unagreed = [late for late in self.unagreed if late[0] >= before_step]

    def collect(self, patience: Patience) -> list[Action]:
        if self._step == 1:
            return [self._add(index, job) for index, job in enumerate(self._jobs)]
        if not self._open:
            return [StopRanks()]
        if patience is not Patience.NONE:
            time.sleep(0.03)
        aborts: list[Action] = [
            EndSequence(index, "abort") for index, job in enumerate(self._jobs) if job.abort_at_step == self._step
        ]
        aborts += [EndSequence(sequence_id, "abort") for step, sequence_id in self._more_ends if step == self._step]
        ends, self._ends = self._ends, []
        return ends + aborts

    def _add(self, index: int, job: Job) -> AddSequence:
        return AddSequence(
            sequence_id=index,
            choice=job.choice,
            prompt_token_ids=list(job.prompt),
            max_tokens=job.max_tokens,
            params=job.params,
            seed=job.seed,
            grammar=job.grammar,
            thinking=job.thinking,
            prefill_of=job.prefill_of,
            bad_words_token_ids=job.bad_words_token_ids,
            priority=job.priority,
            cache_salt=job.cache_salt,
        )

    def watch_grammars(self, grammars: GrammarWatch) -> None:
        self._grammars = grammars

    def working_at(self, sequence_ids: Iterable[int]) -> None:
        pass

    def grammars_ready(self, sequence_ids: tuple[int, ...]) -> None:
        pass

    def prompt(self, sequence: Sequence, reports: list[TokenReport]) -> None:
        self.prompts.setdefault(sequence.sequence_id, []).extend(reports)

    def token(self, sequence: Sequence, report: TokenReport | None) -> None:
        if sequence.finish_reason != "error":
            self.unagreed.append((self._step, sequence.sequence_id, sequence.output_token_ids[-1]))
        if report is not None:
            self.reports.setdefault(sequence.sequence_id, []).append(report)
        if sequence.finish_reason is not None:
            self.ended(sequence)

    def refused(self, sequence: Sequence, message: str) -> None:
        self.errors[sequence.sequence_id] = message
        self._ends.append(EndSequence(sequence.sequence_id, "error", ErrorInfo("grammar_error", message)))

    def ended(self, sequence: Sequence) -> None:
        assert sequence.finish_reason is not None
        error = None if sequence.error is None else sequence.error.message
        self.outputs[sequence.sequence_id] = Output(
            tuple(sequence.output_token_ids),
            sequence.finish_reason,
            error,
            tuple(self.reports.get(sequence.sequence_id, ())),
            tuple(self.prompts.get(sequence.sequence_id, ())),
        )
        self._open.discard(sequence.sequence_id)

    def flush(self) -> None:
        pass


class RecordingScheduler(Scheduler):
    """Keeps the rows of every plan that is not empty; no constrained row may be planned while its last is in flight."""

    def __init__(self, limits: SchedulerLimits, eos_token_ids: Many[int]) -> None:
        super().__init__(limits, eos_token_ids)
        self.planned: list[tuple[PlanRow, ...]] = []
        self._uncommitted: set[int] = set()
        self.preempted: list[tuple[int, int]] = []
        self.holders: list[frozenset[int]] = []

    def plan(self, step: int) -> StepPlan:
        FaultyStage.began.clear()
        plan = super().plan(step)
        if plan.rows:
            self.planned.append(plan.rows)
        constrained = {row.sequence_id for row in plan.rows if row.constrained}
        assert not constrained & self._uncommitted, "a mask would be built before the last id came back"
        self._uncommitted.update(row.sequence_id for row in plan.rows)
        self.preempted += [(one, len(self[one].output_token_ids)) for one in plan.preempted]
        self.holders.append(frozenset(one for one in self._sequences if one in self.blocks))
        return plan

    def commit(self, plan: StepPlan, token_ids: list[int], errors: list[ErrorInfo | None]) -> Iterator[int]:
        self._uncommitted.difference_update(row.sequence_id for row in plan.rows)
        return super().commit(plan, token_ids, errors)


class DelayedCompiler:
    """A compiler whose outcomes come later by a random time, different on each rank."""

    def __init__(self, inner: GrammarCompiler, draw: random.Random, limit_s: float) -> None:
        self._inner = inner
        self._draw = draw
        self._limit_s = limit_s
        self._due_s: dict[PreparedGrammar, float] = {}

    def submit(self, prepared: PreparedGrammar) -> None:
        self._due_s.setdefault(prepared, time.monotonic() + self._draw.uniform(0, self._limit_s))
        self._inner.submit(prepared)

    def poll(self, prepared: PreparedGrammar) -> CompileOutcome:
        return Pending() if time.monotonic() < self._due_s[prepared] else self._inner.poll(prepared)

    def discard(self, prepared: PreparedGrammar) -> None:
        self._inner.discard(prepared)

    def close(self) -> None:
        self._inner.close()


def grammar(**fields: Any) -> GrammarSpec:
    """Returns the grammar that a request with ``fields`` would have."""
    spec = parse_grammar(fields)
    assert spec is not None
    return spec


def run_engine(rank: int, world_size: int, case: Case, watched: Watched | None = None) -> RankRecord:
    """Runs ``case`` on this rank; for ``ranks.run_ranks``."""
    assert world_size == case.tp * case.pp
    device = torch.device("cpu") if case.device == "cpu" else torch.device(case.device, rank)
    record = None if watched is None else watched.record
    groups = build_groups(case.tp, case.pp, timeout_s=60, device=device, record=record)
    warm_up(groups, device)
    checkpoint = open_checkpoint(case.model)
    config = checkpoint.config
    layers = layer_ranges(config.num_layers, case.pp)[groups.link.stage]
    reader = WeightReader(checkpoint)
    products = invariant_factory(device, compiled=case.compiled) if case.invariant else None
    stage = FaultyStage(
        config, reader, layers, groups.tensor_parallel, dtype=case.dtype, device=device, products=products
    )
    stage.noisy = rank == case.noisy_rank
    audit_heads = load_audit_heads(stage, reader, groups.tensor_parallel) if case.audit else None
    tokenizers = []
    if groups.link.is_first:
        tokenizers.append(Tokenizer.load(case.model))
    eos = config.eos_token_ids
    compilers: list[GrammarCompiler] = []
    observed: list[tuple[str, str, int]] = []
    groups.tensor_parallel.observer = lambda *record: observed.append(record)
    groups.link.observer = lambda *record: observed.append(record)
    plans, outputs, preempted, holders, statistics = [], [], [], [], []
    lags: list[int] = []
    for number in range(case.rounds):
        draw = random.Random(f"{case.seed}/{number}/{rank}")
        stage.stall_once(draw, case.stall_s if groups.link.stage > 0 and draw.random() < 0.5 else 0.0)
        first_stage = None
        if tokenizers:
            if not compilers:
                vocabulary = grammar_vocabulary(tokenizers[0], config, eos)
                backend = make_backend(vocabulary, "auto")
            if not compilers or case.compile_delay_s:
                compilers.append(ThreadedGrammarCompiler(backend))
            compiler = DelayedCompiler(compilers[-1], draw, case.compile_delay_s)
            pool = FillPool(deadline_s=case.fill_deadline_s)
            agreed = AgreedCompiler(compiler, InlineVetter(backend) if rank == 0 else None)
            first_stage = FirstStagePart(
                vocabulary, agreed, reasoning_of(tokenizers[0], vocabulary, case.markers), pool
            )
        scheduler = RecordingScheduler(limits_of(case), eos)
        leader = ScriptedLeader(case.jobs, case.more_ends) if rank == 0 else None
        if watched is not None and leader is not None:
            watched.leaders.append(leader)
        with faulty_managers([fault for fault in case.fill_faults if fault.rank == rank]):
            run_once(groups, stage, scheduler, eos, first_stage, leader, case, audit_heads, record)
        plans.append(tuple(scheduler.planned))
        preempted.append(tuple(scheduler.preempted))
        holders.append(tuple(scheduler.holders))
        statistics.append(scheduler.statistics)
        if leader is not None:
            assert not leader.unagreed, "what is committed leaves in the end"
            lags += leader.lags
            outputs.append(tuple(leader.outputs[index] for index in range(len(case.jobs))))
    for compiler_built in compilers:
        compiler_built.close()
    return RankRecord(
        tuple(plans),
        tuple(outputs),
        len(tokenizers),
        len(compilers),
        tuple(observed),
        tuple(preempted),
        tuple(holders),
        tuple(statistics),
        tuple(lags),
    )


def limits_of(case: Case) -> SchedulerLimits:
    return SchedulerLimits(
        max_num_seqs=case.max_num_seqs,
        max_batch_tokens=case.max_batch_tokens,
        kv_cache_tokens=case.kv_cache_tokens,
        in_flight_steps=case.pp,
        block_tokens=case.block_tokens,
        prefix_cache=case.prefix_cache,
        speculation=SpeculationLimits(case.draft_tokens),
    )


def run_once(
    groups: RankGroups,
    stage: DecoderStage,
    scheduler: Scheduler,
    eos: tuple[int, ...],
    first_stage: FirstStagePart | None,
    leader: ScriptedLeader | None,
    case: Case,
    audit_heads: list[ParallelLMHead] | None,
    record: ProgressRecord | None,
) -> None:
    engine = build_engine(
        group=groups.tensor_parallel,
        link=groups.link,
        stage=stage,
        scheduler=scheduler,
        eos_token_ids=eos,
        in_flight_steps=case.pp,
        first_stage=first_stage,
        leader=leader,
        audit_every=case.audit_every,
        audit_heads=audit_heads,
        record=record,
    )
    engine.run()
