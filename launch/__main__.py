"""``python -m launch`` and ``lockstep``: a rank under torchrun, the front side otherwise.

The role decides what is imported: the front side stays light (no torch), a rank needs all of it.
"""

import os
import sys

if "RANK" in os.environ and "LOCAL_RANK" in os.environ:
    from launch.rank_main import main
else:
    from launch.front_main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
