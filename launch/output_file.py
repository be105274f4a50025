"""Where a command writes its results, and in which form."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from launch.cli.parse import UsageError
from launch.commands import OutputFormat


def writes_text(output_format: OutputFormat, *, has_input_file: bool, output_file: Path | None) -> bool:
    """Returns whether results are written for people; ``auto``: unless they came from or go to a JSONL file."""
    if output_format == "auto":
        return not has_input_file and (output_file is None or output_file.suffix != ".jsonl")
    return output_format == "text"


class OutputError(RuntimeError):
    """What was worked out could not be written: a full disk, or nobody reads it any more."""


class Output(io.TextIOWrapper):
    """The file to write to, which says in one line what is wrong with it.

    Args:
        file: The file.
        name: What it is called in an error.
        encoding: Of its text.
    """

    def __init__(self, file: BinaryIO, name: str, encoding: str) -> None:
        super().__init__(file, encoding=encoding, errors="backslashreplace")
        self._called = name

    def write(self, text: str, /) -> int:
        """Writes, as any file does.

        Raises:
            OutputError: It cannot be written.
        """
        with self._named():
            return super().write(text)

    def flush(self) -> None:
        """Has everything written that was given.

        Raises:
            OutputError: It cannot be written.
        """
        with self._named():
            super().flush()

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OutputError(f"{self._called}: {error.strerror}") from error


@contextmanager
def open_output(output_file: Path | None) -> Iterator[Output]:
    """Gives the file to write to, standard output when there is none.

    Raises:
        UsageError: The file cannot be opened.
        OutputError: It cannot be written.
    """
    if output_file is None:
        # A file of its own: what cannot be written is not tried again when Python ends.
        file = Output(os.fdopen(os.dup(sys.stdout.fileno()), "wb"), "standard output", sys.stdout.encoding)
    else:
        try:
            file = Output(output_file.open("wb"), f"--output {output_file}", "utf-8")
        except OSError as error:
            raise UsageError(f"--output {output_file}: {error.strerror}") from error
    try:
        yield file
        file.flush()
    finally:
        # After an error what is left is lost anyway; without one nothing is left.
        with suppress(OutputError, OSError):
            file.close()
