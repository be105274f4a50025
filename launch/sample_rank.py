"""A rank of ``lockstep sample``: holds its slice of each line's logits, and draws with the others."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any, TextIO

import msgspec
import torch
import torch.distributed as dist

from launch.cli import UsageError
from launch.environment import RankEnvironment
from launch.options import SampleCommand
from launch.rank_start import bring_up
from runtime.shown_value import shown
from sampler.batch import SamplingBatchInfo
from sampler.params import RowSampling, SamplingParams, SamplingParamsError
from sampler.sampler import Sampler
from tp.group import TensorParallelGroup
from tp.partition import VocabularyBlocks, VocabularySlice

_NAMES = {
    "frequency": "frequency_penalty",
    "presence": "presence_penalty",
    "repetition": "repetition_penalty",
    "min_new_tokens": "min_tokens",
}
_OWN = ("prompt", "output", "stop_ids", "allowed", "choice")
_NOT_REPLAYED = {
    "bad_words": "give banned_token_ids",
    "logit_processors": "give the logits that they returned",
}
_LARGEST_LOGIT = torch.finfo(torch.float32).max
_DRAWN_AT_ONCE = 1 << 20
_UNLIMITED_TOKENS = 1 << 31


class SampleLineError(ValueError):
    """A line of the input is no sampling step."""


class SampleStep(msgspec.Struct, frozen=True):
    """One line of the input.

    Args:
        line_id: The line's ``id``, echoed.
        logits: The model's output over the whole vocabulary.
        row: Parameters and history.
        allowed: Ids that a grammar would allow; None = all.
    """

    line_id: Any
    logits: list[float]
    row: RowSampling
    allowed: list[int] | None


class SampleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the output.

    Args:
        id: The line's.
        status: ``OK``, ``OVERFLOW`` or ``INVALID``; ``ERROR`` when the line is no sampling step.
        token: What seed, choice and position draw; None when nothing can be drawn.
        support: The ids that may be drawn, ascending.
        probs: Their probabilities.
        counts: How often each id came in ``--draws`` draws at positions 0, 1, …
        error: What is wrong with the line.
    """

    id: Any
    status: str
    token: int | None = None
    support: list[int] = []
    probs: list[float] = []
    counts: dict[str, int] = {}
    error: str | None = None


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
        """Runs this rank from start to end; returns the exit code."""
        started = bring_up(self._command.ranks, self._environment)
        self.phase = "run"
        with torch.inference_mode():
            records = self._records(started.groups.tensor_parallel, started.device)
            if self.tp_rank == 0:
                self._write(records)
            else:
                for _ in records:
                    pass
        dist.destroy_process_group()
        return 0

    def _write(self, records: Iterator[SampleRecord]) -> None:
        path = self._command.output_file
        if path is None:
            _write_lines(sys.stdout, records)
            return
        try:
            with path.open("w", encoding="utf-8") as file:
                _write_lines(file, records)
        except OSError as error:
            raise UsageError(f"--output {path}: {error.strerror}") from error

    def _records(self, group: TensorParallelGroup, device: torch.device) -> Iterator[SampleRecord]:
        with self._command.input_file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield self._record(line, number, group, device)

    def _record(self, line: bytes, number: int, group: TensorParallelGroup, device: torch.device) -> SampleRecord:
        line_id: Any = f"line-{number}"
        try:
            fields = json.loads(line)
            if isinstance(fields, dict):
                line_id = fields.get("id", line_id)
            step = parse_step(fields, line_id)
        except (ValueError, RecursionError) as error:
            return SampleRecord(id=line_id, status="ERROR", error=str(error))
        return self._replay(step, group, device)

    def _replay(self, step: SampleStep, group: TensorParallelGroup, device: torch.device) -> SampleRecord:
        blocks = VocabularyBlocks(len(step.logits))
        own = blocks.slice_of(group.rank, group.size)
        sampler = Sampler(
            group,
            vocab_size=len(step.logits),
            slice_start=own.start,
            block_length=own.block_length,
            nan_policy=self._command.nan_policy,
        )
        logits = _slice_of(step.logits, own, device)
        mask = None if step.allowed is None else _mask_words(step.allowed, own, device)
        batch = SamplingBatchInfo.from_rows([step.row], device=device)
        position = len(step.row.output_ids)
        support = sampler.support(logits.clone(), batch, [position], mask)[0]
        output = sampler.sample(logits.clone(), batch, [position], mask)
        token = int(output.token_ids[0])
        counts: Counter[int] = Counter()
        draws = self._command.draws if token >= 0 else 0
        # As many rows as logits fit; the same number on every rank.
        step_rows = min(draws, max(1, _DRAWN_AT_ONCE // blocks.padded_size))
        rows = SamplingBatchInfo.from_rows([_at_any_position(step.row)] * step_rows, device=device)
        for first in range(0, draws, max(step_rows, 1)):
            positions = range(first, min(first + step_rows, draws))
            if len(positions) < rows.row_count:
                rows.filter(range(len(positions)))
            words = None if mask is None else mask.expand(len(positions), -1)
            drawn = sampler.sample(logits.repeat(len(positions), 1), rows, positions, words)
            counts.update(drawn.token_ids.tolist())
        return SampleRecord(
            id=step.line_id,
            status=support.status.name,
            token=token if token >= 0 else None,
            support=support.ids.tolist(),
            probs=support.probabilities.tolist(),
            counts={str(token_id): count for token_id, count in sorted(counts.items())},
        )


def parse_step(fields: Any, line_id: Any) -> SampleStep:
    """Returns the sampling step that a line describes, with names as in the case files or as in requests.

    Raises:
        SampleLineError: It is none.
    """
    if not isinstance(fields, dict) or not isinstance(fields.get("logits"), list) or not fields["logits"]:
        raise SampleLineError("logits is missing: a list of numbers is needed, or of 'nan', 'inf', '-inf'")
    logits = [_logit(index, value) for index, value in enumerate(fields["logits"])]
    for name in fields:
        if name in _NAMES or name in _OWN or name in SamplingParams.__struct_fields__:
            raise SampleLineError(f"{name} stands beside params: it is needed inside")
    given = fields.get("params", {})
    if not isinstance(given, dict):
        raise SampleLineError(f"params is a {type(given).__name__}: an object is needed")
    given = {_NAMES.get(name, name): value for name, value in given.items()}
    own = {name: given.pop(name) for name in _OWN if name in given}
    try:
        params = SamplingParams.parse(given, vocab_size=len(logits), max_model_len=_UNLIMITED_TOKENS)
    except SamplingParamsError as error:
        raise SampleLineError(str(error)) from error
    for name, instead in _NOT_REPLAYED.items():
        if getattr(params, name):
            raise SampleLineError(f"{name} cannot be replayed from logits alone: {instead}")
    ids = {name: _ids(name, own.get(name), len(logits)) for name in ("prompt", "output", "stop_ids", "allowed")}
    choice = own.get("choice", 0)
    if type(choice) is not int or choice < 0:
        raise SampleLineError(f"choice is {choice!r}: an integer from 0 is needed")
    row = RowSampling(
        params=params,
        seed=params.seed or 0,
        choice=choice,
        stop_ids=tuple(sorted({*(ids["stop_ids"] or ()), *params.stop_token_ids})),
        prompt_ids=ids["prompt"] or (),
        output_ids=ids["output"] or (),
    )
    return SampleStep(line_id, logits, row, ids["allowed"])


def _logit(index: int, value: Any) -> float:
    if type(value) not in (int, float) and value not in ("nan", "inf", "-inf"):
        raise SampleLineError(f"logits[{index}] is {shown(value)}: a number, 'nan', 'inf' or '-inf' is needed")
    if type(value) is not str and _LARGEST_LOGIT < abs(value) < math.inf:
        allowed = f"a number in ±{_LARGEST_LOGIT:.7g} (float32), or 'inf',"
        raise SampleLineError(f"logits[{index}] is {shown(value)}: {allowed} is needed")
    return float(value)


def _ids(name: str, value: Any, vocab_size: int) -> list[int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or any(type(one) is not int or not 0 <= one < vocab_size for one in value):
        raise SampleLineError(f"{name} must be a list of ids in 0..{vocab_size - 1}")
    return value


def _at_any_position(row: RowSampling) -> RowSampling:
    """Returns ``row`` with its stop ids banned or not as they are now, whatever the position of a draw."""
    banned = len(row.output_ids) < row.params.min_tokens
    params = msgspec.structs.replace(row.params, min_tokens=_UNLIMITED_TOKENS if banned else 0)
    return msgspec.structs.replace(row, params=params)


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


def _write_lines(file: TextIO, records: Iterator[SampleRecord]) -> None:
    for record in records:
        file.write(msgspec.json.encode(record).decode() + "\n")
    file.flush()
