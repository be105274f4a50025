"""What is said of a row that has no token, in the same words whoever ran its step."""

from __future__ import annotations

from sampler.sampler import RowReason

WHY_NO_TOKEN = {
    RowReason.EMPTY_SUPPORT: "no token may be drawn: everything is banned or masked",
    RowReason.NON_FINITE: "a logit is NaN or +inf, or became so by a processor, a penalty or a bias",
    RowReason.PROCESSOR_FAILED: "a logit processor failed",
}
"""Reasons that lie in the row's logits and parameters; those that lie in its grammar are told with the grammar."""
