"""What a command was asked to do: frozen, read once, passed down by value."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from launch.options import EngineOptions, HttpOptions, NodeOptions, RankOptions

FailOn = Literal["refused", "text", "not-enforced"]
"""What may make ``check-grammar`` fail: a grammar that is refused, a text that is not taken or refused as wanted, a
grammar that is accepted but not enforced in full."""

OutputFormat = Literal["auto", "text", "jsonl"]


class GenerateCommand(msgspec.Struct, frozen=True, kw_only=True):
    """``lockstep generate`` and ``lockstep score``.

    Args:
        engine: The engine.
        nodes: The nodes.
        prompts: Prompts from the command line.
        input_file: JSONL file, ``-`` for stdin; None = prompts from the command line.
        output_file: Where to write; None = stdout.
        output_format: ``jsonl``, ``text`` or ``auto``.
        chat: Whether prompts from the command line are user messages.
        score: Whether to generate nothing and report the logprobs of the given tokens.
        defaults: Request fields for requests that lack them.
        metrics_file: Where to write the run's metrics at its end; None = nowhere.
    """

    engine: EngineOptions
    nodes: NodeOptions
    prompts: tuple[str, ...] = ()
    input_file: str | None = None
    output_file: Path | None = None
    output_format: OutputFormat = "auto"
    chat: bool = False
    score: bool = False
    defaults: dict[str, Any] = {}
    metrics_file: Path | None = None


class ServeCommand(msgspec.Struct, frozen=True, kw_only=True):
    """``lockstep serve``.

    Args:
        engine: The engine.
        nodes: The nodes.
        http: How it answers.
    """

    engine: EngineOptions
    nodes: NodeOptions
    http: HttpOptions


class RankCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A rank of an engine that a Python program started; no command for people.

    Args:
        engine: The engine.
    """

    engine: EngineOptions


class DoctorCommand(msgspec.Struct, frozen=True, kw_only=True):
    """``lockstep doctor``.

    Args:
        model: The model to check; None = the default model.
        tp: Ranks of a stage to check for.
        pp: Stages to check for.
        as_json: Whether to print one JSON document.
    """

    model: Path | None
    tp: int
    pp: int
    as_json: bool


class CheckGrammarCommand(msgspec.Struct, frozen=True, kw_only=True):
    """``lockstep check-grammar``.

    Args:
        model: Whose vocabulary grammars are compiled for: folder or GGUF file.
        input_file: JSONL file, ``-`` for stdin; None = one grammar from the command line.
        output_file: Where to write; None = stdout.
        output_format: ``jsonl``, ``text`` or ``auto``.
        grammar: Request fields of the grammar from the command line.
        options: Request fields of how grammars are enforced, for those that do not say.
        texts: Texts to check against it.
        strict: For lines that do not say.
        grammar_backend: Which engines may be used.
        grammar_timeout_s: How long a grammar may take to compile.
        fail_on: What makes the exit code ``GRAMMARS_FAILED``.
    """

    model: Path
    input_file: str | None = None
    output_file: Path | None = None
    output_format: OutputFormat = "auto"
    grammar: dict[str, Any] = {}
    options: dict[str, Any] = {}
    texts: tuple[str, ...] = ()
    strict: bool = True
    grammar_backend: Literal["auto", "xgrammar", "llguidance"] = "auto"
    grammar_timeout_s: float = 10.0
    fail_on: tuple[FailOn, ...] = ("refused", "text")


class SampleCommand(msgspec.Struct, frozen=True, kw_only=True):
    """``lockstep sample``.

    Args:
        ranks: The ranks that hold the vocabulary slices; one stage.
        input_file: JSONL file, a sampling step a line.
        output_file: Where to write; None = stdout.
        draws: How many tokens to draw for ``counts``.
        nan_policy: ``error`` or ``sanitize``.
    """

    ranks: RankOptions
    input_file: Path
    output_file: Path | None
    draws: int
    nan_policy: Literal["error", "sanitize"]


class BenchSamplerCommand(msgspec.Struct, frozen=True, kw_only=True):
    """``lockstep bench sampler``.

    Args:
        ranks: The ranks that hold the vocabulary slices; one stage.
        batch: Rows.
        vocab: Vocabulary size.
        cases: Names of the cases to run; all when empty.
        repeats: Repeats of each contestant.
        json_file: Where to write every figure; None = nowhere.
    """

    ranks: RankOptions
    batch: int
    vocab: int
    cases: tuple[str, ...]
    repeats: int
    json_file: Path | None


class TraceSummaryCommand(msgspec.Struct, frozen=True, kw_only=True):
    """``lockstep trace-summary``.

    Args:
        trace: A file that ``--trace`` wrote.
        as_json: Whether to print one JSON document.
    """

    trace: Path
    as_json: bool


