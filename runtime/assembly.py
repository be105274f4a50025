"""Puts a rank's engine together from its parts; what a rank is given decides its role."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from grammar_sync.agreed_compiler import AgreedCompiler
from grammar_sync.fill_pool import FillPool
from grammar_sync.manager import GrammarManager
from grammar_sync.masks import MaskExchange
from grammar_sync.reasoning import ReasoningVocabulary
from grammar_sync.vocabulary import GrammarVocabulary
from pp.link import StageLink
from runtime.audit import Auditor
from runtime.consensus import Consensus
from runtime.engine import EngineParts, OutputSink, RankEngine, SilentSink
from runtime.grammar_role import FirstStageGrammars, GrammarRole, LaterStageGrammars
from runtime.intake import ActionSource, Intake
from runtime.leader_needs import GrammarWatch
from runtime.model import DecoderStage
from runtime.model_config import ModelConfig
from runtime.rank_status import RankStatus, StepRecord
from runtime.reports import ReportExchange
from runtime.sampling import SamplingPart
from runtime.scheduler import Scheduler
from runtime.self_check import SelfCheck
from runtime.token_share import TokenShare
from runtime.tokenizer import Tokenizer
from runtime.tracer import Tracer, trace_engine
from runtime.weights import WeightReader
from sampler.processors import ProcessorRegistry
from sampler.sampler import Sampler
from tp.embedding import ParallelLMHead
from tp.group import TensorParallelGroup
from tp.partition import VocabularyBlocks


class VocabularyMismatchError(ValueError):
    """The tokenizer has ids that the model does not know."""


class LeaderPart(ActionSource, OutputSink, Protocol):
    """What makes a rank the leader: where actions come from and who hears of tokens."""

    def watch_grammars(self, grammars: GrammarWatch) -> None:
        """Takes what tells of the sequences' grammars."""


@dataclass(frozen=True)
class FirstStagePart:
    """What a first-stage rank has that others lack.

    Args:
        vocabulary: What grammars are compiled for.
        compiler: Has them vetted and compiled.
        reasoning: How the model thinks; None when it does not.
        pool: Runs the mask fills; one with the defaults when left out.
    """

    vocabulary: GrammarVocabulary
    compiler: AgreedCompiler
    reasoning: ReasoningVocabulary | None = None
    pool: FillPool | None = None


def grammar_vocabulary(tokenizer: Tokenizer, config: ModelConfig, eos_token_ids: tuple[int, ...]) -> GrammarVocabulary:
    """Returns the tokenizer's vocabulary as the grammar compiler needs it.

    Raises:
        VocabularyMismatchError: The tokenizer has more ids than the model's LM head.
    """
    if tokenizer.size > config.vocab_size:
        raise VocabularyMismatchError(
            f"the tokenizer has {tokenizer.size} ids, the model's LM head only {config.vocab_size}: "
            "they do not belong together"
        )
    return GrammarVocabulary(
        tokens=tokenizer.token_strings,
        vocab_type=tokenizer.vocabulary_type,
        vocab_size=config.vocab_size,
        stop_token_ids=eos_token_ids,
        special_token_ids=tokenizer.special_token_ids,
        add_prefix_space=tokenizer.add_prefix_space,
    )


def load_audit_heads(stage: DecoderStage, reader: WeightReader, group: TensorParallelGroup) -> list[ParallelLMHead]:
    """Returns the LM heads of all slices of a last-stage rank's vocabulary."""
    blocks = VocabularyBlocks(stage.config.vocab_size)
    pieces = [blocks.slice_of(rank, group.size) for rank in range(group.size)]
    return [stage.load_head(reader, piece) for piece in pieces]


def build_engine(
    *,
    group: TensorParallelGroup,
    link: StageLink,
    stage: DecoderStage,
    scheduler: Scheduler,
    eos_token_ids: tuple[int, ...],
    in_flight_steps: int,
    first_stage: FirstStagePart | None = None,
    leader: LeaderPart | None = None,
    processors: ProcessorRegistry | None = None,
    audit_heads: list[ParallelLMHead] | None = None,
    audit_every: int = 0,
    tracer: Tracer | None = None,
    record: StepRecord | None = None,
) -> RankEngine:
    """Returns this rank's engine.

    Args:
        group: The rank's stage.
        link: The rank's pipeline.
        stage: Its layers, loaded.
        scheduler: An empty replicated scheduler.
        eos_token_ids: What ends an output: the union of all sources, the same on every rank.
        in_flight_steps: How many steps may be under way at once.
        first_stage: Given to first-stage ranks.
        leader: Given to global rank 0.
        processors: The logit processors that requests may name.
        audit_heads: The LM heads of all slices, given to the ranks of the last stage when they audit each other.
        audit_every: In every how many steps ranks check themselves; 0 = never.
        tracer: Writes what this rank does; None when nobody wants to know.
        record: Tells others where this rank is; None when nobody wants to know.
    """
    blocks = VocabularyBlocks(stage.config.vocab_size)
    masks = MaskExchange(link, blocks.slice_of(group.rank, group.size).words)
    sampler = _sampler(stage, group, processors) if link.is_last else None
    sampling = None
    if sampler is not None:
        sampling = SamplingPart(
            sampler,
            masks,
            eos_token_ids=frozenset(eos_token_ids),
            in_flight_steps=in_flight_steps,
            device=stage.device,
            auditor=None if audit_heads is None else Auditor(stage.config, audit_heads, group, processors),
        )
    status = RankStatus(group, link, sampler, record)
    self_check = SelfCheck(stage, group, audit_every, status.note_audit) if audit_every else None
    parts = EngineParts(
        group=group,
        link=link,
        intake=Intake(group, link, leader),
        scheduler=scheduler,
        grammars=_grammar_role(first_stage, leader, masks=masks, status=status),
        stage=stage,
        cache=stage.new_cache(scheduler.blocks.pool.num_blocks, scheduler.blocks.block_tokens),
        tokens=TokenShare(group, link),
        reports=ReportExchange(group, link),
        sampling=sampling,
        sink=SilentSink() if leader is None else leader,
        status=status,
        consensus=Consensus(group, link, self_check),
    )
    if record is not None and first_stage is not None and first_stage.pool is not None:
        first_stage.pool.beat = record.beat
    engine = RankEngine(parts, in_flight_steps)
    if tracer is not None:
        trace_engine(tracer, engine, parts, None if first_stage is None else first_stage.pool)
    return engine


def _grammar_role(
    first_stage: FirstStagePart | None, leader: LeaderPart | None, *, masks: MaskExchange, status: RankStatus
) -> GrammarRole:
    if first_stage is None:
        return LaterStageGrammars(status.link)
    manager = GrammarManager(first_stage.vocabulary, first_stage.compiler, first_stage.reasoning, first_stage.pool)
    if leader is not None:
        leader.watch_grammars(manager)
    return FirstStageGrammars(manager, masks, status)


def _sampler(stage: DecoderStage, group: TensorParallelGroup, processors: ProcessorRegistry | None) -> Sampler:
    return Sampler(
        group,
        vocab_size=stage.config.vocab_size,
        slice_start=stage.vocabulary.start,
        block_length=stage.vocabulary.block_length,
        processors=processors,
    )
