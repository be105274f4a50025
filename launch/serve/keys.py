"""The keys that clients must give."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launch.cli.parse import UsageError
from launch.environment import API_KEY


@dataclass(frozen=True)
class ApiKeys:
    """Keys of which a client must give one; without any, every client is let in.

    Args:
        keys: The keys.
    """

    keys: tuple[bytes, ...]

    def admits(self, authorization: bytes) -> bool:
        """Returns whether an ``Authorization`` header holds one, in the same time wherever they differ."""
        scheme, _, given = authorization.partition(b" ")
        found = [hmac.compare_digest(key, given.strip()) for key in self.keys]
        return not self.keys or (scheme.lower() == b"bearer" and any(found))


def read_keys(file: Path | None, environ: Mapping[str, str]) -> ApiKeys:
    """Returns the keys that a file holds, one a line, or else the environment's.

    Raises:
        UsageError: The file cannot be read or holds none.
    """
    if file is None:
        given = [environ.get(API_KEY, "")]
    else:
        try:
            given = file.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise UsageError(f"--api-key-file {file}: the file cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"--api-key-file {file}: it is no text in UTF-8") from error
        if not any(line.strip() for line in given):
            raise UsageError(f"--api-key-file {file}: it holds no key")
    return ApiKeys(tuple(line.strip().encode() for line in given if line.strip()))
