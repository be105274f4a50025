"""The command line of ``lockstep chaos``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import BadParameter

from launch.cli.groups import spread
from launch.cli.types import JsonFile
from launch.commands import ChaosCommand, Command

_ENGINE = "Lockstep's own engine"
_SCRIPT = "A script of your own"
_CELLS = "Which cells"
_RANKS = _TP = _PP = 2


@dataclass(frozen=True, kw_only=True)
class ScriptGroup:
    """A program that is put to faults instead of an engine."""

    script: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Put this program to faults instead of Lockstep's engine. torchrun starts it; it is found from here.",
            show_default=False,
            rich_help_panel=_SCRIPT,
        ),
    ] = None
    ranks: Annotated[
        int | None, typer.Option(min=2, max=64, help="Its ranks.", show_default="2", rich_help_panel=_SCRIPT)
    ] = None
    nccl_shim: Annotated[
        bool,
        typer.Option(
            "--nccl-shim",
            help="Errors, delays and hangs happen within NCCL: in a library before it that the C compiler builds.",
            rich_help_panel=_SCRIPT,
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class TargetGroup:
    """The engine that is put to faults."""

    model: Annotated[
        Path | None,
        typer.Option(
            help="Hugging Face folder or GGUF file.", show_default="a tiny random one", rich_help_panel=_ENGINE
        ),
    ] = None
    tp: Annotated[
        int | None,
        typer.Option(min=1, help="Tensor-parallel ranks of a stage.", show_default="2", rich_help_panel=_ENGINE),
    ] = None
    pp: Annotated[
        int | None, typer.Option(min=1, help="Pipeline stages.", show_default="2", rich_help_panel=_ENGINE)
    ] = None
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=64,
            help="Cells that run at the same time.",
            show_default="a core for each rank, at least 2",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    plot: Annotated[
        Path | None,
        typer.Option(help="Where to draw every cell's times, as SVG.", show_default="nowhere", rich_help_panel=_ENGINE),
    ] = None


@dataclass(frozen=True, kw_only=True)
class CellGroup:
    """Which faults there are, and how often each is run."""

    matrix: Annotated[
        Literal["quick", "pairwise", "full"],
        typer.Option(
            help="Each kind of fault once, any two properties of a fault together, or all there is.",
            rich_help_panel=_CELLS,
        ),
    ] = "quick"
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Those with such names only, as kill/*; may be given again.",
            show_default="all",
            rich_help_panel=_CELLS,
        ),
    ] = None
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each cell.", rich_help_panel=_CELLS)] = 1
    seed: Annotated[int, typer.Option(min=0, help="Of the choice of cells.", rich_help_panel=_CELLS)] = 0
    list_only: Annotated[
        bool, typer.Option("--list", help="Print the cells' names and run none.", rich_help_panel=_CELLS)
    ] = False


@dataclass(frozen=True, kw_only=True)
class LimitGroup:
    """How long things may take."""

    limit: Annotated[
        float, typer.Option(min=1, max=3600, help="Seconds that ranks have to leave once the fault happened.")
    ] = 20.0
    start_limit: Annotated[
        float, typer.Option(min=1, max=3600, help="Seconds that a run may take until its fault happens.")
    ] = 120.0
    group_timeout: Annotated[
        float | None,
        typer.Option(
            min=0.1, max=3600, help="Time-out of every process group, in seconds.", show_default="the program's own"
        ),
    ] = None


@spread
def chaos(
    *,
    program: ScriptGroup,
    target: TargetGroup,
    cells: CellGroup,
    limits: LimitGroup,
    json_file: JsonFile = None,
) -> Command:
    """Puts faults into running ranks and tells what became of each: of Lockstep's engine, or of a script of your own.

    Exit code 8 says that a promise was broken, or that the script hung or gave wrong results without an error.
    """
    if program.script is not None and not re.fullmatch(r"[\w.]+:\w+", program.script):
        raise BadParameter(f"--script is {program.script!r}: module:function is needed")
    _refuse_foreign(program, target)
    if cells.list_only:
        _refuse_given({"--json": json_file, "--plot": target.plot}, "--list runs no cell, so there is nothing to write")
    return ChaosCommand(
        script=program.script,
        ranks=program.ranks or _RANKS,
        nccl_shim=program.nccl_shim,
        model=target.model,
        tp=target.tp or _TP,
        pp=target.pp or _PP,
        jobs=target.jobs,
        matrix=cells.matrix,
        only=tuple(cells.only or ()),
        repeat=cells.repeat,
        seed=cells.seed,
        list_only=cells.list_only,
        limit_s=limits.limit,
        start_limit_s=limits.start_limit,
        group_timeout_s=limits.group_timeout,
        json_file=json_file,
        plot_file=target.plot,
    )


def _refuse_foreign(program: ScriptGroup, target: TargetGroup) -> None:
    """Refuses options of an engine for a script, and of a script for an engine: they would say nothing."""
    if program.script is not None:
        of_engine = {f"--{name}": value for name, value in asdict(target).items()}
        _refuse_given(of_engine, "it is for Lockstep's engine, and --script names a program instead")
    else:
        of_script = {"--ranks": program.ranks, "--nccl-shim": program.nccl_shim or None}
        _refuse_given(of_script, "it is for a program of your own, and no --script names one")


def _refuse_given(options: Mapping[str, object], why: str) -> None:
    for option, value in options.items():
        if value is not None:
            raise BadParameter(f"{option} is given: {why}")
