"""What requests ask to know beside their tokens: logprobs and supports, from the last stage to the leader.

Only the leader needs them, so they do not ride with the token ids: the last stage's rank 0 sends them in a message of
its own, in steps whose plan says that some row asks, or whose statuses say that a logit processor failed.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from pp.link import StageLink, Tag
from runtime.plan import StepPlan
from sampler.logprobs import LogprobRows, finite_logprob
from sampler.params import SamplingParams
from sampler.sampler import SampleOutput
from sampler.supports import RowStatus
from tp.group import TensorParallelGroup

IdLogprob = tuple[int, float]


class SupportReport(msgspec.Struct, frozen=True, array_like=True):
    """The ids that could have been drawn.

    Args:
        status: ``OK``, or ``OVERFLOW`` when they are too many to report.
        entries: Each id with its logprob, renormalised over the support, by ascending id.
    """

    status: str
    entries: list[IdLogprob]


class TokenReport(msgspec.Struct, frozen=True, array_like=True):
    """What is reported of one token.

    Args:
        token_id: The token.
        logprob: Its own; None when none can be told.
        top: The most likely ids, best first.
        named: The ids asked for by name.
        support: What could have been drawn, if that was asked for.
    """

    token_id: int
    logprob: float | None
    top: list[IdLogprob]
    named: list[IdLogprob]
    support: SupportReport | None = None


class StepReport(msgspec.Struct, frozen=True):
    """What is reported of a step.

    Args:
        tokens: The report of each sampling row that asks, by its index among them.
        prompts: The reports of the prompt tokens that each row scored, by the row's index in the plan.
        failures: Why a logit processor failed, by the row's index among the sampling rows.
    """

    tokens: dict[int, TokenReport]
    prompts: dict[int, list[TokenReport]]
    failures: dict[int, str] = {}


class ReportExchange:
    """One rank's end of the way that reports take.

    Args:
        group: This rank's stage.
        link: This rank's pipeline.
    """

    def __init__(self, group: TensorParallelGroup, link: StageLink) -> None:
        self._is_rank_0 = group.rank == 0
        self._link = link

    def send(self, report: StepReport | None) -> None:
        """Sends a step's report from the last stage's rank 0 to the leader; other ranks of the stage do nothing."""
        if report is not None and self._is_rank_0 and not self._link.is_first:
            self._link.send_frame(msgspec.msgpack.encode(report), 0, Tag.REPORT)

    def receive(self, plan: StepPlan, *, has_failures: bool) -> StepReport | None:
        """Returns a step's report on the leader of several stages; None elsewhere, or when there is none.

        Args:
            plan: The step's plan.
            has_failures: Whether a logit processor failed in it.
        """
        if not (plan.has_reports or has_failures) or not self._is_rank_0 or not self._link.is_first:
            return None
        frame = self._link.receive_frame(self._link.size - 1, Tag.REPORT, step=plan.step)
        return msgspec.msgpack.decode(frame, type=StepReport)


def token_reports(output: SampleOutput, params: list[SamplingParams]) -> dict[int, TokenReport]:
    """Returns the reports of a step's sampling rows that ask for one and drew a token.

    Args:
        output: What the sampler returned.
        params: Of each row.
    """
    token_ids = output.token_ids.tolist()
    rows = [row for row, one in enumerate(params) if one.has_logprobs]
    found: dict[int, TokenReport] = {}
    if output.logprobs is not None:
        counts = [params[row].logprobs or 0 for row in rows]
        found = dict(zip(rows, _reports(output.logprobs, counts), strict=True))
    asking = (row for row, one in enumerate(params) if one.return_support)
    for row, support in zip(asking, output.supports, strict=True):
        entries = list(zip(support.ids.tolist(), map(finite_logprob, support.logprobs.tolist()), strict=True))
        report = SupportReport(RowStatus(support.status).name, entries)
        found[row] = msgspec.structs.replace(found[row], support=report)
    return {row: report for row, report in found.items() if token_ids[row] >= 0}


def prompt_reports(rows: LogprobRows, top_n: int) -> list[TokenReport]:
    """Returns the reports of prompt tokens that follow each other."""
    return _reports(rows, [top_n] * len(rows.token_ids))


def scored_reports(output: SampleOutput, token_ids: list[int], top_n: int) -> list[TokenReport]:
    """Returns the reports of given tokens that follow each other, without a logprob where none can be told.

    Args:
        output: Of the sampler's ``score``; every row asks for logprobs.
        token_ids: The tokens.
        top_n: How many of the most likely ids to report.
    """
    if output.logprobs is None:
        return []
    reports = prompt_reports(output.logprobs, top_n)
    return [
        report if scored >= 0 else TokenReport(token_id, None, [], [])
        for report, scored, token_id in zip(reports, output.token_ids.tolist(), token_ids, strict=True)
    ]


def _reports(rows: LogprobRows, counts: list[int]) -> list[TokenReport]:
    columns = (rows.token_ids, rows.logprobs, rows.top_ids, rows.top_logprobs, rows.named_ids, rows.named_logprobs)
    reports = []
    for count, token_id, logprob, top_ids, top, named_ids, named in zip(counts, *map(_listed, columns), strict=True):
        reports.append(
            TokenReport(
                token_id,
                finite_logprob(logprob),
                _pairs(top_ids[:count], top[:count]),
                _pairs(named_ids, named),
            )
        )
    return reports


def _listed(tensor: torch.Tensor) -> list[Any]:
    values: list[Any] = tensor.tolist()
    return values


def _pairs(ids: list[int], logprobs: list[float]) -> list[IdLogprob]:
    return [(token_id, finite_logprob(value)) for token_id, value in zip(ids, logprobs, strict=True) if token_id >= 0]
