"""``lockstep bench decode``: engine and peer decode in turn, so that whatever else the machine does meets both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from launch.bench.bandwidth import copy_bytes_per_s
from launch.bench.decode_peer import PeerJob, PeerProcess, require_transformers
from launch.bench.decode_report import DecodeCase, DecodeFigures, DecodeReport
from launch.bench.output import publish
from launch.checks import check_engine
from launch.cli.parse import UsageError
from launch.commands import BenchDecodeCommand
from launch.exit_codes import ExitCode
from launch.front.engine_process import EngineProcess, start_or_attach, wait_until_ready
from launch.node.rank_processes import threads_per_rank
from runtime.checkpoint_layout import EMBEDDING, required_tensors
from runtime.messages import EngineReady, Finished, Rejected, Submit, TokenDelta
from runtime.model_config import ModelConfig

_POLL_S = 0.2
Times = list[list[float]]
"""Of each sequence of a run, when its tokens came, in seconds from the start."""


class BenchError(RuntimeError):
    """A run did not do what is to be measured."""


def run_bench_decode(command: BenchDecodeCommand, argv: list[str], front_endpoint: str | None) -> int:
    """Runs the benchmark; returns the exit code.

    Args:
        command: What to measure.
        argv: The command line, run again by each rank.
        front_endpoint: Where the leader that started this process connects; None when this process starts the ranks.

    Raises:
        UsageError: An option is wrong, or the peer cannot run.
        RanksFailedError: A rank failed.
        BenchError: The engine ended a sequence before its time.
    """
    config = check_engine(command.engine)
    _check_sizes(command, config)
    if command.peer == "transformers":
        require_transformers()
    engine = start_or_attach(command.engine, argv, front_endpoint)
    try:
        ready = wait_until_ready(engine, command.engine.start_timeout_s)
        report = _DecodeBench(command, config, engine, ready).run()
    finally:
        engine.stop()
    publish(report, command.json_file)
    return ExitCode.OK


def weight_bytes(config: ModelConfig, itemsize: int) -> int:
    """Returns the bytes of weights that a decode step reads: all but an embedding that is not the LM head too."""
    total = 0
    for name, shape in required_tensors(config).items():
        if name != EMBEDDING or config.tie_word_embeddings:
            total += shape[0] * (shape[1] if len(shape) > 1 else 1)
    return total * itemsize


def schema_of(new_tokens: int) -> dict[str, Any]:
    """Returns a schema whose values take more than so many tokens: an object of short, typed, required fields."""
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 12},
        {"type": "integer", "minimum": 0, "maximum": 9999},
        {"type": "boolean"},
        {"enum": ["red", "green", "blue"]},
    ]
    names = [f"field_{index}" for index in range(new_tokens // 4 + 2)]
    fields = {name: kinds[index % len(kinds)] for index, name in enumerate(names)}
    return {"type": "object", "properties": fields, "required": names, "additionalProperties": False}


class _DecodeBench:
    def __init__(
        self, command: BenchDecodeCommand, config: ModelConfig, engine: EngineProcess, ready: EngineReady
    ) -> None:
        self._command, self._config, self._engine, self._ready = command, config, engine, ready
        self._threads = threads_per_rank(command.engine.threads_per_rank, command.engine.world_size)
        self._requests = 0
        self._source = np.random.default_rng(11)

    def run(self) -> DecodeReport:
        """Returns what was measured."""
        command, threads = self._command, self._threads * self._command.engine.world_size
        peer = None
        if command.peer == "transformers":
            peer = PeerProcess(command.engine.model, self._ready.dtype, threads)
        speeds: list[float] = []
        try:
            cases = []
            for batch in command.batches:
                speeds.append(copy_bytes_per_s(threads))
                cases.append(self._case(peer, batch, command.prompt_tokens, command.new_tokens, command.constrained))
            if command.prefill_tokens:
                cases.append(self._case(peer, 1, command.prefill_tokens, 2, constrained=False))
            speeds.append(copy_bytes_per_s(threads))
        finally:
            if peer is not None:
                peer.close()
        return DecodeReport(
            model=command.engine.model.name,
            tp=command.engine.tp,
            pp=command.engine.pp,
            threads=self._threads,
            dtype=self._ready.dtype,
            device=self._ready.device,
            compute=self._ready.compute,
            peer="" if peer is None else f"transformers {peer.version}",
            repeats=command.repeats,
            weight_bytes=weight_bytes(self._config, 2 if self._ready.dtype == "bfloat16" else 4),
            copy_bytes_per_s=statistics.median(speeds),
            cases=cases,
        )

    def _case(
        self, peer: PeerProcess | None, batch: int, prompt_tokens: int, new_tokens: int, constrained: bool
    ) -> DecodeCase:
        """Runs all contestants in turn, once to warm up and then ``repeats`` times, every other time in reverse."""
        runs: dict[str, list[Times]] = {}
        contestants: dict[str, Callable[[list[list[int]]], Times]] = {
            "ours": lambda prompts: self._ours(prompts, new_tokens, None)
        }
        if constrained:
            contestants["constrained"] = lambda prompts: self._ours(prompts, new_tokens, schema_of(new_tokens))
        if peer is not None:
            # transformers hands over a step's tokens together.
            contestants["peer"] = lambda prompts: [peer.generate(PeerJob(prompts, new_tokens))] * batch
        for repeat in range(self._command.repeats + 1):
            order = list(contestants.items())
            for name, contestant in reversed(order) if repeat % 2 else order:
                times = contestant(self._prompts(batch, prompt_tokens))
                if repeat:
                    runs.setdefault(name, []).append(times)
        figures = {name: DecodeFigures.of(times) for name, times in runs.items()}
        return DecodeCase(
            batch=batch,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            ours=figures["ours"],
            constrained=figures.get("constrained"),
            peer=figures.get("peer"),
        )

    def _prompts(self, batch: int, length: int) -> list[list[int]]:
        """Returns prompts of which no two begin alike."""
        return list(self._source.integers(self._config.vocab_size, size=(batch, length)).tolist())

    def _ours(self, prompts: list[list[int]], new_tokens: int, schema: dict[str, Any] | None) -> Times:
        """Returns when the tokens of requests that are sent together came back."""
        grammar = {} if schema is None else {"json_schema": schema}
        fields = {"max_tokens": new_tokens, "temperature": 0, "ignore_eos": True, **grammar}
        numbers = range(self._requests, self._requests + len(prompts))
        self._requests = numbers.stop
        batch = [
            Submit(number, msgspec.json.encode({"prompt_token_ids": prompt, **fields}).decode())
            for number, prompt in zip(numbers, prompts, strict=True)
        ]
        times: dict[int, list[float]] = {number: [] for number in numbers}
        finished = 0
        started_s = time.perf_counter()
        self._engine.socket.send(batch)
        while finished < len(prompts):
            messages = self._engine.socket.receive(_POLL_S)
            now_s = time.perf_counter() - started_s
            if not messages:
                self._engine.check()
            for message in messages:
                match message:
                    case EngineReady():
                        raise BenchError("ranks were lost and started anew: what was measured means nothing")
                    case TokenDelta():
                        times[message.request_id] += [now_s] * len(message.token_ids)
                    case Rejected():
                        raise BenchError(f"the engine refused a request: {message.error.message}")
                    case Finished():
                        if message.finish_reason != "length":
                            why = message.finish_reason if message.error is None else message.error.message
                            raise BenchError(f"a sequence ended before its {new_tokens} tokens: {why}")
                        finished += 1
        return list(times.values())


def _check_sizes(command: BenchDecodeCommand, config: ModelConfig) -> None:
    engine = command.engine
    longest = max(command.prompt_tokens + command.new_tokens, command.prefill_tokens + 2)
    room = min(engine.max_model_len or config.max_position_embeddings, config.max_position_embeddings)
    if longest > room:
        raise UsageError(f"a prompt and its output have {longest} tokens, the context has {room}")
    if max(command.batches) > engine.max_num_seqs:
        raise UsageError(f"--batches has {max(command.batches)}, --max-num-seqs is {engine.max_num_seqs}")
