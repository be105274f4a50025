"""Which requests' grammars are ready, agreed by all ranks of the first stage: ready on all, failed on any."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tp.group import TensorParallelGroup


class AgreementError(RuntimeError):
    """A rank reported for another step: the ranks are out of step and must not go on."""


class GrammarFailure(msgspec.Struct, frozen=True):
    """A request whose grammar cannot be used, and why."""

    request_id: int
    message: str


class LocalReport(msgspec.Struct, frozen=True):
    """What one rank knows: the requests whose grammars it has compiled, and those that failed."""

    ready: tuple[int, ...] = ()
    failed: tuple[GrammarFailure, ...] = ()


class Verdict(msgspec.Struct, frozen=True):
    """What all ranks do in ``step``: the requests that may be scheduled, and those that end."""

    step: int
    ready: tuple[int, ...] = ()
    failed: tuple[GrammarFailure, ...] = ()


def merge_reports(step: int, reports: Sequence[LocalReport], waiting: Sequence[int]) -> Verdict:
    """Returns the verdict on reports given in rank order.

    A request failed when it failed on any rank, with the message of the lowest such rank; it is ready when it is ready
    on all ranks and failed on none. Both lists are in the order of ``waiting``; ids that do not wait are ignored.

    Args:
        step: The step of the verdict.
        reports: One a rank, at least one.
        waiting: The requests that wait for a grammar, in order of arrival.

    Raises:
        AgreementError: There is no report.
    """
    if not reports:
        raise AgreementError(f"merge_reports in step {step}: no report")
    failures: dict[int, GrammarFailure] = {}
    for report in reports:
        for failure in report.failed:
            failures.setdefault(failure.request_id, failure)
    ready = set(reports[0].ready).intersection(*(report.ready for report in reports[1:]))
    in_order = list(dict.fromkeys(waiting))
    return Verdict(
        step=step,
        ready=tuple(request_id for request_id in in_order if request_id in ready and request_id not in failures),
        failed=tuple(failures[request_id] for request_id in in_order if request_id in failures),
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
