"""What a command shows on a terminal while it works."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def progress_bar() -> Progress:
    """Returns a progress bar on stderr, whose tasks have a ``rate``; it shows nothing when stderr is no terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def show_cursor() -> None:
    """Gives the terminal its cursor back, if another process may have died over its progress bar."""
    console = Console(stderr=True)
    if console.is_terminal:
        console.show_cursor()
