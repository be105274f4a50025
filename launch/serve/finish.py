"""Why a choice ended, in OpenAI's words."""

from __future__ import annotations

from launch.serve.replies import FinishReason
from runtime.messages import Finished


def finish_reason(finished: Finished | None, *, has_calls: bool = False) -> FinishReason:
    """Returns why a choice that did not fail ended; one with calls of tools that was not cut ended for them."""
    if finished is not None and finished.finish_reason == "length":
        return "length"
    return "tool_calls" if has_calls else "stop"
