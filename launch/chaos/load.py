"""How much slower than alone processes run on this machine now: what bounds on seconds are stretched by."""

from __future__ import annotations

import subprocess
import sys

_SPIN_S = 0.1
_PROGRAM = f"""
import time
wall, cpu = time.perf_counter(), time.process_time()
while time.process_time() - cpu < {_SPIN_S}:
    pass
print(time.perf_counter() - wall)
"""


def load_factor(processes: int) -> float:
    """Returns how long each of so many busy processes takes for its work, against alone on idle cores; at least 1.

    Ranks beyond the number of cores count, and so does whatever else runs.
    """
    running = [
        subprocess.Popen([sys.executable, "-I", "-S", "-c", _PROGRAM], stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    walls_s = [float(process.communicate()[0]) for process in running]
    return max(1.0, max(walls_s) / _SPIN_S)
