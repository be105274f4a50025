"""What ``--speculate`` says."""

from __future__ import annotations

import re

from launch.cli.parse import UsageError
from runtime.speculation import SpeculationLimits

MOST_DRAFT_TOKENS = 32
_FORM = re.compile(r"ngram:([0-9]{1,4})", re.ASCII)


def speculation_limits(text: str | None) -> SpeculationLimits:
    """Returns how much is guessed.

    Args:
        text: ``ngram:K``: up to K tokens a sequence and step; None = nothing.

    Raises:
        UsageError: It says something else.
    """
    if text is None:
        return SpeculationLimits()
    form = _FORM.fullmatch(text)
    if form is None or not 1 <= int(form[1]) <= MOST_DRAFT_TOKENS:
        raise UsageError(f"--speculate is {text!r}: ngram:K is needed, K from 1 to {MOST_DRAFT_TOKENS}")
    return SpeculationLimits(draft_tokens=int(form[1]))
