"""Libraries in C that this machine's compiler builds when they are wanted, and a folder where they are kept.

Nobody needs them: who uses one has another way, or says what is missing.
"""

from __future__ import annotations

import hashlib
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

_BUILD_S = 60.0
_DIGEST_BYTES = hashlib.sha256().digest_size


class BuildError(RuntimeError):
    """A library cannot be built here; the message goes on from its name."""


def compiler(environ: Mapping[str, str]) -> list[str]:
    """Returns the C compiler's command: ``CC``, else ``cc``, ``gcc`` or ``clang``.

    Raises:
        BuildError: There is none.
    """
    try:
        asked = shlex.split(environ.get("CC", ""))
    except ValueError as error:
        raise BuildError(f"needs a C compiler: CC is no command: {error}") from None
    names = [asked] if asked else [["cc"], ["gcc"], ["clang"]]
    for command in names:
        if shutil.which(command[0], path=environ.get("PATH")) is not None:
            return command
    raise BuildError(f"needs a C compiler: {' or '.join(command[0] for command in names)} is not there")


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Returns where built libraries are kept."""
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "lockstep"


def build_library(
    source: Path, flags: Sequence[str], libraries: Sequence[str], folder: Path, environ: Mapping[str, str]
) -> Path:
    """Returns the library in ``folder``, built there unless it was before: same source, compiler, flags, machine type.

    Any number of processes may build at once: each builds a file of its own and puts it in place whole. A digest
    follows the library in its file, which loaders do not mind: one that was damaged since is built anew.

    Args:
        source: One file of C.
        flags: For the compiler.
        libraries: To link with, as ``-l`` options.
        folder: Made when it is not there.
        environ: ``CC`` and ``PATH`` are read.

    Raises:
        BuildError: It cannot be built, or not kept.
    """
    command = compiler(environ)
    text = " ".join([*command, *flags, *libraries, platform.machine()])
    key = hashlib.sha256(source.read_bytes() + text.encode()).hexdigest()[:16]
    library = folder / f"lib{source.stem}-{key}.so"
    try:
        if _is_whole(library):
            return library
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as name:
            part = Path(name) / library.name
            built = subprocess.run(
                [*command, *flags, "-o", str(part), str(source), *libraries],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_BUILD_S,
                check=False,
            )
            if built.returncode:
                lines = built.stderr.strip().splitlines() or ["no word of why"]
                raise BuildError(f"cannot be built by {command[0]}: {lines[0]}")
            if not part.exists():
                raise BuildError(f"cannot be built by {command[0]}: it made no file")
            with part.open("r+b") as file:
                file.write(hashlib.sha256(file.read()).digest())
            part.rename(library)
    except subprocess.TimeoutExpired:
        raise BuildError(f"cannot be built: {command[0]} took more than {_BUILD_S:g} s") from None
    except OSError as error:
        raise BuildError(f"cannot be built or kept in {folder}: {error}") from None
    return library


def _is_whole(library: Path) -> bool:
    """Returns whether there is a library that is as it was built."""
    if not library.exists():
        return False
    content = library.read_bytes()
    body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    return hashlib.sha256(body).digest() == digest
