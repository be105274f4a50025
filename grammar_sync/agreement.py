"""Which requests' grammars are ready, agreed by all ranks of the first stage: ready on all, failed on any.

One rank vets grammars and chooses the form in which they are compiled; the others learn it by the same exchange.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from grammar_sync.engines.prepared import PreparedGrammar
from tp.group import TensorParallelGroup


class AgreementError(RuntimeError):
    """A rank reported for another step: the ranks are out of step and must not go on."""


class GrammarFailure(msgspec.Struct, frozen=True):
    """A request whose grammar cannot be used, and why."""

    request_id: int
    message: str


class VettedForm(msgspec.Struct, frozen=True):
    """What all ranks are to compile for a request."""

    request_id: int
    prepared: PreparedGrammar


class LocalReport(msgspec.Struct, frozen=True):
    """What one rank knows of the requests that wait.

    Attributes:
        ready: Those whose grammars it has compiled.
        forms: The digest of the form that it compiled, for each of ``ready``.
        failed: Those that failed.
        vetted: Those whose form the others have to be told; only the rank that vets has any.
    """

    ready: tuple[int, ...] = ()
    forms: tuple[int, ...] = ()
    failed: tuple[GrammarFailure, ...] = ()
    vetted: tuple[VettedForm, ...] = ()


class Verdict(msgspec.Struct, frozen=True):
    """What all ranks do in ``step``: the requests that may be scheduled, and those that end.

    ``vetted`` is for the first stage alone: what its ranks have to compile from now on.
    """

    step: int
    ready: tuple[int, ...] = ()
    failed: tuple[GrammarFailure, ...] = ()
    vetted: tuple[VettedForm, ...] = ()


def merge_reports(step: int, reports: Sequence[LocalReport], waiting: Sequence[int]) -> Verdict:
    """Returns the verdict on reports given in rank order.

    A request failed when it failed on any rank, with the message of the lowest such rank; it is ready when all ranks
    have compiled the same form of it and it failed on none. Forms are handed on for requests that are neither. All
    lists are in the order of ``waiting``; ids that do not wait are ignored.

    Args:
        step: The step of the verdict.
        reports: One a rank, at least one.
        waiting: The requests that wait for a grammar, in order of arrival.

    Raises:
        AgreementError: There is no report, or one lacks forms.
    """
    if not reports:
        raise AgreementError(f"merge_reports in step {step}: no report")
    failures: dict[int, GrammarFailure] = {}
    forms: dict[int, VettedForm] = {}
    compiled: set[tuple[int, int]] | None = None
    for rank, report in enumerate(reports):
        if len(report.forms) != len(report.ready):
            raise AgreementError(
                f"merge_reports in step {step}: rank {rank} reported {len(report.ready)} ready requests "
                f"and {len(report.forms)} forms"
            )
        mine = set(zip(report.ready, report.forms, strict=True))
        compiled = mine if compiled is None else compiled & mine
        for failure in report.failed:
            failures.setdefault(failure.request_id, failure)
        for form in report.vetted:
            forms.setdefault(form.request_id, form)
    ready = {request_id for request_id, _ in compiled or ()}.difference(failures)
    in_order = list(dict.fromkeys(waiting))
    return Verdict(
        step=step,
        ready=tuple(request_id for request_id in in_order if request_id in ready),
        failed=tuple(failures[request_id] for request_id in in_order if request_id in failures),
        vetted=tuple(
            forms[request_id]
            for request_id in in_order
            if request_id in forms and request_id not in ready and request_id not in failures
        ),
    )


def agree(group: TensorParallelGroup, step: int, report: LocalReport, waiting: Sequence[int]) -> Verdict:
    """Returns the same verdict on every rank of the first stage.

    All ranks of ``group`` call it in the same step, with the same ``waiting``; one all_gather_object. It waits for the
    slowest rank to call, never for a compile.

    Raises:
        AgreementError: A rank's report is for another step.
        CollectiveError: The collective failed.
    """
    payloads = group.all_gather_object((step, report))
    for rank, (got_step, _) in enumerate(payloads):
        if got_step != step:
            raise AgreementError(
                f"grammar agreement on {group.name}: rank {rank} reported for step {got_step}, "
                f"rank {group.rank} is in step {step}"
            )
    return merge_reports(step, [rank_report for _, rank_report in payloads], waiting)
