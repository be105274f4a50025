"""``python -m launch`` and ``lockstep``: a rank under torchrun, the front side otherwise.

The role decides what is imported: the front side stays light (no torch), and so does a rank's supervisor on a node with
a zygote; a rank needs all of it.
"""

import gc
import os
import signal
import sys

from launch.node.early_signals import leave_on_signals

# The imports below take a while; ``main`` sets handlers of its own.
leave_on_signals()

# What is imported stays: searching it for garbage again and again would take a fifth of a rank's start.
gc.disable()

from launch.environment import AGENT_PID, ZYGOTE_SOCKET
from launch.node.parent_death import die_with_parent

if "RANK" in os.environ and "LOCAL_RANK" in os.environ:
    # Before the imports that take seconds: an agent that is killed meanwhile must leave no orphan.
    die_with_parent(signal.SIGKILL, os.environ.get(AGENT_PID))
    if ZYGOTE_SOCKET in os.environ:
        from launch.node.supervisor import main
    else:
        from launch.rank.main import main
else:
    from launch.front.main import main

# Nor is it searched later, between two steps.
gc.freeze()
gc.enable()

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
