"""What the process's exit code says."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of ``lockstep`` and of a rank."""

    OK = 0
    """Everything asked for was done."""
    INTERNAL = 1
    """A fault of the program, or the output could not be written."""
    USAGE = 2
    """Wrong arguments, model or input; nothing was started."""
    REQUESTS_FAILED = 3
    """Ran to the end, but at least one request has an error record."""
    RANK_FAILED = 4
    """A rank died or raised while running."""
    START_FAILED = 5
    """A rank did not come up."""
    GRAMMARS_FAILED = 6
    """``check-grammar`` ran to the end, and found what ``--fail-on`` names."""
    RECOVERIES_EXHAUSTED = 7
    """Ranks failed more often than they may be recovered."""
    CHAOS_FAILED = 8
    """``chaos`` ran to the end, and found a promise broken, or a script that hung or went wrong without a word."""
    INTERRUPTED = 130
    """Ctrl-C."""
    TERMINATED = 143
    """SIGTERM."""
