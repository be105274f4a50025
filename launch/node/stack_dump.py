"""Where a rank that does not get on, or that crashes, says what it was doing: its Python stacks.

Signals have them written. A handler in Python would run only when the interpreter does; this one runs in the middle of
any call.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from dataclasses import dataclass
from typing import Final

_SIGNAL: Final = signal.SIGUSR1
_FATAL: Final = (signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL)
_MAX_BYTES = 1 << 16


@dataclass(frozen=True)
class StackDump:
    """A file in memory that a process and those it forks share.

    Attributes:
        file: Its descriptor.
    """

    file: int

    @classmethod
    def create(cls) -> StackDump:
        """Returns an empty one."""
        return cls(os.memfd_create("lockstep-stacks"))

    def answer(self) -> None:
        """Makes this process write its stacks whenever it is asked, and when it crashes; not those that it forks."""
        for fatal in _FATAL:
            # xgrammar's handler searches the symbols of all libraries for a second and longer before the process ends.
            signal.signal(fatal, signal.SIG_DFL)
        faulthandler.enable(file=self.file, all_threads=True)
        os.register_at_fork(after_in_child=faulthandler.disable)
        faulthandler.register(_SIGNAL, file=self.file, all_threads=True, chain=False)

    @staticmethod
    def ask(pid: int) -> None:
        """Asks a process that answers to write its stacks; what has ended is not asked."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, _SIGNAL)

    def read(self) -> str:
        """Returns what was written so far."""
        return os.pread(self.file, _MAX_BYTES, 0).decode(errors="replace")

    def clear(self) -> None:
        """Forgets what was written."""
        os.ftruncate(self.file, 0)
        os.lseek(self.file, 0, os.SEEK_SET)

    def close(self) -> None:
        """Closes the file in this process."""
        os.close(self.file)
