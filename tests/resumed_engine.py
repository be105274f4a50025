"""Runs requests on real ranks, with the real leader, in epochs: each is cut off and the next one resumes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from compiled_kernels import invariant_factory
from grammars import InlineVetter

from grammar_sync.agreed_compiler import AgreedCompiler
from grammar_sync.compiler import ThreadedGrammarCompiler
from grammar_sync.engines.factory import make_backend
from launch.front.engine_output import RequestOutput
from launch.front.open_requests import OpenRequests
from launch.rank.groups import build_groups, warm_up
from pp.partition import layer_ranges
from runtime.assembly import FirstStagePart, build_engine, grammar_vocabulary
from runtime.checkpoint import open_checkpoint
from runtime.engine_statistics import EngineStatistics
from runtime.leader import Leader
from runtime.leader_needs import LeaderLimits
from runtime.messages import Accepted, ClientMessage, EngineMessage, EngineReady, Finished, Shutdown, Submit, TokenDelta
from runtime.model import DecoderStage
from runtime.request_builder import RequestBuilder
from runtime.request_limits import RequestLimits
from runtime.scheduler import Scheduler
from runtime.step_planner import SchedulerLimits
from runtime.thinking import reasoning_of
from runtime.tokenizer import Tokenizer
from runtime.weights import WeightReader

_NEVER = 1 << 60
_LIMITS = LeaderLimits(beat_s=1.0, grammar_wait_s=0.005, grammar_beat_s=0.005, grammar_wait_limit_s=60.0)
_KV_TOKENS = 1 << 13


@dataclass(frozen=True)
class EpochCase:
    """What is run: requests as bodies, those of ``scores`` only scored.

    Of every epoch the client hears ``heard`` messages that add something to an output, and nothing after; of the last
    one all. Runs of several values of ``heard`` follow each other on the same ranks.
    """

    model: Path
    bodies: Sequence[Mapping[str, Any]]
    heard: Sequence[int | None]
    tp: int = 1
    pp: int = 1
    scores: frozenset[int] = frozenset()
    markers: tuple[str, str] | None = None
    max_batch_tokens: int = 2048


@dataclass(frozen=True)
class EpochRun:
    """What the client had in the end, and how many epochs it took."""

    outputs: tuple[RequestOutput, ...]
    epochs: int
    seeds: tuple[int, ...]


@dataclass
class Client:
    """The front side: what it took, and what it hears of an epoch."""

    outputs: dict[int, RequestOutput]
    requests: OpenRequests = field(default_factory=OpenRequests)
    seeds: dict[int, int] = field(default_factory=dict)

    def take(self, message: EngineMessage) -> None:
        assert not isinstance(message, EngineReady | EngineStatistics)
        for news in self.requests.take(message):
            assert not isinstance(news, Finished) or news.error is None, news.error
            self.outputs[news.request_id].take(news)
            if isinstance(news, Accepted):
                self.seeds[news.request_id] = news.settled.seed


class CutSocket:
    """The leader's socket within one epoch: after ``heard`` messages the client is deaf, and the ranks are stopped."""

    def __init__(self, client: Client, heard: int) -> None:
        self._client = client
        self._left = heard
        self._inbox: list[ClientMessage] = list(client.requests.resubmission().messages)

    @property
    def is_cut(self) -> bool:
        return self._left <= 0

    def send(self, messages: list[EngineMessage]) -> None:
        for message in messages:
            if self.is_cut:
                return
            self._client.take(message)
            self._left -= isinstance(message, TokenDelta | Finished)

    def receive(self, _timeout_s: float, /) -> list[ClientMessage]:
        if self.is_cut or not len(self._client.requests):
            return [Shutdown()]
        inbox, self._inbox = self._inbox, []
        return inbox

    def wake(self) -> None:
        """Does nothing: nobody waits."""


def run_epochs(rank: int, world_size: int, case: EpochCase) -> list[EpochRun]:
    """Runs ``case`` on this rank; returns its runs on rank 0; for ``ranks.run_ranks``."""
    assert world_size == case.tp * case.pp
    device = torch.device("cpu")
    groups = build_groups(case.tp, case.pp, timeout_s=60, device=device)
    warm_up(groups, device)
    checkpoint = open_checkpoint(case.model)
    config = checkpoint.config
    stage = DecoderStage(
        config,
        WeightReader(checkpoint),
        layer_ranges(config.num_layers, case.pp)[groups.link.stage],
        groups.tensor_parallel,
        dtype=torch.float32,
        device=device,
        products=invariant_factory(device),
    )
    eos = config.eos_token_ids
    tokenizer = Tokenizer.load(case.model)
    vocabulary = grammar_vocabulary(tokenizer, config, eos)
    reasoning = reasoning_of(tokenizer, vocabulary, case.markers)
    backend = make_backend(vocabulary, "auto")
    compiler = ThreadedGrammarCompiler(backend)
    builder = RequestBuilder(
        tokenizer,
        RequestLimits(config.vocab_size, config.max_position_embeddings, _KV_TOKENS, 256),
        markers=None if reasoning is None else reasoning.markers,
    )
    runs = []
    for heard in case.heard:
        client = Client({number: RequestOutput() for number in range(len(case.bodies))})
        client.requests.add(
            [Submit(number, json.dumps(body), number in case.scores) for number, body in enumerate(case.bodies)]
        )
        epochs = 0
        going_on = True
        while going_on:
            epochs += 1
            socket = CutSocket(client, _NEVER if heard is None else heard)
            leader = None
            if rank == 0:
                leader = Leader(
                    socket, builder, tokenizer, _LIMITS, lambda: True, eos_token_ids=eos, reasoning=reasoning
                )
            first_stage = None
            if groups.link.is_first:
                agreed = AgreedCompiler(compiler, InlineVetter(backend) if rank == 0 else None)
                first_stage = FirstStagePart(vocabulary, agreed, reasoning)
            limits = SchedulerLimits(64, case.max_batch_tokens, _KV_TOKENS, case.pp, block_tokens=16)
            build_engine(
                group=groups.tensor_parallel,
                link=groups.link,
                stage=stage,
                scheduler=Scheduler(limits, eos),
                eos_token_ids=eos,
                in_flight_steps=case.pp,
                first_stage=first_stage,
                leader=leader,
            ).run()
            left = [len(client.requests)]
            dist.broadcast_object_list(left, src=0)
            going_on = left[0] > 0
        runs.append(
            EpochRun(
                tuple(client.outputs[number] for number in range(len(case.bodies))),
                epochs,
                tuple(client.seeds.get(number, -1) for number in range(len(case.bodies))),
            )
        )
    compiler.close()
    return runs
