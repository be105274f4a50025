"""How a benchmark's report leaves: as a table on stdout, and as one JSON document where a file is named."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Protocol

from rich.console import Console

_FILE_WIDTH: Final = 140


class Report(Protocol):
    """What a benchmark measured."""

    def print(self, console: Console) -> None:
        """Prints the figures as tables."""

    def document(self) -> bytes:
        """Returns one JSON document with every figure that the tables show."""


def publish(report: Report, json_file: Path | None) -> None:
    """Prints a report, and writes it to ``json_file`` unless that is None.

    Raises:
        OSError: The file cannot be written.
    """
    terminal = Console()
    report.print(terminal if terminal.is_terminal else Console(width=_FILE_WIDTH))
    if json_file is not None:
        json_file.write_bytes(report.document())
