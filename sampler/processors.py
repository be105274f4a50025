"""Custom logit processors: registered by name at launch, called with per-request arguments, on vocabulary slices.

A request names processors; it never brings code. Rows of one processor are applied together. What a processor does to
its rows is its own affair; that it ends no other row, and that ranks never differ over its failure, is seen to here.
"""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol, runtime_checkable

import torch

from sampler.batch import SamplingBatchInfo
from sampler.group import SliceGroup
from sampler.logprobs import RowsToRead, SliceLogprobs
from sampler.params import ProcessorCall, SamplingParamsError
from sampler.processor_faults import ProcessorFault, told
from sampler.processor_names import ProcessorLoadError, named_processors
from sampler.slices import SliceShape

_LOG = logging.getLogger(__name__)


class ProcessorDisagreementError(RuntimeError):
    """The ranks asked a processor's rows for different values: these rows end."""


class ProcessorRows(Protocol):
    """The rows of one processor in one step, on one rank."""

    @property
    def logits(self) -> torch.Tensor:
        """[R, Vs] float32, this rank's slice of the rows, padding −inf: to be changed in place."""

    @property
    def slice_start(self) -> int:
        """The id of the first column."""

    @property
    def vocab_size(self) -> int:
        """How many ids there are; columns from there on are padding."""

    @property
    def args(self) -> Sequence[Mapping[str, Any]]:
        """Each row's arguments."""

    @property
    def prompt_ids(self) -> Sequence[Sequence[int]]:
        """Each row's prompt."""

    @property
    def output_ids(self) -> Sequence[Sequence[int]]:
        """What each row has generated so far."""

    def max(self) -> torch.Tensor:
        """Returns each row's largest logit over the whole vocabulary: [R] float32. Every rank must ask alike."""

    def logsumexp(self) -> torch.Tensor:
        """Returns log Σ exp(z) of each row over the whole vocabulary: [R] float64. Every rank must ask alike."""


@runtime_checkable
class LogitProcessor(Protocol):
    """What a registered processor is.

    Attributes:
        needs_row_values: Whether ``process`` asks for values over the whole vocabulary. Where it does, the ranks agree
            on its progress, at the price of a small reduction a step; where it does not, nothing is exchanged.
    """

    needs_row_values: bool

    def check(self, args: Mapping[str, Any]) -> None:
        """Does nothing if ``args`` are what the processor takes; called once a request, before any rank sees it.

        Raises:
            ValueError: They are not; the message names the argument, its value and what is allowed.
        """

    def process(self, rows: ProcessorRows) -> None:
        """Changes the logits of the rows in place. Every rank calls it with its own slice of the same rows.

        A row's result must depend on that row alone.
        """


class ProcessorRegistry:
    """The processors a request may name.

    Args:
        processors: The processors by name.
    """

    def __init__(self, processors: Mapping[str, LogitProcessor]) -> None:
        self._processors = dict(processors)

    @property
    def names(self) -> tuple[str, ...]:
        """The registered names, sorted."""
        return tuple(sorted(self._processors))

    def __getitem__(self, name: str) -> LogitProcessor:
        return self._processors[name]

    def check(self, calls: Sequence[ProcessorCall]) -> None:
        """Does nothing if every call names a registered processor that takes its arguments.

        Raises:
            SamplingParamsError: One does not.
        """
        for place, call in enumerate(calls):
            field = f"logit_processors[{place}]"
            if call.name not in self._processors:
                known = ", ".join(self.names) or "none is registered"
                raise SamplingParamsError(
                    "logit_processors", f"{field}.name must be a registered processor ({known}), not {call.name[:80]!r}"
                )
            try:
                # What it makes of a copy travels to no rank.
                self._processors[call.name].check(copy.deepcopy(call.args))
            except (Exception, SystemExit) as error:
                # Foreign code: whatever it raises, be it to leave the process, is its own fault or the arguments', and
                # costs this request alone.
                is_refusal = isinstance(error, ValueError)
                if not is_refusal:
                    _LOG.warning("logit processor %s failed to check its arguments", call.name, exc_info=True)
                message = f"{field}.args of {call.name}: {told(error, with_class=not is_refusal)}"
                raise SamplingParamsError("logit_processors", message) from error


