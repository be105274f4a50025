"""The command line of ``lockstep chaos``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import BadParameter

from launch.options import ChaosCommand, Command

_ENGINE = "Lockstep's own engine"
_SCRIPT = "A script of your own"
_CELLS = "Which cells"


def chaos(
    *,
    script: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Put this program to faults instead of Lockstep's engine. torchrun starts it; it is found from here.",
            show_default=False,
            rich_help_panel=_SCRIPT,
        ),
    ] = None,
    ranks: Annotated[int, typer.Option(min=2, max=64, help="Its ranks.", rich_help_panel=_SCRIPT)] = 2,
    nccl_shim: Annotated[
        bool,
        typer.Option(
            "--nccl-shim",
            help="Errors, delays and hangs happen within NCCL: in a library before it that the C compiler builds.",
            rich_help_panel=_SCRIPT,
        ),
    ] = False,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Hugging Face folder or GGUF file.", show_default="a tiny random one", rich_help_panel=_ENGINE
        ),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks of a stage.", rich_help_panel=_ENGINE)] = 2,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages.", rich_help_panel=_ENGINE)] = 2,
    matrix: Annotated[
        Literal["quick", "pairwise", "full"],
        typer.Option(
            help="Each kind of fault once, any two properties of a fault together, or all there is.",
            rich_help_panel=_CELLS,
        ),
    ] = "quick",
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Those with such names only, as kill/*; may be given again.",
            show_default="all",
            rich_help_panel=_CELLS,
        ),
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each cell.", rich_help_panel=_CELLS)] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of the choice of cells.", rich_help_panel=_CELLS)] = 0,
    list_only: Annotated[
        bool, typer.Option("--list", help="Print the cells' names and run none.", rich_help_panel=_CELLS)
    ] = False,
    limit: Annotated[
        float, typer.Option(min=1, max=3600, help="Seconds that ranks have to leave once the fault happened.")
    ] = 20.0,
    start_limit: Annotated[
        float, typer.Option(min=1, max=3600, help="Seconds that a run may take until its fault happens.")
    ] = 120.0,
    group_timeout: Annotated[
        float | None,
        typer.Option(
            min=0.1, max=3600, help="Time-out of every process group, in seconds.", show_default="the program's own"
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Where to write every figure.", show_default="nowhere")
    ] = None,
) -> Command:
    """Puts faults into running ranks and tells what became of each: of Lockstep's engine, or of a script of your own.

    Exit code 8 says that a promise was broken, or that the script hung or gave wrong results without an error.
    """
    if script is not None and not re.fullmatch(r"[\w.]+:\w+", script):
        raise BadParameter(f"--script is {script!r}: module:function is needed")
    return ChaosCommand(
        script=script,
        ranks=ranks,
        model=model,
        tp=tp,
        pp=pp,
        matrix=matrix,
        only=tuple(only or ()),
        repeat=repeat,
        seed=seed,
        limit_s=limit,
        start_limit_s=start_limit,
        group_timeout_s=group_timeout,
        json_file=json_file,
        list_only=list_only,
        nccl_shim=nccl_shim,
    )
