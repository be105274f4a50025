"""Finished outputs that are held back until their check is over."""

from __future__ import annotations

import logging
from typing import Protocol

import msgspec

from grammar_sync.spec import GrammarSpec
from runtime.messages import ErrorInfo, Finished
from runtime.output_check import CheckJob, CheckResult

_LOG = logging.getLogger(__name__)


class OutputChecks(Protocol):
    """What checks outputs, beside the step loop."""

    def submit(self, number: int, job: CheckJob) -> None:
        """Has an output checked, without waiting."""

    def results(self) -> list[tuple[int, CheckResult]]:
        """Returns what came since the last call."""


class HeldOutputs:
    """Holds finished outputs back while they are checked; tokens go to the client before, as they come.

    Args:
        checks: Checks them.
    """

    def __init__(self, checks: OutputChecks) -> None:
        self._checks = checks
        self._held: dict[int, Finished] = {}

    def hold(self, sequence_id: int, finished: Finished, job: CheckJob) -> None:
        """Takes in an output whose sequence ended."""
        self._held[sequence_id] = finished
        self._checks.submit(sequence_id, job)

    def released(self) -> list[Finished]:
        """Returns the outputs whose check is over; one that is not what its schema asks for has an error now."""
        return [self._judged(self._held.pop(sequence_id), result) for sequence_id, result in self._checks.results()]

    def _judged(self, finished: Finished, result: CheckResult) -> Finished:
        name = f"request {finished.request_id}, choice {finished.index}"
        if result.state == "unchecked":
            _LOG.warning("%s: the output is unchecked: %s", name, result.message)
        if result.state != "violation":
            return finished
        message = f"the output is not what its schema asks for: {result.message}"
        _LOG.error("%s: %s", name, message)
        return msgspec.structs.replace(finished, finish_reason="error", error=ErrorInfo("grammar_violation", message))


def checked_schema(grammar: GrammarSpec | None) -> str | None:
    """Returns the schema that a whole output is checked against; None where there is none."""
    return grammar.source if grammar is not None and grammar.kind in ("json_schema", "json_object") else None
