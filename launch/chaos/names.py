"""The names of cells, for those who want to choose among them."""

from __future__ import annotations

from collections.abc import Iterable

from launch.exit_codes import ExitCode


def print_names(names: Iterable[str]) -> ExitCode:
    """Prints the names of cells, one a line."""
    for name in names:
        print(name)
    return ExitCode.OK
