"""Where a command writes its results, and in which form."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from launch.cli import UsageError
from launch.options import OutputFormat


def writes_text(output_format: OutputFormat, *, has_input_file: bool, output_file: Path | None) -> bool:
    """Returns whether results are written for people; ``auto``: unless they came from or go to a JSONL file."""
    if output_format == "auto":
        return not has_input_file and (output_file is None or output_file.suffix != ".jsonl")
    return output_format == "text"


@contextmanager
def open_output(output_file: Path | None) -> Iterator[TextIO]:
    """Gives the file to write to, standard output when there is none.

    Raises:
        UsageError: The file cannot be opened.
    """
    if output_file is None:
        yield sys.stdout
        return
    try:
        file = output_file.open("w", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--output {output_file}: {error.strerror}") from error
    with file:
        yield file
