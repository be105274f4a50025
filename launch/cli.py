"""The command line: what may be said, and what it means as a ``Command``. It starts nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer
from typer.exceptions import TyperException

from launch.default_model import default_model
from launch.options import (
    Command,
    DoctorCommand,
    EngineOptions,
    GenerateCommand,
    NodeOptions,
    RankOptions,
    SampleCommand,
)

app = typer.Typer(
    name="lockstep",
    help="Multi-process LLM inference whose tensor- and pipeline-parallel ranks are always in step.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

_ENGINE = "Engine"
_NODES = "Nodes (passed on to torchrun)"
_SAMPLING = "Defaults for requests that do not say"
_GRAMMAR = "Grammar (at most one; for requests that have none)"

Model = Annotated[
    Path | None,
    typer.Option(help="Hugging Face folder or GGUF file.", show_default="SmolLM2", rich_help_panel=_ENGINE),
]
Tp = Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks of a stage.", rich_help_panel=_ENGINE)]
Pp = Annotated[int, typer.Option(min=1, help="Pipeline stages.", rich_help_panel=_ENGINE)]


class UsageError(ValueError):
    """The command line or a file it names is wrong."""


def parse_command(argv: list[str]) -> Command | int:
    """Returns what ``argv`` asks for, or an exit code when there is nothing to do (``--help``).

    Raises:
        UsageError: It is malformed, or names a file that cannot be read or a value out of its range.
    """
    try:
        result: Command | int | None = app(args=argv, prog_name="lockstep", standalone_mode=False)
    except TyperException as error:
        raise UsageError(error.format_message()) from error
    return 0 if result is None else result


@app.command()
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; or use --input.", show_default=False)] = None,
    *,
    input_file: Annotated[
        str | None, typer.Option("--input", help="JSONL file, one request a line; - reads stdin.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Where to write.", show_default="stdout")] = None,
    output_format: Annotated[
        Literal["auto", "text", "jsonl"],
        typer.Option("--format", help="auto = text for prompts from the command line, else jsonl."),
    ] = "auto",
    chat: Annotated[bool, typer.Option("--chat", help="Prompts from the command line are user messages.")] = False,
    model: Model = None,
    tp: Tp = 1,
    pp: Pp = 1,
    pp_layers: Annotated[
        str | None,
        typer.Option(help="Layers of each stage, as 8,7.", show_default="balanced", rich_help_panel=_ENGINE),
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(help="auto = the checkpoint's own.", rich_help_panel=_ENGINE),
    ] = "auto",
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(rich_help_panel=_ENGINE)] = "auto",
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=2, help="Prompt and output together, in tokens.", show_default="the model's", rich_help_panel=_ENGINE
        ),
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences that run at once.", rich_help_panel=_ENGINE)] = 64,
    max_batch_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of one step; longer prompts run in chunks.", rich_help_panel=_ENGINE)
    ] = 2048,
    kv_cache_bytes: Annotated[int, typer.Option(min=1, help="KV cache of one rank.", rich_help_panel=_ENGINE)] = 2
    << 30,
    group_timeout: Annotated[
        float,
        typer.Option(min=1, help="Seconds until a collective or message fails.", rich_help_panel=_ENGINE),
    ] = 30.0,
    start_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds until all ranks must be up.", rich_help_panel=_ENGINE)
    ] = 120.0,
    grammar_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds a grammar may take to compile.", rich_help_panel=_ENGINE)
    ] = 10.0,
    threads_per_rank: Annotated[
        int | None,
        typer.Option(
            min=1, help="CPU threads of a rank.", show_default="cores ÷ ranks of the node", rich_help_panel=_ENGINE
        ),
    ] = None,
    nnodes: Annotated[
        int, typer.Option(min=1, help="Nodes; run the same command on each.", rich_help_panel=_NODES)
    ] = 1,
    node_rank: Annotated[
        int | None, typer.Option(min=0, help="This node, for --rdzv-backend static.", rich_help_panel=_NODES)
    ] = None,
    rdzv_endpoint: Annotated[
        str | None, typer.Option(help="host:port where the nodes meet.", rich_help_panel=_NODES)
    ] = None,
    rdzv_backend: Annotated[Literal["c10d", "static"], typer.Option(rich_help_panel=_NODES)] = "c10d",
    rdzv_id: Annotated[str | None, typer.Option(help="The job's name.", rich_help_panel=_NODES)] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens to generate at most.",
            show_default="256, or what the context leaves",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    temperature: Annotated[float | None, typer.Option(show_default="1", rich_help_panel=_SAMPLING)] = None,
    top_p: Annotated[float | None, typer.Option(show_default="1", rich_help_panel=_SAMPLING)] = None,
    top_k: Annotated[int | None, typer.Option(show_default="off", rich_help_panel=_SAMPLING)] = None,
    min_p: Annotated[float | None, typer.Option(show_default="0", rich_help_panel=_SAMPLING)] = None,
    seed: Annotated[int | None, typer.Option(show_default="random", rich_help_panel=_SAMPLING)] = None,
    # Not --n: torchrun would take it for an abbreviation of its own --nnodes.
    n: Annotated[
        int | None, typer.Option("-n", "--num-choices", help="Choices.", show_default="1", rich_help_panel=_SAMPLING)
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="Stop string; may be given again.", show_default=False, rich_help_panel=_SAMPLING),
    ] = None,
    json_schema: Annotated[
        str | None, typer.Option(help="JSON Schema, or a file that holds one.", rich_help_panel=_GRAMMAR)
    ] = None,
    json_object: Annotated[
        bool, typer.Option("--json-object", help="Any JSON object.", rich_help_panel=_GRAMMAR)
    ] = False,
    regex: Annotated[
        str | None, typer.Option(help="Regular expression for the whole output.", rich_help_panel=_GRAMMAR)
    ] = None,
    ebnf: Annotated[
        Path | None, typer.Option(help="File with a GBNF grammar whose root is 'root'.", rich_help_panel=_GRAMMAR)
    ] = None,
    choice: Annotated[
        str | None, typer.Option(help="Comma-separated list of outputs.", rich_help_panel=_GRAMMAR)
    ] = None,
) -> Command:
    """Generates for prompts from the command line, a JSONL file or stdin.

    Under torchrun (torchrun --nproc-per-node 8 -m launch generate --tp 4 --pp 2 ...) the same command line is a rank;
    otherwise it starts the ranks itself.
    """
    sampling = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "n": n,
        "stop": stop or None,
    }
    grammars = {
        "json_schema": None if json_schema is None else _schema(json_schema),
        "json_object": json_object or None,
        "regex": regex,
        "ebnf": None if ebnf is None else _text_of("--ebnf", ebnf),
        "choice": None if choice is None else choice.split(","),
    }
    if bool(prompts) == (input_file is not None):
        raise UsageError("give prompts, or --input FILE (- for stdin), but not both")
    for name, value in (("group", group_timeout), ("start", start_timeout), ("grammar", grammar_timeout)):
        if not math.isfinite(value):
            raise UsageError(f"--{name}-timeout is {value}: a finite number of seconds is needed")
    engine = EngineOptions(
        model=model if model is not None else default_model(),
        tp=tp,
        pp=pp,
        pp_layers=None if pp_layers is None else _counts(pp_layers),
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_batch_tokens=max_batch_tokens,
        kv_cache_bytes=kv_cache_bytes,
        group_timeout_s=group_timeout,
        start_timeout_s=start_timeout,
        grammar_timeout_s=grammar_timeout,
        threads_per_rank=threads_per_rank,
    )
    return GenerateCommand(
        engine=engine,
        nodes=_nodes(
            engine,
            nnodes=nnodes,
            node_rank=node_rank,
            rdzv_endpoint=rdzv_endpoint,
            rdzv_backend=rdzv_backend,
            rdzv_id=rdzv_id,
        ),
        prompts=tuple(prompts or ()),
        input_file=input_file,
        output_file=output,
        output_format=output_format,
        chat=chat,
        defaults={name: value for name, value in (sampling | grammars).items() if value is not None},
    )


@app.command()
def sample(
    input_file: Annotated[Path, typer.Option("--input", help="JSONL file: id, logits and params a line.")],
    *,
    output: Annotated[Path | None, typer.Option(help="Where to write.", show_default="stdout")] = None,
    tp: Annotated[int, typer.Option(min=1, max=64, help="Ranks that hold slices of the vocabulary.")] = 1,
    draws: Annotated[int, typer.Option(min=0, help="Tokens to draw for counts.")] = 0,
    nan_policy: Annotated[
        Literal["error", "sanitize"], typer.Option(help="What a NaN or +inf does: end its row, or be taken as absent.")
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


@app.command()
def doctor(
    model: Model = None,
    tp: Tp = 1,
    pp: Pp = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> Command:
    """Says what this machine has, and what would fail; exits with 2 when something would."""
    return DoctorCommand(model=model, tp=tp, pp=pp, as_json=as_json)


def _nodes(
    engine: EngineOptions,
    *,
    nnodes: int,
    node_rank: int | None,
    rdzv_endpoint: str | None,
    rdzv_backend: Literal["c10d", "static"],
    rdzv_id: str | None,
) -> NodeOptions:
    if nnodes > 1 and rdzv_endpoint is None:
        raise UsageError(f"--nnodes is {nnodes}: --rdzv-endpoint HOST:PORT is needed, where the nodes meet")
    if nnodes > 1 and rdzv_backend == "static" and node_rank is None:
        raise UsageError(f"--rdzv-backend static with --nnodes {nnodes}: --node-rank 0..{nnodes - 1} is needed")
    if node_rank is not None and node_rank >= nnodes:
        raise UsageError(f"--node-rank is {node_rank}: 0..{nnodes - 1} is needed with --nnodes {nnodes}")
    if engine.world_size % nnodes:
        raise UsageError(f"--tp {engine.tp} x --pp {engine.pp} ranks do not spread evenly over --nnodes {nnodes}")
    return NodeOptions(
        nnodes=nnodes,
        node_rank=node_rank,
        rdzv_endpoint=rdzv_endpoint,
        rdzv_backend=rdzv_backend,
        rdzv_id=rdzv_id,
    )


def _counts(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise UsageError(f"--pp-layers is {text!r}: numbers of layers such as 8,7 are needed")
    return tuple(int(part) for part in parts)


def _schema(text: str) -> Any:
    """Returns the schema that ``text`` is, or that the file it names holds."""
    source = (
        text if text.lstrip()[:1] in ("{", "") or text in ("true", "false") else _text_of("--json-schema", Path(text))
    )
    try:
        return msgspec.json.decode(source)
    except msgspec.DecodeError as error:
        raise UsageError(f"--json-schema: {error}") from error


def _text_of(option: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{option} {path}: {error}") from error
