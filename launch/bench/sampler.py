"""A rank of ``lockstep bench sampler``: times this sampler, plain torch samplers and one pass over the logits."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from launch.bench import sampler_peer
from launch.bench.cases import BenchCase, chosen
from launch.bench.logits import flat_logits, recorded_logits
from launch.bench.output import publish
from launch.bench.sampler_report import BenchReport, CaseReport, Timing, Traffic, added
from launch.commands import BenchSamplerCommand
from launch.environment import RankEnvironment
from launch.rank.start import bring_up
from sampler.batch import SamplingBatchInfo
from sampler.params import RowSampling, SamplingParams
from sampler.sampler import Sampler
from tp.group import TensorParallelGroup
from tp.partition import VocabularyBlocks

_PEERS = {
    "argmax": sampler_peer.sample_argmax,
    "multinomial": sampler_peer.sample_multinomial,
    "full_sort": sampler_peer.sample_full_sort,
    "top_k": sampler_peer.sample_top_k,
}
_FLOOR, _BASE, _OURS = "floor", "base", "ours"


class BenchSamplerRank:
    """This process as one of the ranks.

    Args:
        command: What to do.
        environment: What torchrun says.
    """

    def __init__(self, command: BenchSamplerCommand, environment: RankEnvironment) -> None:
        self.phase = "start"
        self.stage, self.tp_rank = 0, environment.rank
        self._command = command
        self._environment = environment

    def run(self) -> int:
        """Runs this rank from start to end; returns the exit code."""
        started = bring_up(self._command.ranks, self._environment)
        self.phase = "run"
        with torch.inference_mode():
            report = SamplerBench(self._command, started.groups.tensor_parallel, started.device).run()
        if self.tp_rank == 0:
            publish(report, self._command.json_file)
        dist.destroy_process_group()
        return 0


@dataclass
class _Traffic:
    """Notes what this rank hands to collectives."""

    payloads: list[tuple[str, int]] = field(default_factory=list)

    def __call__(self, operation: str, _group: str, payload_bytes: int, /) -> None:
        self.payloads.append((operation, payload_bytes))


class SamplerBench:
    """All cases over one group; every rank runs the same.

    Args:
        command: What to measure.
        group: The ranks that hold the vocabulary slices.
        device: This rank's device.
    """

    def __init__(self, command: BenchSamplerCommand, group: TensorParallelGroup, device: torch.device) -> None:
        self._command, self._group, self._device = command, group, device
        self._own = VocabularyBlocks(command.vocab).slice_of(group.rank, group.size)
        self._sampler = Sampler(
            group, vocab_size=command.vocab, slice_start=self._own.start, block_length=self._own.block_length
        )
        self._logits: dict[str, tuple[torch.Tensor, str]] = {}

    def run(self) -> BenchReport:
        """Returns what was measured."""
        cases = [self._measure(case) for case in chosen(self._command.cases)]
        nuclei = {shape: _nucleus_sizes(logits) for shape, (logits, _) in self._logits.items()}
        return BenchReport(
            batch=self._command.batch,
            vocab=self._command.vocab,
            tp=self._group.size,
            threads=torch.get_num_threads(),
            repeats=self._command.repeats,
            device=str(self._device),
            torch=str(torch.__version__),
            cpu=torch.backends.cpu.get_cpu_capability(),
            logits={shape: source for shape, (_, source) in self._logits.items()},
            nucleus_ids=nuclei,
            cases=cases,
        )

    def _measure(self, case: BenchCase) -> CaseReport:
        whole = self._whole_logits(case.logits)
        padded = torch.nn.functional.pad(
            whole[:, self._own.start : self._own.stop], (0, self._own.size - self._own.valid_size), value=-torch.inf
        )
        buffer = torch.empty_like(padded)
        positions = list(range(self._command.batch))
        mask = self._mask() if case.masked else None
        own_mask = None if mask is None else mask[:, self._own.words].contiguous()

        def ours(params: dict[str, object], odd_row: dict[str, object] | None) -> Callable[[], object]:
            batch = self._rows(params, odd_row, case.seen_ids)
            return lambda: self._sampler.sample(buffer, batch, positions, own_mask)

        contestants = {_FLOOR: lambda: buffer.amax(dim=1), _OURS: ours(case.params, case.odd_row)}
        if case.base is not None:
            contestants[_BASE] = ours(case.base, None)
        rows = self._peer_rows(case, mask)
        for peer in case.peers:
            contestants[peer] = self._peer(peer, buffer, rows)
        times: dict[str, list[float]] = {name: [] for name in contestants}
        for repeat in range(self._command.repeats + 1):
            # Every other round in reverse: what else the machine does, and what a contestant leaves behind, meets all.
            for name in list(contestants)[:: 1 if repeat % 2 else -1]:
                buffer.copy_(padded)
                elapsed_s = self._time(contestants[name])
                if repeat:  # The first is a warm-up.
                    times[name].append(elapsed_s)
        timings = {name: Timing.of(elapsed) for name, elapsed in times.items()}
        return CaseReport(
            name=case.name,
            logits=case.logits,
            ours=timings[_OURS],
            floor=timings[_FLOOR],
            base=timings.get(_BASE),
            adds=added(times[_OURS], times[_BASE]) if _BASE in times else None,
            peers={peer: timings[peer] for peer in case.peers},
            traffic=self._traffic(contestants[_OURS], buffer, padded),
        )

    def _time(self, contestant: Callable[[], object]) -> float:
        """Returns the seconds until the slowest rank is done; all start together."""
        self._group.all_reduce_sum_(torch.zeros(1, device=self._device))
        self._synchronize()
        start = time.perf_counter()
        contestant()
        self._synchronize()
        elapsed = torch.tensor([time.perf_counter() - start], dtype=torch.float64, device=self._device)
        return float(self._group.all_reduce_max_(elapsed))

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _peer(self, name: str, buffer: torch.Tensor, rows: sampler_peer.PeerRows) -> Callable[[], object]:
        """Returns the peer: all ranks gather the logits in float32, then rank 0 samples, which the others wait for."""
        sample, vocab, size = _PEERS[name], self._command.vocab, self._group.size
        widest = VocabularyBlocks(vocab).slice_of(0, size).size
        pieces = [VocabularyBlocks(vocab).slice_of(rank, size) for rank in range(size)]

        def run() -> object:
            if size == 1:
                return sample(buffer[:, :vocab], rows)
            gathered = self._group.all_gather(torch.nn.functional.pad(buffer, (0, widest - buffer.shape[1])))
            if self._group.rank:
                return None
            whole = [gathered[rank][:, : piece.valid_size] for rank, piece in enumerate(pieces)]
            return sample(torch.cat(whole, dim=1), rows)

        return run

    def _traffic(self, ours: Callable[[], object], buffer: torch.Tensor, padded: torch.Tensor) -> Traffic | None:
        """Returns what one step hands to collectives; None for one rank, which makes none."""
        if self._group.size == 1:
            return None
        observer = _Traffic()
        before, self._group.observer = self._group.observer, observer
        buffer.copy_(padded)
        ours()
        self._group.observer = before
        return Traffic.of(observer.payloads, self._group.size, self._command.batch * self._command.vocab * 4)

    def _whole_logits(self, shape: str) -> torch.Tensor:
        """Returns the logits of the whole vocabulary: [B, V] float32; rank 0 makes them, once."""
        if shape not in self._logits:
            batch, vocab = self._command.batch, self._command.vocab
            logits, source = torch.empty(batch, vocab), ""
            if self._group.rank == 0:
                logits, source = recorded_logits(batch, vocab) if shape == "lm" else flat_logits(batch, vocab)
            self._group.broadcast_(logits)
            self._logits[shape] = (logits.to(self._device), source)
        return self._logits[shape][0]

    def _rows(self, params: dict[str, object], odd_row: dict[str, object] | None, seen_ids: int) -> SamplingBatchInfo:
        rows = []
        for index, seen in enumerate(self._histories(seen_ids)):
            fields = odd_row if odd_row is not None and index == self._command.batch // 2 else params
            parsed = SamplingParams.parse(fields, vocab_size=self._command.vocab, max_model_len=1 << 20)
            generated = seen[len(seen) // 2 :]
            rows.append(RowSampling(params=parsed, seed=index, prompt_ids=seen[: len(seen) // 2], output_ids=generated))
        return SamplingBatchInfo.from_rows(rows, device=self._device)

    def _histories(self, seen_ids: int) -> list[list[int]]:
        source, count = random.Random(3), min(seen_ids, self._command.vocab)  # noqa: S311
        return [source.sample(range(self._command.vocab), count) for _ in range(self._command.batch)]

    def _mask(self) -> torch.Tensor:
        """Returns a mask that allows half of the ids of each row, scattered: [B, W] int32."""
        words = VocabularyBlocks(self._command.vocab).mask_words
        generator = torch.Generator().manual_seed(4)
        shape = (self._command.batch, words)
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, generator=generator).to(self._device)

    def _peer_rows(self, case: BenchCase, mask: torch.Tensor | None) -> sampler_peer.PeerRows:
        batch, vocab, device = self._command.batch, self._command.vocab, self._device
        fields = [case.params] * batch
        if case.odd_row is not None:
            fields = [case.odd_row if index == batch // 2 else case.params for index in range(batch)]

        def column(name: str, off: float) -> torch.Tensor:
            return torch.tensor([[float(row.get(name, off))] for row in fields], device=device)

        seen = counts = allowed = None
        if case.seen_ids:
            seen, counts = torch.zeros(batch, vocab, dtype=torch.bool), torch.zeros(batch, vocab)
            for index, ids in enumerate(self._histories(case.seen_ids)):
                seen[index, ids] = True
                counts[index, ids[len(ids) // 2 :]] = 1.0
            seen, counts = seen.to(device), counts.to(device)
        if mask is not None:
            bits = mask.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=device)
            allowed = (bits & 1).to(torch.bool).view(batch, -1)[:, :vocab].contiguous()
        generators = [torch.Generator(device).manual_seed(index) for index in range(batch)] if case.seeded else []
        return sampler_peer.PeerRows(
            temperature=column("temperature", 1.0),
            top_k=column("top_k", vocab).to(torch.int64),
            top_p=column("top_p", 1.0),
            min_p=column("min_p", 0.0),
            frequency=column("frequency_penalty", 0.0),
            presence=column("presence_penalty", 0.0),
            repetition=column("repetition_penalty", 1.0),
            counts=counts,
            seen=seen,
            allowed=allowed,
            generators=tuple(generators),
            top_logprobs=int(case.params.get("logprobs", 0)),
        )


def _nucleus_sizes(logits: torch.Tensor) -> list[int]:
    """Returns the 10th, 50th and 90th percentile of how many ids hold nine tenths of a row's mass."""
    ordered = logits.softmax(dim=-1).sort(dim=-1, descending=True).values
    sizes = sorted(((ordered.cumsum(dim=-1) < 0.9).sum(dim=-1) + 1).tolist())
    return [int(statistics.quantiles([*sizes, *sizes], n=10, method="inclusive")[place]) for place in (0, 4, 8)]
