"""A rank of ``lockstep bench invariant``: steps of the default mode and of invariant mode, in turn."""

from __future__ import annotations

import os
import statistics
import time

import msgspec
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from launch.bench.output import publish
from launch.commands import BenchInvariantCommand
from launch.environment import RankEnvironment
from launch.rank.compute_choice import agreed_compute
from launch.rank.invariant_start import agreed_invariant, invariant_products
from launch.rank.start import StartedRank, bring_up
from runtime.batch import Chunk, pack
from runtime.checkpoint import open_checkpoint
from runtime.kv_blocks import BlockPool, BlockTable
from runtime.kv_budget import KV_BLOCK_TOKENS
from runtime.model import DecoderStage
from runtime.weights import WeightReader
from tp.invariant_products import InvariantProductFactory
from tp.products import ProductFactory


class InvariantCase(msgspec.Struct, frozen=True, kw_only=True):
    """One case.

    Args:
        what: ``decode`` or ``prefill``.
        rows: Tokens of a step.
        context: Tokens of each sequence before it.
        default_ms: Median of the default mode's steps.
        invariant_ms: Median of invariant mode's.
        ratio: Of the two.
    """

    what: str
    rows: int
    context: int
    default_ms: float
    invariant_ms: float
    ratio: float


class InvariantReport(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run.

    Args:
        bench: The benchmark's name.
        model: Folder or file.
        tp: Ranks.
        threads: Torch threads of a rank.
        dtype: Of hidden states and KV cache.
        repeats: Steps of each mode, in turn.
        compute: How the default mode's products are computed.
        cases: The cases.
    """

    bench: str
    model: str
    tp: int
    threads: int
    dtype: str
    repeats: int
    compute: str
    cases: list[InvariantCase]

    def document(self) -> bytes:
        """Returns one JSON document with every figure that the table shows."""
        return msgspec.json.format(msgspec.json.encode(self))

    def print(self, console: Console) -> None:
        """Prints the table."""
        title = (
            f"invariant mode: {self.model}, {self.dtype}, tp {self.tp} ({self.threads} threads a rank), medians of "
            f"{self.repeats} steps in turn"
        )
        table = Table(title=title)
        for name in ("step", "rows", "context", "default ms", "invariant ms", "ratio"):
            table.add_column(name, justify="left" if name == "step" else "right")
        for case in self.cases:
            figures = (f"{case.default_ms:.1f}", f"{case.invariant_ms:.1f}", f"{case.ratio:.2f}")
            table.add_row(case.what, str(case.rows), str(case.context), *figures)
        console.print(table)
        console.print(f"default: {self.compute or 'plain products'}", soft_wrap=True)


class BenchInvariantRank:
    """This process as one of the ranks.

    Args:
        command: What to do.
        environment: What torchrun says.
    """

    def __init__(self, command: BenchInvariantCommand, environment: RankEnvironment) -> None:
        self.phase = "start"
        self.stage, self.tp_rank = 0, environment.rank
        self._command = command
        self._environment = environment

    def run(self) -> int:
        """Runs this rank from start to end; returns the exit code."""
        started = bring_up(self._command.engine, self._environment)
        stages, report = self._stages(started)
        self.phase = "run"
        with torch.inference_mode():
            report = msgspec.structs.replace(report, cases=InvariantBench(self._command, stages).run())
        if self.tp_rank == 0:
            publish(report, self._command.json_file)
        dist.destroy_process_group()
        return 0

    def _stages(self, started: StartedRank) -> tuple[list[DecoderStage], InvariantReport]:
        """Returns the whole model in the default mode and in invariant mode, and a report without cases."""
        options, device = self._command.engine, started.device
        checkpoint = open_checkpoint(options.model)
        config, reader = checkpoint.config, WeightReader(checkpoint)
        default = msgspec.structs.replace(options, invariant=False)
        compute = agreed_compute(default, config, device, self._environment.rank)
        facts = agreed_invariant(options, config, device, self._environment, started.store)
        products: list[ProductFactory | InvariantProductFactory] = [ProductFactory(compute.products)]
        if facts is not None:
            products.append(invariant_products(facts, device, self._environment.rank, os.environ))
        stages = [
            DecoderStage(
                config,
                reader,
                range(config.num_layers),
                started.groups.tensor_parallel,
                dtype=compute.dtype,
                device=device,
                products=factory,
            )
            for factory in products
        ]
        report = InvariantReport(
            bench="invariant",
            model=options.model.name,
            tp=options.tp,
            threads=torch.get_num_threads(),
            dtype=str(compute.dtype).removeprefix("torch."),
            repeats=self._command.repeats,
            compute=compute.why,
            cases=[],
        )
        return stages, report


class InvariantBench:
    """All cases; every rank runs the same.

    Args:
        command: What to measure.
        stages: The whole model in the default mode, and in invariant mode.
    """

    def __init__(self, command: BenchInvariantCommand, stages: list[DecoderStage]) -> None:
        self._command = command
        self._stages = stages
        most = max(command.batches) * (command.context + 1) + command.prefill_tokens
        blocks = most // KV_BLOCK_TOKENS + max(command.batches) + 1
        self._blocks = blocks
        self._caches = [stage.new_cache(blocks, KV_BLOCK_TOKENS) for stage in stages]
        self._source = torch.Generator().manual_seed(11)

    def run(self) -> list[InvariantCase]:
        """Returns what was measured."""
        cases = [self._case("decode", batch, 1, self._command.context) for batch in self._command.batches]
        if self._command.prefill_tokens:
            cases.append(self._case("prefill", 1, self._command.prefill_tokens, 0))
        return cases

    def _case(self, what: str, batch: int, length: int, context: int) -> InvariantCase:
        pool = BlockPool(self._blocks)
        tables = [BlockTable(index) for index in range(batch)]
        for table in tables:
            pool.take(table, -(-(context + length) // KV_BLOCK_TOKENS), 0)
        if context:
            for table in tables:
                for mode in range(2):
                    self._step(mode, [table], context, 0)
        times: list[list[float]] = [[], []]
        for repeat in range(self._command.repeats + 1):
            for mode in (0, 1) if repeat % 2 else (1, 0):
                took_s = self._step(mode, tables, length, context)
                if repeat:
                    times[mode].append(1000 * took_s)
        default_ms, invariant_ms = map(statistics.median, times)
        return InvariantCase(
            what=what,
            rows=batch * length,
            context=context,
            default_ms=default_ms,
            invariant_ms=invariant_ms,
            ratio=invariant_ms / default_ms,
        )

    def _step(self, mode: int, tables: list[BlockTable], length: int, context: int) -> float:
        """Returns how many seconds a step took, from token ids to logits."""
        stage, vocabulary = self._stages[mode], self._stages[mode].config.vocab_size
        token_ids = torch.randint(vocabulary, (len(tables), length), generator=self._source)
        chunks = [
            Chunk(index, ids, context, 1, table)
            for index, (ids, table) in enumerate(zip(token_ids.tolist(), tables, strict=True))
        ]
        started_s = time.perf_counter()
        hidden = stage.forward(pack(chunks, KV_BLOCK_TOKENS, stage.device), None, self._caches[mode])
        logits = stage.logits(hidden)
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)
        return time.perf_counter() - started_s
