"""What was seen of one run of the engine."""

from __future__ import annotations

import msgspec

from launch.chaos.processes import Leftovers
from launch.chaos.record import Fired


class RequestEnd(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one request.

    Args:
        name: Which of the fixed ones.
        token_ids: Its tokens, in the order in which they came.
        times_s: When each came, by the system's monotonic clock.
        text: Its text.
        finish_reason: Why it ended; None when it did not.
        error: With what error it ended, with its class; empty without one.
    """

    name: str
    token_ids: list[int]
    times_s: list[float]
    text: str
    finish_reason: str | None
    error: str

    @property
    def is_done(self) -> bool:
        """Whether it ran to its end."""
        return self.finish_reason in ("stop", "length") and not self.error


class EpochSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A life of the ranks.

    Args:
        epoch: Which.
        ready_s: When the front side heard that it is ready.
    """

    epoch: int
    ready_s: float


class FrontOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What the front side saw.

    Args:
        epochs: Lives of the ranks; none when they did not come up.
        requests: What came of the requests.
        failure: Why the engine is gone, in its own words; empty when it is not.
        failed_s: When that was known.
        blamed: The ranks that each of the runtime's reports names as culprits.
        seen_s: When the runtime first saw each of their faults.
        tokens: Of the largest batch that the culprits of each were at.
        answers_after: Whether a request after all others was answered.
        closed_in_s: How long the engine took to close.
    """

    epochs: list[EpochSeen]
    requests: list[RequestEnd]
    failure: str
    failed_s: float | None
    blamed: list[list[int]]
    seen_s: list[float]
    tokens: list[int]
    answers_after: bool
    closed_in_s: float


class EngineOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of a run.

    Args:
        front: What the front side saw; None when it could not say.
        fired: The faults that happened.
        exit_code: The front side's; negative = killed by that signal; None when it had to be ended.
        gone_s: When all processes of the run were gone; None when they had to be ended.
        left: What was left.
        load: The load factor around it.
        wall_s: Seconds of the whole run.
        said: The last line on stderr.
    """

    front: FrontOutcome | None
    fired: list[Fired]
    exit_code: int | None
    gone_s: float | None
    left: Leftovers
    load: float
    wall_s: float
    said: str