def load_processors(specs: Sequence[str] = ()) -> ProcessorRegistry:
    """Returns the registry of the installed entry points and of those that a launch names; called by the launcher.

    Args:
        specs: ``module:name`` each; the processor is registered as ``name``. It is an instance, or a class that is
            called without arguments.

    Raises:
        ProcessorLoadError: A module or a name in it does not exist, what is there is no processor, or two share a name.
    """
    return load_named_processors(named_processors(specs))


def load_named_processors(sources: Mapping[str, str]) -> ProcessorRegistry:
    """Returns the registry of what ``named_processors`` found.

    Raises:
        ProcessorLoadError: As ``load_processors`` does.
    """
    return ProcessorRegistry({name: _load(spec) for name, spec in sources.items()})


def _load(spec: str) -> LogitProcessor:
    module, _, name = spec.partition(":")
    try:
        processor = _made(getattr(importlib.import_module(module), name))
    except (ImportError, AttributeError) as error:
        raise ProcessorLoadError(f"logit processor {spec!r}: {told(error, with_class=False)}") from error
    except (Exception, SystemExit) as error:
        # Foreign code: its module and its constructor may raise anything, and the launch ends with a line about it.
        raise ProcessorLoadError(f"logit processor {spec!r}: {told(error)}") from error
    if processor is None:
        raise ProcessorLoadError(
            f"logit processor {spec!r} is no processor: check(args), process(rows) and needs_row_values are needed"
        )
    return processor


def _made(value: object) -> LogitProcessor | None:
    """Returns the processor that was found in a module, a class called without arguments; None if it is none."""
    processor = value() if isinstance(value, type) else value
    if isinstance(processor, LogitProcessor) and isinstance(processor.needs_row_values, bool):
        return processor if callable(processor.check) and callable(processor.process) else None
    return None


class _Progress(IntEnum):
    """Where a rank is with a processor, or what it asks for."""

    FINISHED = 0
    FAILED = 1
    MAX = 2
    LOGSUMEXP = 3


