"""What a signal does to a process that still imports: it leaves, with the exit code and line that users know."""

import os
import signal


def leave_on_signals() -> None:
    """Has Ctrl-C and SIGTERM end the process at once, until it sets handlers of its own."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)


def _leave(signum: int, _frame: object) -> None:
    word = "interrupted" if signum == signal.SIGINT else "terminated"
    os.write(2, f"lockstep: {word}\n".encode())
    os._exit(128 + signum)
