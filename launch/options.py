"""What a command was asked to do: frozen, read once, passed down by value."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

FailOn = Literal["refused", "text", "not-enforced"]
"""What may make ``check-grammar`` fail: a grammar that is refused, a text that is not taken or refused as wanted, a
grammar that is accepted but not enforced in full."""

OutputFormat = Literal["auto", "text", "jsonl"]


class RankOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What every rank needs to come up; equal on every rank.

    Args:
        tp: Ranks of a stage.
        pp: Stages.
        device: ``auto``, ``cpu`` or ``cuda``.
        group_timeout_s: Time-out of every collective and message.
        start_timeout_s: How long all ranks may take to come up.
        threads_per_rank: Torch threads of a rank on the CPU; None = cores ÷ ranks of the node.
    """

    tp: int = 1
    pp: int = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    group_timeout_s: float = 30.0
    start_timeout_s: float = 120.0
    threads_per_rank: int | None = None

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.tp * self.pp


class EngineOptions(RankOptions, frozen=True, kw_only=True):
    """The engine's part of a command line; equal on every rank.

    Args:
        model: Folder or GGUF file.
        pp_layers: Layers of each stage; None = balanced.
        dtype: ``auto``, ``float32`` or ``bfloat16``.
        products: How products with weights are computed on the CPU: ``auto``, ``plain`` or ``onednn``.
        invariant: Whether bits may depend on neither ranks, batch, chunks nor cache.
        max_model_len: Prompt and output together; None = what the model was trained for.
        max_num_seqs: Sequences that run at once.
        max_batch_tokens: Tokens of one step.
        kv_cache_bytes: KV cache of one rank; None = from its free memory.
        prefix_cache: Whether requests may reuse KV entries that others computed for the same tokens.
        grammar_timeout_s: Seconds of CPU that a grammar may take to compile.
        grammar_backend: Which grammar engines may be used.
        grammar_memory_bytes: Memory that a compile may take.
        grammar_cache_bytes: Compiled grammars that a first-stage rank keeps.
        grammar_cache_dir: Folder where outcomes of vetting are kept from run to run; None = nowhere.
        reasoning_marker: Text that ends a model's thinking; None = what the model's own files make obvious.
        reasoning_start_marker: Text that begins it; None = what goes with the end marker.
        post_check: Whether finished JSON outputs are validated against their schemas.
        logit_processors: ``module:name`` of processors that requests may name, beside the installed ones.
        audit: Whether last-stage ranks check each other's draws.
        audit_every: In every how many steps ranks check that they still compute right numbers; 0 = never.
        trace: Where to write what every rank does; None = nowhere.
        max_recoveries: Faults of ranks that are survived in ``recovery_window_s``; with 0 the first ends the run.
        recovery_window_s: See there.
        stall_timeout_s: How long a rank that decodes may give no sign of life.
        fault_report: Where a line is appended for every fault of a rank; None = nowhere.
    """

    model: Path
    pp_layers: tuple[int, ...] | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    products: Literal["auto", "plain", "onednn"] = "auto"
    invariant: bool = False
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_batch_tokens: int = 2048
    kv_cache_bytes: int | None = None
    prefix_cache: bool = True
    grammar_timeout_s: float = 10.0
    reasoning_marker: str | None = None
    reasoning_start_marker: str | None = None
    grammar_backend: Literal["auto", "xgrammar", "llguidance"] = "auto"
    grammar_memory_bytes: int = 512 << 20
    grammar_cache_bytes: int = 512 << 20
    grammar_cache_dir: Path | None = None
    post_check: bool = True
    logit_processors: tuple[str, ...] = ()
    audit: bool = False
    audit_every: int = 0
    trace: Path | None = None
    max_recoveries: int = 5
    recovery_window_s: float = 300.0
    stall_timeout_s: float = 3.0
    fault_report: Path | None = None


class NodeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How ranks spread over nodes; passed on to torchrun.

    Args:
        nnodes: Nodes.
        node_rank: Which node this is; needed with static rendezvous only.
        rdzv_endpoint: ``host:port`` where the nodes meet; needed with more than one node.
        rdzv_backend: ``c10d`` or ``static``.
        rdzv_id: What the nodes' agents know each other by.
    """

    nnodes: int = 1
    node_rank: int | None = None
    rdzv_endpoint: str | None = None
    rdzv_backend: Literal["c10d", "static"] = "c10d"
    rdzv_id: str | None = None


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


class HttpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How ``lockstep serve`` answers.

    Args:
        host: Address to bind.
        port: Port to bind; 0 = any that is free.
        served_model_name: What clients call the model; None = its file's or folder's name.
        api_key_file: File with keys, one a line, of which a client must give one; None = the environment's, if any.
        max_requests: Prompts under way at once; more are refused with 429.
        max_prompts: Prompts of one request.
        max_body_bytes: Bytes of a request.
        stream_buffer: Messages that may wait for a slow reader of a stream before it is cut.
        health_timeout_s: How long a rank may be silent or in one step, and the engine yet count as healthy.
        journal: Folder in which requests with an ``Idempotency-Key`` and their answers are kept; None = nowhere.
        journal_keep_s: How long an answer is kept.
        journal_bytes: How many bytes of requests and answers are kept.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_key_file: Path | None = None
    max_requests: int = 1024
    max_prompts: int = 128
    max_body_bytes: int = 8 << 20
    stream_buffer: int = 4096
    health_timeout_s: float = 30.0
    journal: Path | None = None
    journal_keep_s: float = 86400.0
    journal_bytes: int = 1 << 30


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
