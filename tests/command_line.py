"""Runs the real command line as a user does, and shows that nothing of it is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from forked_command import ForkedCommand, warm_start

ROOT = Path(__file__).resolve().parent.parent
LOCKSTEP = (sys.executable, "-m", "launch")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
_MARK = "LOCKSTEP_TEST_MARK"


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float

    def records(self) -> list[dict[str, Any]]:
        """Returns stdout as JSONL; a text may hold what Unicode, but not JSONL, calls the end of a line."""
        return [json.loads(line) for line in self.stdout.split("\n") if line]

    @property
    def message(self) -> str:
        """The last line of stderr."""
        return self.stderr.strip().splitlines()[-1] if self.stderr.strip() else ""


class Running:
    """A command that runs, with all its descendants, in a temporary folder of its own.

    Args:
        command: Its words.
        folder: Its folder.
        environ: What its environment has beside that of this process.
        stdin: What it can read.
        executed: Whether Python is to be executed for it; else it is forked where it can be, which takes less time.
    """

    def __init__(
        self, command: tuple[str, ...], folder: Path, environ: Mapping[str, str], stdin: bytes, *, executed: bool
    ) -> None:
        self.folder = folder
        self._mark = str(folder)
        self._stdout = folder / "stdout"
        self._stderr = folder / "stderr"
        self._started_s = time.monotonic()
        (folder / "stdin").write_bytes(stdin)
        own = {_MARK: self._mark, "TMPDIR": str(folder / "tmp")}
        environ = {**os.environ, "PYTHONPATH": str(ROOT), **environ, **own}
        self.process: ForkedCommand | subprocess.Popen[bytes]
        start = None if executed else warm_start(command, environ, str(ROOT))
        with self._stdout.open("wb") as out, self._stderr.open("wb") as err, (folder / "stdin").open("rb") as given:
            if start is not None:
                self.process = ForkedCommand(start, (folder / "stdin", self._stdout, self._stderr))
            else:
                self.process = subprocess.Popen(command, cwd=ROOT, env=environ, stdin=given, stdout=out, stderr=err)

    def family(self) -> list[psutil.Process]:
        """Returns every live process that this command started, however it is related now."""
        mark = f"{_MARK}={self._mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with suppress(OSError, psutil.Error):
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        process = psutil.Process(int(entry.name))
                        if process.status() != psutil.STATUS_ZOMBIE:
                            found.append(process)
        return found

    def named(self, pattern: str) -> dict[str, psutil.Process]:
        """Returns the live processes whose names fit a regular expression, by name."""
        found = {}
        for process in self.family():
            with suppress(OSError):
                # Read anew: a process takes its name while it starts.
                name = Path(f"/proc/{process.pid}/comm").read_text().strip()
                if re.fullmatch(pattern, name):
                    found[name] = process
        return found

    def ranks(self) -> dict[int, psutil.Process]:
        """Returns the live ranks by global rank."""
        return {int(name.rpartition("r")[2]): process for name, process in self.named(r"lockstep r\d+").items()}

    def wait(self, timeout_s: float) -> Outcome:
        """Returns how the command ended."""
        code = self.process.wait(timeout_s)
        seconds = time.monotonic() - self._started_s
        return Outcome(code, self._stdout.read_text(), self._stderr.read_text(), seconds)

    def interrupt(self, sig: signal.Signals, timeout_s: float) -> tuple[Outcome, float]:
        """Sends a signal to the command alone; returns how it ended and how many seconds that took."""
        began_s = time.monotonic()
        self.process.send_signal(sig)
        outcome = self.wait(timeout_s)
        return outcome, time.monotonic() - began_s

    def wait_for_output(self, text: str, timeout_s: float) -> None:
        """Returns when stdout holds ``text``."""
        wait_until(lambda: text in self._stdout.read_text(), timeout_s, f"stdout to hold {text!r}")

    def wait_for_message(self, text: str, timeout_s: float) -> str:
        """Returns the line of stderr that holds ``text`` once there is one; fails when the command ends before."""

        def has_come() -> bool:
            found = text in self._stderr.read_text()
            assert found or self.process.poll() is None, f"ended early: {self._stderr.read_text()}"
            return found

        wait_until(has_come, timeout_s, f"stderr to hold {text!r}")
        return next(line for line in self._stderr.read_text().splitlines() if text in line)

    def check_nothing_left(self, timeout_s: float = 2.0) -> None:
        """Fails when a process, a socket file or a folder of the command is left."""
        wait_until(lambda: not self.family(), timeout_s, f"these processes to end: {self.family()}")
        # torchrun itself leaves an empty folder at every launch when a user starts it without --log-dir.
        ours = [path for path in (self.folder / "tmp").iterdir() if not path.name.startswith("torchelastic_")]
        left = sorted(str(path.relative_to(self.folder)) for path in ours)
        assert left == [], f"left in the temporary folder: {left}"


def wait_until(condition: Any, timeout_s: float, what: str) -> None:
    """Returns when ``condition()`` holds; fails when it does not in ``timeout_s``."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.05)


@contextmanager
def running(
    *command: str, environ: Mapping[str, str] | None = None, stdin: bytes = b"", executed: bool = False
) -> Iterator[Running]:
    """Runs a command; whatever happens, none of its processes survives this."""
    with tempfile.TemporaryDirectory(prefix="lockstep-test-") as name:
        folder = Path(name)
        (folder / "tmp").mkdir()
        shared_memory = set(Path("/dev/shm").iterdir())
        command_running = Running(command, folder, environ or {}, stdin, executed=executed)
        try:
            yield command_running
            assert set(Path("/dev/shm").iterdir()) <= shared_memory
        finally:
            for process in command_running.family():
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            command_running.process.wait(10)


def run(
    *command: str,
    timeout_s: float = 120.0,
    environ: Mapping[str, str] | None = None,
    stdin: bytes = b"",
    executed: bool = False,
) -> Outcome:
    """Returns how a command ended, after showing that it left nothing behind."""
    with running(*command, environ=environ, stdin=stdin, executed=executed) as started:
        outcome = started.wait(timeout_s)
        started.check_nothing_left()
        return outcome
