"""A rank of ``lockstep sample``: holds its slice of each line's logits, and draws with the others."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from rich.progress import Progress, TaskID

from launch.commands import SampleCommand
from launch.environment import RankEnvironment
from launch.exit_codes import ExitCode
from launch.line_error import LineError
from launch.output_file import open_output
from launch.progress import progress_bar
from launch.rank.start import bring_up
from launch.request_file import InputLine, read_lines
from launch.sample.lines import IdLogprob, SampleRecord, SampleStep, StepLogprobs, parse_step
from runtime.messages import ErrorInfo
from runtime.reports import TokenReport, token_reports
from runtime.row_errors import WHY_NO_TOKEN
from sampler.batch import SamplingBatchInfo
from sampler.sampler import RowReason, SampleOutput, Sampler
from tp.group import TensorParallelGroup
from tp.partition import VocabularyBlocks, VocabularySlice

_DRAWN_AT_ONCE = 1 << 18


class SampleRank:
    """This process as one of the ranks.

    Args:
        command: What to do.
        environment: What torchrun says.
    """

    def __init__(self, command: SampleCommand, environment: RankEnvironment) -> None:
        self.phase = "start"
        self.stage, self.tp_rank = 0, environment.rank
        self._command = command
        self._environment = environment

    def run(self) -> int:
        """Runs this rank from start to end; returns the exit code.

        Rank 0, which writes, alone says that lines failed: a code other than 0 has the other ranks ended at once.
        """
        started = bring_up(self._command.ranks, self._environment)
        self.phase = "run"
        group, device = started.groups.tensor_parallel, started.device
        with torch.inference_mode():
            failed = self._run_first(group, device) if self.tp_rank == 0 else self._run_other(group, device)
        dist.destroy_process_group()
        return ExitCode.REQUESTS_FAILED if failed else ExitCode.OK

    def _run_other(self, group: TensorParallelGroup, device: torch.device) -> int:
        """Takes part in every line; returns 0, as nothing is written here."""
        replay = _Replay(self._command, group, device, None)
        for line in read_lines(str(self._command.input_file)):
            replay.record(line)
        return 0

    def _run_first(self, group: TensorParallelGroup, device: torch.device) -> int:
        """Takes part, writes the records and says what came of them; returns how many have an error record."""
        lines = _count_lines(self._command.input_file)
        failed, started_s = 0, time.monotonic()
        with progress_bar() as progress, open_output(self._command.output_file) as output:
            bar = _Bar(progress, lines, self._command.draws)
            replay = _Replay(self._command, group, device, bar)
            for line in read_lines(str(self._command.input_file)):
                record = replay.record(line)
                failed += record.error is not None
                output.write(msgspec.json.encode(record).decode() + "\n")
                output.flush()
                bar.line_done()
        _print_summary(lines, failed, self._command, time.monotonic() - started_s)
        return failed


class _Bar:
    """Shows how far the run is: in draws where there are any, else in lines."""

    def __init__(self, progress: Progress, lines: int, draws: int) -> None:
        self._progress = progress
        self._task: TaskID = progress.add_task(
            "drawing" if draws else "replaying", total=lines * max(draws, 1), rate=""
        )
        self._draws = draws
        self._lines_done = 0
        self._started_s = time.monotonic()

    def drawn(self, draws: int) -> None:
        """Takes note of so many draws of the line under way."""
        done = self._lines_done * self._draws + draws
        rate = done / max(time.monotonic() - self._started_s, 1e-9)
        self._progress.update(self._task, completed=done, rate=f"{rate:.0f} draws/s")

    def line_done(self) -> None:
        """Takes note of the end of a line."""
        self._lines_done += 1
        self._progress.update(self._task, completed=self._lines_done * max(self._draws, 1))


class _Replay:
    """Replays lines, one after the other, together with the other ranks.

    Args:
        command: What to do with each.
        group: The ranks.
        device: This rank's device.
        bar: Hears of draws; None on ranks that show nothing.
    """

    def __init__(
        self, command: SampleCommand, group: TensorParallelGroup, device: torch.device, bar: _Bar | None
    ) -> None:
        self._command = command
        self._group = group
        self._device = device
        self._bar = bar

    def record(self, line: InputLine) -> SampleRecord:
        """Returns what comes of a line; every rank of the group calls it."""
        if line.fields is None:
            return SampleRecord(id=line.user_id, status="ERROR", error=line.error)
        try:
            step = parse_step(line.fields)
        except LineError as error:
            return SampleRecord(id=line.user_id, status="ERROR", error=error.info)
        except RecursionError:
            error_info = ErrorInfo("invalid_request", "the line is nested too deeply")
            return SampleRecord(id=line.user_id, status="ERROR", error=error_info)
        return msgspec.structs.replace(self._replayed(step), id=line.user_id, ignored=step.ignored)

    def _replayed(self, step: SampleStep) -> SampleRecord:
        blocks = VocabularyBlocks(len(step.logits))
        own = blocks.slice_of(self._group.rank, self._group.size)
        sampler = Sampler(
            self._group,
            vocab_size=len(step.logits),
            slice_start=own.start,
            block_length=own.block_length,
            nan_policy=self._command.nan_policy,
        )
        logits = _slice_of(step.logits, own, self._device)
        mask = None if step.allowed is None else _mask_words(step.allowed, own, self._device)
        batch = SamplingBatchInfo.from_rows([step.row], device=self._device)
        positions = [len(step.row.output_ids)]
        support = sampler.support(logits.clone(), batch, positions, mask)[0]
        output = sampler.sample(logits.clone(), batch, positions, mask)
        if int(output.token_ids[0]) < 0:
            return SampleRecord(id=None, status=support.status.name, error=_why(output))
        counts = torch.zeros(len(step.logits), dtype=torch.int64)
        for first in range(0, self._command.draws, _DRAWN_AT_ONCE):
            stop = min(first + _DRAWN_AT_ONCE, self._command.draws)
            at = torch.arange(first, stop, device=self._device)
            drawn = sampler.draw_many(logits.clone(), batch, positions, at, mask)[0]
            counts += torch.bincount(drawn.cpu(), minlength=len(counts))
            if self._bar is not None:
                self._bar.drawn(stop)
        reports = token_reports(output, [step.row.params])
        seen = counts.nonzero().squeeze(1)
        return SampleRecord(
            id=None,
            status=support.status.name,
            token=int(output.token_ids[0]),
            support=support.ids.tolist(),
            probs=support.probabilities.tolist(),
            counts={str(token_id): count for token_id, count in zip(seen.tolist(), counts[seen].tolist(), strict=True)},
            logprobs=_logprobs(reports[0]) if reports else None,
        )


def _count_lines(path: Path) -> int:
    with path.open("rb") as lines:
        return sum(bool(line.strip()) for line in lines)


def _why(output: SampleOutput) -> ErrorInfo:
    """Returns why the one row of a step has no token."""
    rank = int(output.fault_ranks[0])
    where = f"rank {rank}: " if rank >= 0 else ""
    return ErrorInfo("sampling_error", where + WHY_NO_TOKEN[RowReason(int(output.reasons[0]))])


def _logprobs(report: TokenReport) -> StepLogprobs:
    top, named = ([IdLogprob(*one) for one in pairs] for pairs in (report.top, report.named))
    return StepLogprobs(report.logprob, top, named)


def _slice_of(logits: list[float], own: VocabularySlice, device: torch.device) -> torch.Tensor:
    """Returns [1, Vs] float32, padding −inf."""
    padded = torch.full((1, own.size), -math.inf, device=device)
    padded[0, : own.valid_size] = torch.tensor(logits[own.start : own.valid_stop])
    return padded


def _mask_words(allowed: list[int], own: VocabularySlice, device: torch.device) -> torch.Tensor:
    """Returns [1, Vs / 32] int32 with the bits of ``allowed`` set."""
    words = [0] * (own.size // 32)
    for token_id in allowed:
        if own.start <= token_id < own.stop:
            words[(token_id - own.start) // 32] |= 1 << (token_id % 32)
    signed = [word - (1 << 32) if word >> 31 else word for word in words]
    return torch.tensor([signed], dtype=torch.int32, device=device)


def _print_summary(lines: int, failed: int, command: SampleCommand, elapsed_s: float) -> None:
    plural = "" if lines == 1 else "s"
    parts = [f"{lines} line{plural}", *([f"{failed} failed"] if failed else [])]
    parts += [f"{command.draws} draws each"] if command.draws else []
    print(f"lockstep: {', '.join(parts)} in {elapsed_s:.1f} s on TP{command.ranks.tp}", file=sys.stderr)
