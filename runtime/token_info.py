"""What a client is told of a token that it asked about."""

from __future__ import annotations

from collections.abc import Callable

from runtime.messages import SupportInfo, TokenInfo, TokenLogprob
from runtime.reports import IdLogprob, TokenReport


def token_info(report: TokenReport, text_of: Callable[[int], str], *, has_top: bool, has_named: bool) -> TokenInfo:
    """Returns what a client is told of a token.

    Args:
        report: What the last stage found.
        text_of: Gives a token's text by itself.
        has_top: Whether the likeliest ids were asked for: they have a list then, even where it is empty.
        has_named: The same of ids asked for by name.
    """

    def listed(entries: list[IdLogprob]) -> list[TokenLogprob]:
        return [TokenLogprob(one, text_of(one), logprob) for one, logprob in entries]

    support = None
    if report.support is not None:
        ids, logprobs = [one for one, _ in report.support.entries], [value for _, value in report.support.entries]
        support = SupportInfo(report.support.status, ids, logprobs)
    return TokenInfo(
        token_id=report.token_id,
        token=text_of(report.token_id),
        logprob=report.logprob,
        top_logprobs=listed(report.top) if has_top else None,
        named_logprobs=listed(report.named) if has_named else None,
        support=support,
    )
