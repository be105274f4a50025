"""Outcomes of vetting that outlive a run: one file each, in a folder that several runs may share."""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import tempfile
from pathlib import Path

import msgspec

from grammar_sync.spec import GrammarSpec
from grammar_sync.vetting.messages import Refused, Setup, VettingOutcome

DEFAULT_FOLDER_LIMIT_BYTES = 256 << 20
_MAGIC = b"lockstep grammar 1\n"
_DIGEST_BYTES = 32
_SUFFIX = ".grammar"
_ENGINES = ("xgrammar", "llguidance")
_LOG = logging.getLogger(__name__)


class FolderStore:
    """Keeps outcomes in a folder, under a digest of all that they depend on.

    That is the grammar, the vocabulary, the engines and their versions, the limits, and the program that prepares and
    probes. What cannot be read or written is a warning, never an error: the grammar is vetted anew.

    Args:
        folder: Made when the first outcome is kept.
        setup: What the compile process is told.
        limit_bytes: Bound on the files; the oldest go first.
    """

    def __init__(self, folder: Path, setup: Setup, limit_bytes: int = DEFAULT_FOLDER_LIMIT_BYTES) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._setup = setup
        self._base: bytes | None = None

    def load(self, spec: GrammarSpec) -> VettingOutcome | None:
        """Returns the outcome kept for a grammar, or None."""
        path = self._path(spec)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            _LOG.warning("the grammar cache cannot be read: %s", error)
            return None
        head = len(_MAGIC) + _DIGEST_BYTES
        payload = data[head:]
        if data[:head] != _MAGIC + _digest(payload):
            _LOG.warning("%s in the grammar cache is damaged; it is made anew", path)
            return None
        try:
            return msgspec.msgpack.decode(payload, type=VettingOutcome)
        except msgspec.DecodeError as error:
            _LOG.warning("%s in the grammar cache cannot be read: %s", path, error)
            return None

    def save(self, spec: GrammarSpec, outcome: VettingOutcome) -> None:
        """Keeps an outcome, unless it may be the machine's doing: a crash, or too much time or memory."""
        if isinstance(outcome, Refused) and outcome.reason not in {"grammar", "masks"}:
            return
        payload = msgspec.msgpack.encode(outcome)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=self._folder)
            with os.fdopen(descriptor, "wb") as file:
                file.write(_MAGIC + _digest(payload) + payload)
            Path(name).replace(self._path(spec))
            self._shrink()
        except OSError as error:
            _LOG.warning("the grammar cache cannot be written: %s", error)

    def _shrink(self) -> None:
        files = []
        for path in self._folder.glob(f"*{_SUFFIX}"):
            status = path.stat()
            files.append((status.st_mtime_ns, status.st_size, path))
        size_bytes = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if size_bytes <= self._limit_bytes:
                return
            path.unlink(missing_ok=True)
            size_bytes -= size

    def _path(self, spec: GrammarSpec) -> Path:
        if self._base is None:
            self._base = _digest_of_surroundings(self._setup)
        return self._folder / (_digest(self._base + msgspec.msgpack.encode(spec)).hex() + _SUFFIX)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _digest_of_surroundings(setup: Setup) -> bytes:
    """Returns a digest of what outcomes depend on beside the grammar; this package's own program among it."""
    parts = [msgspec.msgpack.encode(setup, order="deterministic")]
    parts += [importlib.metadata.version(name).encode() for name in _ENGINES]
    parts += [_digest(path.read_bytes()) for path in sorted(Path(__file__).parent.glob("*.py"))]
    return _digest(b"".join(map(_digest, parts)))
