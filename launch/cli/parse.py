"""The command line: what may be said, and what it means as a ``Command``. It starts nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer
from typer.exceptions import TyperException

from launch.cli import bench, chaos, types
from launch.cli import grammar as grammar_cli
from launch.cli.engine import engine_options
from launch.cli.errors import worded
from launch.cli.groups import (
    EngineGroup,
    GeneratingGroup,
    GrammarGroup,
    GrammarOptionGroup,
    HttpGroup,
    NodeGroup,
    SamplingGroup,
    given_fields,
    spread,
)
from launch.cli.help import PanelCommand, PanelGroup
from launch.commands import (
    Command,
    DoctorCommand,
    GenerateCommand,
    OutputFormat,
    RankCommand,
    SampleCommand,
    ServeCommand,
    TraceSummaryCommand,
)
from launch.exit_codes import ExitCode
from launch.options import EngineOptions, HttpOptions, NodeOptions, RankOptions
from sampler.params import MAX_LOGPROBS

_NAMES = frozenset({"served_model_name", "host", "rdzv_endpoint", "rdzv_id", "input_file", "script", "model"})
"""Options that are texts and need one that is not empty, as those do that are paths."""

MAX_DRAWS = 10**12
"""Of a line of ``lockstep sample``."""

app = typer.Typer(
    name="lockstep",
    help="Multi-process LLM inference whose tensor- and pipeline-parallel ranks are always in step.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    cls=PanelGroup,
    rich_markup_mode=None,
)
app.add_typer(bench.app, name="bench")
app.command(name="check-grammar", cls=PanelCommand)(grammar_cli.check_grammar)
app.command(name="chaos", cls=PanelCommand)(chaos.chaos)


class UsageError(ValueError):
    """The command line or a file it names is wrong."""


def parse_command(argv: list[str]) -> Command | int:
    """Returns what ``argv`` asks for, or an exit code when there is nothing to do (``--help``).

    Raises:
        UsageError: It is malformed, or names a file that cannot be read or a value out of its range.
        KeyboardInterrupt: Ctrl-C came meanwhile.
    """
    _refuse_empty(argv)
    try:
        result: Command | int | None = app(args=argv, prog_name="lockstep", standalone_mode=False)
    except TyperException as error:
        raise UsageError(worded(error)) from error
    if result == ExitCode.INTERRUPTED:
        # typer turns Ctrl-C into this code, and says nothing.
        raise KeyboardInterrupt
    return 0 if result is None else result


@app.command(cls=PanelCommand)
@spread
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; or use --input.", show_default=False)] = None,
    *,
    input_file: types.Input = None,
    output: types.Output = None,
    output_format: Annotated[
        OutputFormat,
        typer.Option("--format", help="auto = text for prompts from the command line without --logprobs, else jsonl."),
    ] = "auto",
    chat: Annotated[bool, typer.Option("--chat", help="Prompts from the command line are user messages.")] = False,
    metrics_file: types.MetricsFile = None,
    engine: EngineGroup,
    generating: GeneratingGroup,
    nodes: NodeGroup,
    sampling: SamplingGroup,
    grammar: GrammarGroup,
    details: GrammarOptionGroup,
) -> Command:
    """Generates for prompts from the command line, a JSONL file or stdin.

    Under torchrun (torchrun --nproc-per-node 8 -m launch generate --tp 4 --pp 2 ...) the same command line is a rank;
    otherwise it starts the ranks itself.
    """
    grammars = grammar_cli.grammar_fields(grammar) | grammar_cli.grammar_options(details)
    if bool(prompts) == (input_file is not None):
        raise UsageError("give prompts, or --input FILE (- for stdin), but not both")
    options = engine_options(engine, generating)
    return GenerateCommand(
        engine=options,
        nodes=_nodes(options, nodes),
        prompts=tuple(prompts or ()),
        input_file=input_file,
        output_file=output,
        output_format=_format(output_format, sampling),
        chat=chat,
        metrics_file=metrics_file,
        defaults=given_fields(sampling) | grammars,
    )


@app.command(cls=PanelCommand)
@spread
def serve(
    *,
    http: HttpGroup,
    engine: EngineGroup,
    generating: GeneratingGroup,
    nodes: NodeGroup,
) -> Command:
    """Serves the model over HTTP in OpenAI's form: /v1/chat/completions, /v1/completions, /v1/models and more.

    Under torchrun the same command line is a rank; otherwise it starts the ranks itself.
    """
    options = engine_options(engine, generating)
    given = asdict(http)
    health_timeout_s, journal_keep_s = given.pop("health_timeout"), given.pop("journal_keep")
    return ServeCommand(
        engine=options,
        nodes=_nodes(options, nodes),
        http=HttpOptions(**given, health_timeout_s=health_timeout_s, journal_keep_s=journal_keep_s),
    )


@app.command(hidden=True, cls=PanelCommand)
def rank(options: Annotated[str, typer.Argument(help="The engine's options as JSON.")]) -> Command:
    """Is a rank of an engine that a Python program started; runs under its torchrun only."""
    try:
        return RankCommand(engine=msgspec.json.decode(options, type=EngineOptions, dec_hook=_path))
    except msgspec.MsgspecError as error:
        raise UsageError(f"rank: the options cannot be read: {error}") from error


@app.command(cls=PanelCommand)
@spread
def score(
    input_file: types.Input = None,
    *,
    output: types.Output = None,
    top: Annotated[int, typer.Option(min=0, max=MAX_LOGPROBS, help="Report this many of the likeliest ids too.")] = 0,
    metrics_file: types.MetricsFile = None,
    engine: EngineGroup,
    group_timeout: types.GroupTimeout = 30.0,
    start_timeout: types.StartTimeout = 120.0,
    logit_processors: types.LogitProcessors = None,
) -> Command:
    """Tells the logprob of every token of given texts or ids, as the model would have drawn them; generates nothing."""
    if input_file is None:
        raise UsageError("give --input FILE (- for stdin): one prompt, prompt_token_ids or messages a line")
    generating = GeneratingGroup(
        group_timeout=group_timeout, start_timeout=start_timeout, logit_processors=logit_processors
    )
    return GenerateCommand(
        engine=engine_options(engine, generating),
        nodes=NodeOptions(),
        input_file=input_file,
        output_file=output,
        output_format="jsonl",
        score=True,
        metrics_file=metrics_file,
        defaults={"prompt_logprobs": top},
    )


@app.command(cls=PanelCommand)
def sample(
    input_file: Annotated[Path, typer.Option("--input", help="JSONL file: id, logits and params a line.")],
    *,
    output: types.Output = None,
    tp: Annotated[int, typer.Option(min=1, max=64, help="Ranks that hold slices of the vocabulary.")] = 1,
    draws: Annotated[int, typer.Option(min=0, max=MAX_DRAWS, help="Tokens to draw for counts.")] = 0,
    nan_policy: Annotated[
        Literal["error", "sanitize"], typer.Option(help="NaN and +inf end their row, or count as absent and 1e30.")
    ] = "error",
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option()] = "auto",
) -> Command:
    """Replays one sampling step a line from its logits, to see what may be drawn and why a token was."""
    return SampleCommand(
        ranks=RankOptions(tp=tp, device=device),
        input_file=input_file,
        output_file=output,
        draws=draws,
        nan_policy=nan_policy,
    )


@app.command(cls=PanelCommand)
def doctor(
    model: types.Model = None,
    tp: types.Tp = 1,
    pp: types.Pp = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> Command:
    """Says what this machine has, and what would fail; exits with 2 when something would."""
    return DoctorCommand(model=model, tp=tp, pp=pp, as_json=as_json)


@app.command(cls=PanelCommand)
def trace_summary(
    trace: Annotated[Path, typer.Argument(help="A file that --trace wrote.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> Command:
    """Says what each rank of a trace spent its time on, and how much of it on waiting for others."""
    return TraceSummaryCommand(trace=trace, as_json=as_json)


def _refuse_empty(argv: Sequence[str]) -> None:
    """Refuses an empty text where a path or a name is needed: it is what a variable of the shell that is not set gives.

    Raises:
        UsageError: An option is given one.
    """
    options = argv[: argv.index("--")] if "--" in argv else argv
    empty = {given.removesuffix("=") for given in options if given.startswith("--") and given.endswith("=")}
    empty |= {given for given, value in pairwise(options) if value == ""}
    if not empty:
        return
    group: Any = typer.main.get_command(app)
    for argument in options:
        if not hasattr(group, "commands") or argument not in group.commands:
            break
        group = group.commands[argument]
    for option in group.params:
        found = empty.intersection(option.opts)
        if found and (option.get_runtime_param().annotation is Path or option.name in _NAMES):
            raise UsageError(f"{found.pop()} is empty: leave it out, or give a value")


def _format(asked: OutputFormat, sampling: SamplingGroup) -> OutputFormat:
    if sampling.logprobs is None:
        return asked
    if asked == "text":
        raise UsageError("--logprobs is given, but --format text shows none: --format jsonl is needed")
    return "jsonl"


def _nodes(engine: EngineOptions, nodes: NodeGroup) -> NodeOptions:
    nnodes, node_rank = nodes.nnodes, nodes.node_rank
    if nnodes > 1 and nodes.rdzv_endpoint is None:
        raise UsageError(f"--nnodes is {nnodes}: --rdzv-endpoint HOST:PORT is needed, where the nodes meet")
    if nnodes > 1 and nodes.rdzv_backend == "static" and node_rank is None:
        raise UsageError(f"--rdzv-backend static with --nnodes {nnodes}: --node-rank 0..{nnodes - 1} is needed")
    if node_rank is not None and node_rank >= nnodes:
        raise UsageError(f"--node-rank is {node_rank}: 0..{nnodes - 1} is needed with --nnodes {nnodes}")
    if engine.world_size % nnodes:
        raise UsageError(f"--tp {engine.tp} x --pp {engine.pp} ranks do not spread evenly over --nnodes {nnodes}")
    return NodeOptions(**asdict(nodes))


def _path(kind: type, value: Any) -> Path:
    """Returns a path of the options; msgspec has what is raised for a value of the wrong type name its field."""
    if kind is not Path:
        raise TypeError(f"{kind.__name__} cannot be read from JSON")
    return Path(value)