class BenchDecodeCommand(msgspec.Struct, frozen=True, kw_only=True):
    """``lockstep bench decode``.

    Args:
        engine: The engine.
        batches: Sequences that decode together, one case each.
        prompt_tokens: Of each sequence.
        new_tokens: To generate for each.
        prefill_tokens: Prompt of the case that measures the time to the first token; 0 = no such case.
        repeats: Runs of each contestant, in turn.
        constrained: Whether to run each case under a JSON Schema too.
        peer: What to compare with.
        json_file: Where to write every figure; None = nowhere.
    """

    engine: EngineOptions
    batches: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    prefill_tokens: int
    repeats: int
    constrained: bool
    peer: Literal["transformers", "none"]
    json_file: Path | None


class BenchServeCommand(msgspec.Struct, frozen=True, kw_only=True):
    """``lockstep bench serve``.

    Args:
        url: The server's address, as clients of OpenAI's interface have it: with ``/v1`` where it has that.
        model: The model's name; None = the first that the server lists.
        requests: How many are sent.
        rate: Requests a second, which come as a Poisson process; None = a closed loop.
        concurrency: Requests under way at once in a closed loop; None = they come at a rate.
        constrained: Share of the requests that want JSON of a schema.
        prefixed: Share of the requests that begin with one of a few long texts.
        prefix_words: Words of each such text.
        prompt_words: Words of each prompt of its own.
        max_tokens: To generate for each at most.
        ignore_eos: Whether plain requests are told to go on to ``max_tokens``, which not every server knows.
        seed: Of the requests, and of when they come.
        timeout_s: How long a request may take.
        ttft_goal_s: Time to the first token within which a request is a good one.
        tpot_goal_s: Mean time between its tokens, likewise.
        api_key_file: File with the key; None = the environment's, if any.
        json_file: Where to write every figure; None = nowhere.
    """

    url: str
    model: str | None
    requests: int
    rate: float | None
    concurrency: int | None
    constrained: float
    prefixed: float
    prefix_words: int
    prompt_words: int
    max_tokens: int
    ignore_eos: bool
    seed: int
    timeout_s: float
    ttft_goal_s: float
    tpot_goal_s: float
    api_key_file: Path | None
    json_file: Path | None


class BenchInvariantCommand(msgspec.Struct, frozen=True, kw_only=True):
    """``lockstep bench invariant``.

    Args:
        engine: The engine: one stage, in invariant mode.
        batches: Sequences that decode together, one case each.
        context: Tokens of each sequence before the step.
        prefill_tokens: Prompt of the case that measures prefill; 0 = no such case.
        repeats: Steps of each mode, in turn.
        json_file: Where to write every figure; None = nowhere.
    """

    engine: EngineOptions
    batches: tuple[int, ...]
    context: int
    prefill_tokens: int
    repeats: int
    json_file: Path | None


class ChaosCommand(msgspec.Struct, frozen=True, kw_only=True):
    """``lockstep chaos``.

    Args:
        script: ``module:function`` to put to faults; None = Lockstep's own engine.
        ranks: Ranks of the script.
        model: The engine's model; None = a tiny random one.
        tp: Ranks of a stage of the engine.
        pp: Stages of the engine.
        matrix: Which cells: ``quick``, ``pairwise`` or ``full``.
        only: Patterns for the names of cells.
        repeat: Runs of each cell.
        seed: Of the choice of cells.
        limit_s: How long ranks may take to leave once the fault happened.
        start_limit_s: How long a run may take until its fault happens.
        group_timeout_s: Time-out of every process group; None = the program's own.
        json_file: Where to write every figure; None = nowhere.
        plot_file: Where to write an engine's times as SVG; None = nowhere.
        list_only: Whether to print the names of the cells and run none.
        nccl_shim: Whether faults that NCCL itself can have happen within it.
        jobs: Cells of an engine that run at the same time; None = as many as the cores allow.
    """

    script: str | None
    ranks: int
    model: Path | None
    tp: int
    pp: int
    matrix: Literal["quick", "pairwise", "full"]
    only: tuple[str, ...]
    repeat: int
    seed: int
    limit_s: float
    start_limit_s: float
    group_timeout_s: float | None
    json_file: Path | None
    plot_file: Path | None
    list_only: bool
    nccl_shim: bool
    jobs: int | None


Command = (
    GenerateCommand
    | ServeCommand
    | RankCommand
    | SampleCommand
    | DoctorCommand
    | CheckGrammarCommand
    | BenchSamplerCommand
    | BenchDecodeCommand
    | BenchServeCommand
    | BenchInvariantCommand
    | TraceSummaryCommand
    | ChaosCommand
)
