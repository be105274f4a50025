"""``python -m launch`` and ``lockstep``: a rank under torchrun, the front side otherwise.

The role decides what is imported: the front side stays light (no torch), a rank needs all of it.
"""

import os
import signal
import sys


def _leave(signum: int, frame: object) -> None:  # noqa: ARG001
    """Ends the process before there is anything to clean up, with the exit code and line that users know."""
    word = "interrupted" if signum == signal.SIGINT else "terminated"
    os.write(2, f"lockstep: {word}\n".encode())
    os._exit(128 + signum)


# The imports below take a while; ``main`` sets handlers of its own.
for _number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(_number, _leave)

from launch.environment import AGENT_PID
from launch.parent_death import die_with_parent

if "RANK" in os.environ and "LOCAL_RANK" in os.environ:
    # Before the imports that take seconds: an agent that is killed meanwhile must leave no orphan.
    die_with_parent(signal.SIGKILL, os.environ.get(AGENT_PID))
    from launch.rank_main import main
else:
    from launch.front_main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