class _Agreement:
    """Keeps the ranks paired while a processor runs: before every value asked for, and at the end, they compare notes.

    A rank whose processor failed meets the others at their next question, which they then do not ask.
    """

    def __init__(self, group: SliceGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self.agreed = True
        self.in_collective = False

    def on(self, progress: _Progress) -> bool:
        """Returns whether all ranks are at the same point; once they are not, they never meet again."""
        if self.agreed:
            ends = torch.tensor([int(progress), -int(progress)], dtype=torch.int32, device=self._device)
            highest, negated_lowest = self._meet(ends).tolist()
            self.agreed = highest == -negated_lowest
        return self.agreed

    def _meet(self, ends: torch.Tensor) -> torch.Tensor:
        self.in_collective = True
        met = self._group.all_reduce_max_(ends)
        self.in_collective = False
        return met


@dataclass(frozen=True)
class _Rows:
    """The rows given to a processor."""

    logits: torch.Tensor
    slice_start: int
    vocab_size: int
    args: Sequence[Mapping[str, Any]]
    prompt_ids: Sequence[Sequence[int]]
    output_ids: Sequence[Sequence[int]]
    _reader: SliceLogprobs
    _group: SliceGroup
    _agreement: _Agreement | None

    def max(self) -> torch.Tensor:
        own = self.logits.amax(dim=1)
        self._ask(_Progress.MAX)
        return self._answered(self._group.all_reduce_max_(own))

    def logsumexp(self) -> torch.Tensor:
        count = len(self.logits)
        rows = torch.arange(count, device=self.logits.device)
        temperature = torch.ones(count, dtype=torch.float64, device=self.logits.device)
        own = self._reader.read(RowsToRead(self.logits, rows, temperature), 0, rows.new_empty((count, 0)))
        self._ask(_Progress.LOGSUMEXP)
        found = self._reader.merge(self._answered(self._group.all_gather(own)), temperature, 0)
        return found.maxima + found.log_mass

    def _ask(self, progress: _Progress) -> None:
        if self._agreement is None:
            raise ProcessorDisagreementError("only a processor with needs_row_values may ask for row values")
        if not self._agreement.on(progress):
            raise ProcessorDisagreementError(f"not every rank asked for {progress.name.lower()}")
        self._agreement.in_collective = True

    def _answered(self, values: torch.Tensor) -> torch.Tensor:
        if self._agreement is not None:
            self._agreement.in_collective = False
        return values


class ProcessorRunner:
    """Applies the processors of a batch to this rank's slice.

    Args:
        registry: The registered processors.
        group: The ranks; all make the same calls in the same order.
        shape: Where this rank's slice lies.
        vocab_size: How many ids there are.
    """

    def __init__(self, registry: ProcessorRegistry, group: SliceGroup, shape: SliceShape, vocab_size: int) -> None:
        self._registry = registry
        self._group = group
        self._shape = shape
        self._vocab_size = vocab_size
        self._reader = SliceLogprobs(group, shape)

    def apply_(self, logits: torch.Tensor, batch: SamplingBatchInfo) -> dict[int, ProcessorFault]:
        """Applies the processors and returns the rows in which one failed, as far as this rank knows, and why.

        A request's processors run in its order: first the first one of every row, all rows of one processor together,
        in order of their names, then the second ones, and so on.

        Args:
            logits: [B, Vs] float32, contiguous.
            batch: The rows' parameters.
        """
        failed: dict[int, ProcessorFault] = {}
        asking = batch.flags.processed_rows
        for stage in range(max(len(batch.rows[row].params.logit_processors) for row in asking)):
            rows_of: dict[str, list[int]] = {}
            for row in asking:
                calls = batch.rows[row].params.logit_processors
                if stage < len(calls):
                    rows_of.setdefault(calls[stage].name, []).append(row)
            for name in sorted(rows_of):
                # What failed first is what is told.
                failed = self._failing(name, stage, rows_of[name], logits, batch) | failed
        return failed

    def _failing(
        self, name: str, stage: int, rows: list[int], logits: torch.Tensor, batch: SamplingBatchInfo
    ) -> dict[int, ProcessorFault]:
        """Runs one processor on its rows, and where it fails on each alone; returns the rows in which it failed.

        Where ranks compare notes they all know of a failure and go row by row together.
        """
        fault = self._run(name, stage, rows, logits, batch)
        if fault is None:
            return {}
        if len(rows) == 1:
            return {rows[0]: fault}
        alone = {row: self._run(name, stage, [row], logits, batch) for row in rows}
        return {row: fault for row, fault in alone.items() if fault is not None}

    def _run(
        self, name: str, stage: int, rows: list[int], logits: torch.Tensor, batch: SamplingBatchInfo
    ) -> ProcessorFault | None:
        """Runs one processor on a copy of its rows and keeps the result; returns why not, where it did not go well."""
        index = torch.tensor(rows, device=logits.device)
        processor = self._registry[name]
        agreement = _Agreement(self._group, logits.device) if processor.needs_row_values else None
        outputs = batch.output_ids or []
        given = _Rows(
            logits[index],
            self._shape.start,
            self._vocab_size,
            [batch.rows[row].params.logit_processors[stage].args for row in rows],
            [tuple(batch.rows[row].prompt_ids) for row in rows],
            [tuple(outputs[row]) for row in rows],
            self._reader,
            self._group,
            agreement,
        )
        shape = given.logits.shape
        fault = None
        try:
            processor.process(given)
            if given.logits.shape != shape or given.logits.dtype != torch.float32:
                fault = ProcessorFault(f"logit processor {name} changed the shape or dtype of its rows", is_own=True)
                _LOG.error("%s", fault.why)
        except (Exception, SystemExit) as error:
            # Foreign code: whatever it raises, be it to leave the process, ends its rows alone, unless it is the group
            # that failed.
            if agreement is not None and agreement.in_collective:
                raise
            fault = ProcessorFault(f"logit processor {name} failed: {told(error)}", is_own=True)
            _LOG.exception("logit processor %s failed", name)
        if agreement is not None:
            together = agreement.on(_Progress.FINISHED if fault is None else _Progress.FAILED)
            if fault is None and not together:
                fault = ProcessorFault(f"logit processor {name} did not do the same on every rank", is_own=False)
        if fault is None:
            given.logits[:, self._shape.valid_size :] = float("-inf")
            logits[index] = given.logits
        return fault
