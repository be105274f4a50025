"""The help of a command: every name in full at any width of the terminal, options by the panels they belong to.

Tables, which typer would draw, cut names that their columns have no room for.
"""

from __future__ import annotations

from typing import Any, Final

from typer.core import TyperCommand, TyperGroup, TyperOption

_LONGEST: Final = 1000
"""Characters of what is said of a command in one sentence: more than there are."""


class PanelCommand(TyperCommand):
    """A command whose options are listed under the names of their panels."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes arguments and options, those of no panel first."""
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                own = parameter.rich_help_panel or "Options" if isinstance(parameter, TyperOption) else "Arguments"
                panels.setdefault(own, []).append(record)
        for panel, records in panels.items():
            if records:
                with formatter.section(panel):
                    formatter.write_dl(records)


class PanelGroup(TyperGroup):
    """A group of commands, each of which is told of in a whole sentence."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - what is overridden has it
        """Writes the commands."""
        shown = [one for one in self.commands.items() if not one[1].hidden]
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(_LONGEST)) for name, command in shown])
