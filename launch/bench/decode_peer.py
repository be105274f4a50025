"""The front's end of the process in which ``lockstep bench decode`` runs its peer."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import msgspec

from launch.cli.parse import UsageError
from launch.environment import with_import_path


class PeerJob(msgspec.Struct, frozen=True):
    """What the peer is to generate.

    Args:
        prompts: Token ids, all of one length.
        new_tokens: How many for each.
    """

    prompts: list[list[int]]
    new_tokens: int


class PeerAnswer(msgspec.Struct, frozen=True):
    """What came of a job, or of loading the model.

    Args:
        seconds: When each step's tokens were there, from the start.
        error: Why there is no result; empty when there is.
        version: The peer's version.
    """

    seconds: list[float] = []
    error: str = ""
    version: str = ""


def require_transformers() -> None:
    """Returns if the peer can run.

    Raises:
        UsageError: A package is missing.
    """
    missing = [name for name in ("transformers", "accelerate") if find_spec(name) is None]
    if missing:
        raise UsageError(f"bench decode compares with transformers: pip install {' '.join(missing)}, or --peer none")


class PeerProcess:
    """transformers with the model, in a process of its own.

    Args:
        model: Folder or GGUF file.
        dtype: The engine's.
        threads: CPU threads.

    Raises:
        UsageError: It cannot load the model.
    """

    def __init__(self, model: Path, dtype: str, threads: int) -> None:
        quiet = {
            "TRANSFORMERS_VERBOSITY": "error",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "TQDM_DISABLE": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "launch.bench.decode_peer_main", str(os.getpid()), str(model), dtype, str(threads)],
            env=with_import_path(os.environ) | quiet | {"OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.version = self._answer().version

    def generate(self, job: PeerJob) -> list[float]:
        """Returns when each step's tokens were there, in seconds from the start."""
        if self._process.stdin is not None:
            self._process.stdin.write(msgspec.json.encode(job) + b"\n")
            self._process.stdin.flush()
        return self._answer().seconds

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def _answer(self) -> PeerAnswer:
        line = b"" if self._process.stdout is None else self._process.stdout.readline()
        answer = msgspec.json.decode(line, type=PeerAnswer) if line else PeerAnswer(error="its process ended")
        if answer.error:
            self.close()
            raise UsageError(f"the peer transformers: {answer.error}; --peer none leaves it out")
        return answer
