"""The command line of ``lockstep bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import typer
from msgspec import structs
from typer import BadParameter

from launch.bench.cases import CASES
from launch.cli.engine import counts, engine_options
from launch.cli.groups import EngineGroup, GeneratingGroup, spread
from launch.cli.help import PanelCommand, PanelGroup
from launch.cli.types import JsonFile
from launch.commands import BenchDecodeCommand, BenchInvariantCommand, BenchSamplerCommand, BenchServeCommand, Command
from launch.options import LONGEST_S, RankOptions

app = typer.Typer(
    help="Measures a part of Lockstep, or a server, against others and the hardware's floor.",
    no_args_is_help=True,
    cls=PanelGroup,
    rich_markup_mode=None,
)

# One contestant may take long on one rank while the others wait for it.
_GROUP_TIMEOUT_S = 600.0
_CONCURRENCY = 8
_NAMES = tuple(case.name for case in CASES)


def _case_names(text: str | None) -> tuple[str, ...]:
    names = tuple(text.split(",")) if text is not None else ()
    for name in names:
        if name not in _NAMES:
            raise BadParameter(f"{name!r} is no case; there are {', '.join(_NAMES)}", param_hint="--cases")
    return names


@app.callback()
def group() -> None:
    """Measures a part of Lockstep, or a server, against others and the hardware's floor."""


@app.command(cls=PanelCommand)
def sampler(
    *,
    batch: Annotated[int, typer.Option(min=1, help="Rows.")] = 64,
    vocab: Annotated[int, typer.Option(min=64, help="Vocabulary size.")] = 151_936,
    tp: Annotated[int, typer.Option(min=1, max=64, help="Ranks that hold slices of the vocabulary.")] = 1,
    cases: Annotated[
        str | None, typer.Option(help=f"Comma-separated: {', '.join(_NAMES)}.", show_default="all")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads of a rank.", show_default="cores ÷ ranks")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats of each contestant, in turn.")] = 20,
    json_file: JsonFile = None,
) -> Command:
    """Times the sampler, case by case, against plain torch samplers and one pass over the logits."""
    return BenchSamplerCommand(
        ranks=RankOptions(tp=tp, threads_per_rank=threads, group_timeout_s=_GROUP_TIMEOUT_S),
        batch=batch,
        vocab=vocab,
        cases=_case_names(cases),
        repeats=repeats,
        json_file=json_file,
    )


@app.command(cls=PanelCommand)
@spread
def decode(
    *,
    batches: Annotated[str, typer.Option(help="Comma-separated: sequences that decode together.")] = "1,8,32",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Prompt of each sequence.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=3, help="Tokens to generate for each sequence.")] = 64,
    prefill_tokens: Annotated[
        int, typer.Option(min=0, help="Prompt of the case that measures the first token alone; 0 = none.")
    ] = 512,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each contestant, in turn.")] = 3,
    constrained: Annotated[bool, typer.Option(help="Run each case under a JSON Schema on every row too.")] = True,
    peer: Annotated[
        Literal["transformers", "none"],
        typer.Option(help="What to compare with: generate of transformers, in the same dtype, with as many threads."),
    ] = "transformers",
    json_file: JsonFile = None,
    engine: EngineGroup,
) -> Command:
    """Times decoding, with and without a grammar, against transformers and the memory's speed."""
    return BenchDecodeCommand(
        engine=engine_options(engine, GeneratingGroup()),
        batches=_batches(batches),
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        prefill_tokens=prefill_tokens,
        repeats=repeats,
        constrained=constrained,
        peer=peer,
        json_file=json_file,
    )


@app.command(cls=PanelCommand)
@spread
def invariant(
    *,
    batches: Annotated[str, typer.Option(help="Comma-separated: sequences that decode together.")] = "1,8,32",
    context: Annotated[int, typer.Option(min=1, help="Tokens of each sequence before the step.")] = 64,
    prefill_tokens: Annotated[int, typer.Option(min=0, help="Prompt of the case that measures prefill.")] = 512,
    repeats: Annotated[int, typer.Option(min=1, help="Steps of each mode, in turn.")] = 15,
    json_file: JsonFile = None,
    engine: EngineGroup,
) -> Command:
    """Times steps of the model in invariant mode against the default mode."""
    if engine.pp > 1:
        raise BadParameter(f"--pp is {engine.pp}: one stage is measured, stages change nothing in either mode")
    return BenchInvariantCommand(
        engine=structs.replace(engine_options(engine, GeneratingGroup()), invariant=True),
        batches=_batches(batches),
        context=context,
        prefill_tokens=prefill_tokens,
        repeats=repeats,
        json_file=json_file,
    )


@app.command(cls=PanelCommand)
def serve(
    url: Annotated[str, typer.Argument(help="Where the server is, as http://127.0.0.1:8000; any of OpenAI's form.")],
    *,
    model: Annotated[
        str | None, typer.Option(help="The model's name.", show_default="the first that the server lists")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="How many to send.")] = 64,
    rate: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=LONGEST_S,
            help="Requests a second, coming as a Poisson process.",
            show_default="a closed loop",
        ),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests under way at once, in a closed loop.", show_default="8")
    ] = None,
    constrained: Annotated[float, typer.Option(min=0, max=1, help="Share that wants JSON of a schema.")] = 0.5,
    prefixed: Annotated[float, typer.Option(min=0, max=1, help="Share that begins with one of four texts.")] = 0.5,
    prefix_words: Annotated[int, typer.Option(min=0, help="Words of each of those texts.")] = 128,
    prompt_words: Annotated[int, typer.Option(min=1, help="Words of each prompt's own.")] = 32,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for each at most.")] = 64,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Have plain requests go on to --max-tokens; few servers know it.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the requests, and of when they come.")] = 0,
    timeout: Annotated[float, typer.Option(min=0.001, max=LONGEST_S, help="Seconds that a request may take.")] = 120.0,
    ttft_goal: Annotated[
        float, typer.Option(min=0, max=LONGEST_S, help="A good request has its first token in so many seconds.")
    ] = 2,
    tpot_goal: Annotated[
        float, typer.Option(min=0, max=LONGEST_S, help="And one every so many seconds, in the mean.")
    ] = 0.2,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with the key.", show_default="LOCKSTEP_API_KEY, else none is sent")
    ] = None,
    json_file: JsonFile = None,
) -> Command:
    """Sends seeded requests to a server of OpenAI's form, plain ones and constrained ones, and times the tokens."""
    if rate is not None and concurrency is not None:
        raise BadParameter("--rate and --concurrency are given: requests come at a rate, or so many at once")
    return BenchServeCommand(
        url=_web_address(url),
        model=model,
        requests=requests,
        rate=rate,
        concurrency=(concurrency or _CONCURRENCY) if rate is None else None,
        constrained=constrained,
        prefixed=prefixed,
        prefix_words=prefix_words,
        prompt_words=prompt_words,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        seed=seed,
        timeout_s=timeout,
        ttft_goal_s=ttft_goal,
        tpot_goal_s=tpot_goal,
        api_key_file=api_key_file,
        json_file=json_file,
    )


def _web_address(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadParameter(f"URL is {text!r}: an address such as http://127.0.0.1:8000/v1 is needed")
    return text


def _batches(text: str) -> tuple[int, ...]:
    batches = counts("--batches", text, "numbers of sequences such as 1,8,32")
    if 0 in batches:
        raise BadParameter(f"--batches is {text!r}: numbers of sequences such as 1,8,32 are needed")
    return batches
