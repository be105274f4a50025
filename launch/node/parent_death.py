"""Ends this process when its parent dies, so that a killed front side or agent leaves no orphan (Linux only)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(sig: signal.Signals, parent_pid: str | None = None) -> None:
    """Asks the kernel to send ``sig`` to this process when its parent ends.

    Args:
        sig: The signal.
        parent_pid: Whose child this process must be; when that parent is gone already, the process ends at once.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(sig), 0, 0, 0)
    if parent_pid is not None and str(os.getppid()) != parent_pid:
        os._exit(128 + sig)
