"""One rank: comes up, runs the engine's steps until the leader ends them, and leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from grammar_sync.fill_pool import FillPool
from launch.environment import FRONT_ENDPOINT, RankEnvironment, with_import_path, without_rank_variables
from launch.node.progress_record import Phase, ProgressRecord
from launch.node.run_folder import RunFolder
from launch.options import EngineOptions
from launch.rank.compute_choice import ComputeChoice, agreed_compute
from launch.rank.decisions import Decisions, keep_decisions, recall_decisions
from launch.rank.grammar_compiler import GrammarProcessStarter, RankGrammars, RunningProcess, grammars_of_rank
from launch.rank.invariant_start import agreed_invariant, invariant_products
from launch.rank.kv_size import agreed_kv_blocks
from launch.rank.output_check_process import start_output_check
from launch.rank.preparation import FirstStageParts, PreparedEngine
from launch.rank.reporter import CountedParts, RankReporter, StatisticsBox
from launch.rank.start import StartedRank, bring_up
from launch.rank.start_barrier import meet
from launch.rank.start_facts import share_facts
from launch.rank.trace import RankTrace
from launch.rank.weights_kept import kept_weights
from launch.speculate import speculation_limits
from pp.partition import layer_ranges
from runtime.assembly import FirstStagePart, build_engine, load_audit_heads
from runtime.checkpoint import open_checkpoint
from runtime.client_socket import LeaderSocket
from runtime.engine import RankEngine
from runtime.held_outputs import HeldOutputs
from runtime.kv_budget import KV_BLOCK_TOKENS, kv_bytes_per_token
from runtime.leader import Leader
from runtime.leader_needs import LeaderLimits
from runtime.messages import EngineReady
from runtime.model import DecoderStage
from runtime.model_config import check_parallel
from runtime.output_checker import OutputChecker
from runtime.request_builder import RequestBuilder
from runtime.request_limits import RequestLimits
from runtime.scheduler import Scheduler
from runtime.step_planner import SchedulerLimits
from runtime.weights import WeightReader
from sampler.processor_names import named_processors
from sampler.processors import ProcessorRegistry, load_named_processors
from tp.invariant_products import InvariantProductFactory
from tp.products import ProductFactory

_MAX_BEAT_S = 1.0
_GRAMMAR_WAIT_S = 0.01
_GRAMMAR_BEAT_S = 0.25
_STUCK_TIMEOUTS = 6
_MIN_STUCK_S = 60.0
_DEFAULT_MAX_TOKENS = 256
_MAX_FILL_THREADS = 4
_FRONT_EXIT_S = 3.0
_TRACING_FRONT_EXIT_S = 300.0
"""The front side writes the trace before it leaves."""


class Rank:
    """This process as one of the engine's ranks.

    Args:
        options: The engine's options.
        environment: What torchrun says.
        argv: The command line, for the front side that the leader may have to start.
        record: Where this rank notes what it does.
        prepared: What this process was forked with; None when it makes all by itself.
        weights_file: The memory file for the weights of this rank, over all epochs; None when there are no others.
    """

    def __init__(
        self,
        options: EngineOptions,
        environment: RankEnvironment,
        argv: list[str],
        record: ProgressRecord,
        *,
        prepared: PreparedEngine | None = None,
        weights_file: int | None = None,
    ) -> None:
        self.phase = "start"
        self._record = record
        self.stage, self.tp_rank = divmod(environment.rank, options.tp)
        self._prepared = prepared
        self._weights_file = weights_file
        self._options = options
        self._environment = environment
        self._argv = argv
        self._front: subprocess.Popen[bytes] | None = None
        self._socket: LeaderSocket | None = None
        engines = prepared.engines() if prepared is not None and environment.rank == 0 else None
        self._grammar_starter = GrammarProcessStarter(os.environ, engines)
        self._grammar_process: RunningProcess | None = None
        self._checker: OutputChecker | None = None
        self._trace: RankTrace | None = None
        self._grammars: RankGrammars | None = None
        self._statistics = StatisticsBox()

    def run(self) -> int:
        """Runs this rank from start to end; returns the exit code."""
        options, environment = self._options, self._environment
        if environment.rank == 0:
            # Before this process has threads: afterwards it could no longer be forked.
            self._grammar_process = self._grammar_starter()
        started = bring_up(options, environment, self._record)
        self._record.enter_phase(Phase.LOAD)
        if options.trace is not None:
            self._trace = RankTrace(options.trace, options, environment)
        engine, ready = self._build(started)
        # Before any client can hear that the ranks are up: from now on a fault is survived.
        self._record.enter_phase(Phase.IDLE)
        meet(started.store, "loaded", environment, options.start_timeout_s, self._record.beat)
        if self._prepared is not None and self.stage > 0:
            # It takes time, which there is now: the leader has yet to hear of its clients.
            self._prepared.drop_first_stage()
        self.phase = "run"
        if self._socket is not None:
            self._socket.send([ready])
        reporter = RankReporter(
            started.store,
            environment.rank,
            environment.world_size,
            status=engine.status,
            counted=self._counted(engine),
            box=self._statistics,
        )
        engine.run()
        self._record.enter_phase(Phase.LEAVING)
        # Before the socket that it wakes is closed.
        reporter.close()
        if self._trace is not None:
            self._trace.finish()
        return self._leave()

    def _counted(self, engine: RankEngine) -> CountedParts | None:
        """Returns what this rank counts if it is the leader."""
        grammars = self._grammars
        if grammars is None or grammars.vetting is None:
            return None
        return CountedParts(
            status=engine.status,
            scheduler=engine.scheduler,
            grammar_cache_bytes=lambda: grammars.compiler.cached_bytes,
            vetting=grammars.vetting.counters,
            checks=None if self._checker is None else self._checker.counters,
        )

    def _build(self, started: StartedRank) -> tuple[RankEngine, EngineReady]:
        options, groups, device = self._options, started.groups, started.device
        prepared = self._prepared
        checkpoint = open_checkpoint(options.model) if prepared is None else prepared.checkpoint
        config = checkpoint.config
        check_parallel(config, options.tp, options.pp)
        earlier = recall_decisions(started.run_store, self._environment)
        compute = earlier.compute() if earlier else agreed_compute(options, config, device, self._environment.rank)
        invariant = agreed_invariant(options, config, device, self._environment, started.store)
        products: ProductFactory | InvariantProductFactory = ProductFactory(compute.products)
        if invariant is not None:
            products = invariant_products(invariant, device, self._environment.rank, os.environ)
        layers = layer_ranges(config.num_layers, options.pp, options.pp_layers)
        max_model_len = min(options.max_model_len or config.max_position_embeddings, config.max_position_embeddings)
        kept = kept_weights(self._weights_file, checkpoint, compute, device, invariant=options.invariant)
        reader = WeightReader(checkpoint, kept)
        stage = DecoderStage(
            config,
            reader,
            layers[groups.link.stage],
            groups.tensor_parallel,
            dtype=compute.dtype,
            device=device,
            products=products,
        )
        audits = options.audit and groups.link.is_last
        audit_heads = load_audit_heads(stage, reader, groups.tensor_parallel) if audits else None
        if kept is not None:
            kept.complete()
        token_bytes = kv_bytes_per_token(config, layers, options.tp, compute.dtype.itemsize)
        decisions = earlier or self._decide(started, compute, token_bytes, max_model_len)
        kv_cache_tokens = decisions.kv_blocks * KV_BLOCK_TOKENS
        parts = None
        if groups.link.is_first:
            parts = FirstStageParts.load(options, config) if prepared is None else prepared.first_stage
        facts = share_facts(groups, parts)
        sources = named_processors(options.logit_processors) if prepared is None else prepared.processors
        processors = load_named_processors(sources)
        leader, first_stage = None, None
        if parts is not None:
            if self._environment.rank == 0:
                limits = RequestLimits(config.vocab_size, max_model_len, kv_cache_tokens, _DEFAULT_MAX_TOKENS)
                leader = self._leader(parts, limits, processors)
            first_stage = self._first_stage(parts)
        scheduler = Scheduler(_scheduler_limits(options, kv_cache_tokens), facts.eos_token_ids)
        engine = build_engine(
            group=groups.tensor_parallel,
            link=groups.link,
            stage=stage,
            scheduler=scheduler,
            eos_token_ids=facts.eos_token_ids,
            in_flight_steps=options.pp,
            first_stage=first_stage,
            leader=leader,
            processors=processors,
            audit_heads=audit_heads,
            audit_every=options.audit_every,
            tracer=None if self._trace is None else self._trace.tracer,
            record=self._record,
        )
        ready = EngineReady(
            options.tp,
            options.pp,
            decisions.dtype,
            device.type,
            max_model_len,
            compute.why,
            invariant,
            self._environment.epoch_of_run,
        )
        return engine, ready

    def _decide(self, started: StartedRank, compute: ComputeChoice, token_bytes: int, max_model_len: int) -> Decisions:
        """Returns what holds for this and all later epochs; every rank of the first one calls it, weights loaded."""
        options, environment = self._options, self._environment
        # What weights take is known only when every rank of the node has them.
        meet(started.store, "weights", environment, options.start_timeout_s)
        blocks = agreed_kv_blocks(options, token_bytes, max_model_len, started.device, environment.local_world_size)
        decisions = Decisions.of(compute, blocks)
        keep_decisions(started.run_store, environment, decisions)
        return decisions

    def _first_stage(self, parts: FirstStageParts) -> FirstStagePart:
        wake: Callable[[], None] | None = None if self._socket is None else self._socket.wake
        pool = FillPool(threads=min(_MAX_FILL_THREADS, torch.get_num_threads()))
        self._grammars = grammars_of_rank(
            parts.vocabulary,
            parts.backend,
            self._options,
            process=self._grammar_process,
            start=self._grammar_starter,
            on_finished=wake,
            run_folder=self._environment.run_folder,
        )
        return FirstStagePart(parts.vocabulary, self._grammars.agreed, parts.reasoning, pool)

    def _leader(self, parts: FirstStageParts, limits: RequestLimits, processors: ProcessorRegistry) -> Leader:
        options = self._options
        markers = None if parts.reasoning is None else parts.reasoning.markers
        endpoint = self._front_endpoint()
        self._socket = LeaderSocket(endpoint, self._environment.epoch_of_run)
        self._statistics.wake = self._socket.wake
        clock = LeaderLimits(
            beat_s=min(_MAX_BEAT_S, options.group_timeout_s / 3, options.stall_timeout_s / 3),
            grammar_wait_s=_GRAMMAR_WAIT_S,
            grammar_beat_s=min(_GRAMMAR_BEAT_S, options.group_timeout_s / 3, options.stall_timeout_s / 3),
            grammar_wait_limit_s=max(_MIN_STUCK_S, _STUCK_TIMEOUTS * options.grammar_timeout_s),
        )
        if options.post_check:
            self._checker = OutputChecker(partial(start_output_check, os.environ), on_finished=self._socket.wake)
        return Leader(
            self._socket,
            RequestBuilder(parts.tokenizer, limits, processors, markers),
            parts.tokenizer,
            clock,
            self._front_is_alive,
            eos_token_ids=parts.eos_token_ids,
            reasoning=parts.reasoning,
            held=None if self._checker is None else HeldOutputs(self._checker),
            statistics=self._statistics.take,
            note_work=self._record.note_requests,
        )

    def _front_endpoint(self) -> str:
        """Returns where the front side is bound; starts it when torchrun, not the front side, started this rank."""
        if self._environment.run_folder is not None:
            return RunFolder(self._environment.run_folder).endpoint
        folder = RunFolder.create()
        environ = with_import_path(without_rank_variables(os.environ)) | {FRONT_ENDPOINT: folder.endpoint}
        self._front = subprocess.Popen([sys.executable, "-m", "launch", *self._argv], env=environ)
        return folder.endpoint

    def _front_is_alive(self) -> bool:
        return self._front is None or self._front.poll() is None

    def _leave(self) -> int:
        """Closes what is open; returns the front side's exit code where this rank started it."""
        if self._checker is not None:
            self._checker.close()
        if self._socket is not None:
            self._socket.close()
        dist.destroy_process_group()
        if self._front is None:
            return 0
        return self._front.wait(_FRONT_EXIT_S if self._trace is None else _TRACING_FRONT_EXIT_S)


def _scheduler_limits(options: EngineOptions, kv_cache_tokens: int) -> SchedulerLimits:
    return SchedulerLimits(
        max_num_seqs=options.max_num_seqs,
        max_batch_tokens=options.max_batch_tokens,
        kv_cache_tokens=kv_cache_tokens,
        in_flight_steps=options.pp,
        block_tokens=KV_BLOCK_TOKENS,
        prefix_cache=options.prefix_cache,
        speculation=speculation_limits(options.speculate),
    )
