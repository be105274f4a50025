"""The command line: what may be said, and what it means as a ``Command``. It starts nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer.exceptions import TyperException

from launch import cli_bench, cli_grammar
from launch import cli_types as types
from launch.default_model import default_model
from launch.exit_codes import ExitCode
from launch.options import (
    Command,
    DoctorCommand,
    EngineOptions,
    GenerateCommand,
    NodeOptions,
    OutputFormat,
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
app.add_typer(cli_bench.app, name="bench")
app.command(name="check-grammar")(cli_grammar.check_grammar)


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
    except typer.Abort as error:
        raise KeyboardInterrupt from error
    if result == ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    return 0 if result is None else result


@app.command()
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; or use --input.", show_default=False)] = None,
    *,
    input_file: types.Input = None,
    output: types.Output = None,
    output_format: Annotated[
        OutputFormat,
        typer.Option("--format", help="auto = text for prompts from the command line, else jsonl."),
    ] = "auto",
    chat: Annotated[bool, typer.Option("--chat", help="Prompts from the command line are user messages.")] = False,
    model: types.Model = None,
    tp: types.Tp = 1,
    pp: types.Pp = 1,
    pp_layers: types.PpLayers = None,
    dtype: types.Dtype = "auto",
    device: types.Device = "auto",
    max_model_len: types.MaxModelLen = None,
    max_num_seqs: types.MaxNumSeqs = 64,
    max_batch_tokens: types.MaxBatchTokens = 2048,
    kv_cache_bytes: types.KvCacheBytes = None,
    prefix_cache: types.PrefixCache = True,
    group_timeout: types.GroupTimeout = 30.0,
    start_timeout: types.StartTimeout = 120.0,
    grammar_timeout: types.GrammarTimeout = 10.0,
    grammar_backend: types.GrammarBackendChoice = "auto",
    grammar_memory_bytes: types.GrammarMemoryBytes = 512 << 20,
    grammar_cache_bytes: types.GrammarCacheBytes = 512 << 20,
    grammar_cache_dir: types.GrammarCacheDir = None,
    threads_per_rank: types.ThreadsPerRank = None,
    reasoning_marker: types.ReasoningMarker = None,
    reasoning_start_marker: types.ReasoningStartMarker = None,
    post_check: types.PostCheck = True,
    logit_processors: types.LogitProcessors = None,
    audit: types.Audit = False,
    nnodes: types.Nnodes = 1,
    node_rank: types.NodeRank = None,
    rdzv_endpoint: types.RdzvEndpoint = None,
    rdzv_backend: types.RdzvBackend = "c10d",
    rdzv_id: types.RdzvId = None,
    max_tokens: types.MaxTokens = None,
    temperature: types.Temperature = None,
    top_p: types.TopP = None,
    top_k: types.TopK = None,
    min_p: types.MinP = None,
    seed: types.Seed = None,
    n: types.NumChoices = None,
    stop: types.Stop = None,
    logprobs: types.Logprobs = None,
    enable_thinking: types.EnableThinking = None,
    thinking_budget: types.ThinkingBudget = None,
    json_schema: types.JsonSchema = None,
    json_object: types.JsonObject = False,
    regex: types.Regex = None,
    ebnf: types.Ebnf = None,
    choice: types.Choice = None,
    structural_tag: types.StructuralTag = None,
    any_whitespace: types.AnyWhitespace = None,
    max_whitespace: types.MaxWhitespace = None,
    max_string_length: types.MaxStringLength = None,
    max_items: types.MaxItems = None,
    ebnf_root: types.EbnfRoot = None,
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
        "logprobs": logprobs,
        "enable_thinking": enable_thinking,
        "thinking_budget": thinking_budget,
    }
    grammars = cli_grammar.grammar_fields(
        json_schema=json_schema,
        json_object=json_object,
        regex=regex,
        ebnf=ebnf,
        choice=choice,
        structural_tag=structural_tag,
    )
    options = cli_grammar.grammar_options(
        any_whitespace=any_whitespace,
        max_whitespace=max_whitespace,
        max_string_length=max_string_length,
        max_items=max_items,
        ebnf_root=ebnf_root,
    )
    if bool(prompts) == (input_file is not None):
        raise UsageError("give prompts, or --input FILE (- for stdin), but not both")
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
        prefix_cache=prefix_cache,
        group_timeout_s=_seconds("--group-timeout", group_timeout),
        start_timeout_s=_seconds("--start-timeout", start_timeout),
        grammar_timeout_s=_seconds("--grammar-timeout", grammar_timeout),
        grammar_backend=grammar_backend,
        grammar_memory_bytes=grammar_memory_bytes,
        grammar_cache_bytes=grammar_cache_bytes,
        grammar_cache_dir=grammar_cache_dir,
        threads_per_rank=threads_per_rank,
        reasoning_marker=reasoning_marker,
        reasoning_start_marker=reasoning_start_marker,
        post_check=post_check,
        logit_processors=tuple(logit_processors or ()),
        audit=audit,
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
        defaults={name: value for name, value in sampling.items() if value is not None} | grammars | options,
    )


@app.command()
def score(
    input_file: types.Input = None,
    *,
    output: types.Output = None,
    top: Annotated[int, typer.Option(min=0, max=20, help="Report this many of the likeliest ids too.")] = 0,
    model: types.Model = None,
    tp: types.Tp = 1,
    pp: types.Pp = 1,
    pp_layers: types.PpLayers = None,
    dtype: types.Dtype = "auto",
    device: types.Device = "auto",
    max_model_len: types.MaxModelLen = None,
    max_num_seqs: types.MaxNumSeqs = 64,
    max_batch_tokens: types.MaxBatchTokens = 2048,
    kv_cache_bytes: types.KvCacheBytes = None,
    prefix_cache: types.PrefixCache = True,
    threads_per_rank: types.ThreadsPerRank = None,
) -> Command:
    """Tells the logprob of every token of given texts or ids, as the model would have drawn them; generates nothing."""
    if input_file is None:
        raise UsageError("give --input FILE (- for stdin): one prompt, prompt_token_ids or messages a line")
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
        prefix_cache=prefix_cache,
        threads_per_rank=threads_per_rank,
    )
    return GenerateCommand(
        engine=engine,
        nodes=NodeOptions(),
        input_file=input_file,
        output_file=output,
        output_format="jsonl",
        score=True,
        defaults={"prompt_logprobs": top},
    )


@app.command()
def sample(
    input_file: Annotated[Path, typer.Option("--input", help="JSONL file: id, logits and params a line.")],
    *,
    output: Annotated[Path | None, typer.Option(help="Where to write.", show_default="stdout")] = None,
    tp: Annotated[int, typer.Option(min=1, max=64, help="Ranks that hold slices of the vocabulary.")] = 1,
    draws: Annotated[int, typer.Option(min=0, help="Tokens to draw for counts.")] = 0,
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


@app.command()
def doctor(
    model: types.Model = None,
    tp: types.Tp = 1,
    pp: types.Pp = 1,
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


def _seconds(option: str, value: float) -> float:
    if not math.isfinite(value):
        raise UsageError(f"{option} is {value}: a finite number of seconds is needed")
    return value


def _counts(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise UsageError(f"--pp-layers is {text!r}: numbers of layers such as 8,7 are needed")
    return tuple(int(part) for part in parts)
