"""Options that go together, each group written once and spread into the commands that have it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import update_wrapper
from typing import Any, get_type_hints

from launch.cli import types
from launch.commands import Command


@dataclass(frozen=True, kw_only=True)
class EngineGroup:
    """The model, and how it lies on ranks and in memory."""

    model: types.Model = None
    tp: types.Tp = 1
    pp: types.Pp = 1
    pp_layers: types.PpLayers = None
    dtype: types.Dtype = "auto"
    products: types.Products = "auto"
    invariant: types.Invariant = False
    device: types.Device = "auto"
    max_model_len: types.MaxModelLen = None
    max_num_seqs: types.MaxNumSeqs = 64
    max_batch_tokens: types.MaxBatchTokens = 2048
    kv_cache_bytes: types.KvCacheBytes = None
    prefix_cache: types.PrefixCache = True
    speculate: types.Speculate = None
    threads_per_rank: types.ThreadsPerRank = None
    trace: types.Trace = None


@dataclass(frozen=True, kw_only=True)
class GeneratingGroup:
    """The rest of an engine that generates: its clocks, grammars, thinking and checks."""

    group_timeout: types.GroupTimeout = 30.0
    start_timeout: types.StartTimeout = 120.0
    max_recoveries: types.MaxRecoveries = 5
    recovery_window: types.RecoveryWindow = 300.0
    stall_timeout: types.StallTimeout = 3.0
    fault_report: types.FaultReportFile = None
    grammar_timeout: types.GrammarTimeout = 10.0
    grammar_backend: types.GrammarBackendChoice = "auto"
    grammar_memory_bytes: types.GrammarMemoryBytes = 512 << 20
    grammar_cache_bytes: types.GrammarCacheBytes = 512 << 20
    grammar_cache_dir: types.GrammarCacheDir = None
    reasoning_marker: types.ReasoningMarker = None
    reasoning_start_marker: types.ReasoningStartMarker = None
    post_check: types.PostCheck = True
    logit_processors: types.LogitProcessors = None
    audit: types.Audit = False
    audit_every: types.AuditEvery = 0


@dataclass(frozen=True, kw_only=True)
class HttpGroup:
    """How a server answers."""

    host: types.Host = "127.0.0.1"
    port: types.Port = 8000
    served_model_name: types.ServedModelName = None
    api_key_file: types.ApiKeyFile = None
    max_requests: types.MaxRequests = 1024
    max_prompts: types.MaxPrompts = 128
    max_body_bytes: types.MaxBodyBytes = 8 << 20
    journal: types.JournalFolder = None
    journal_keep: types.JournalKeep = 86400.0
    journal_bytes: types.JournalBytes = 1 << 30
    stream_buffer: types.StreamBuffer = 4096
    health_timeout: types.HealthTimeout = 30.0


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """The nodes, as torchrun is told of them."""

    nnodes: types.Nnodes = 1
    node_rank: types.NodeRank = None
    rdzv_endpoint: types.RdzvEndpoint = None
    rdzv_backend: types.RdzvBackend = "c10d"
    rdzv_id: types.RdzvId = None


@dataclass(frozen=True, kw_only=True)
class SamplingGroup:
    """Request fields for requests that do not say, by their own names."""

    max_tokens: types.MaxTokens = None
    temperature: types.Temperature = None
    top_p: types.TopP = None
    top_k: types.TopK = None
    min_p: types.MinP = None
    seed: types.Seed = None
    n: types.NumChoices = None
    stop: types.Stop = None
    logprobs: types.Logprobs = None
    enable_thinking: types.EnableThinking = None
    thinking_budget: types.ThinkingBudget = None


@dataclass(frozen=True, kw_only=True)
class GrammarGroup:
    """A grammar; at most one is given."""

    json_schema: types.JsonSchema = None
    json_object: types.JsonObject = False
    regex: types.Regex = None
    ebnf: types.Ebnf = None
    choice: types.Choice = None
    structural_tag: types.StructuralTag = None


@dataclass(frozen=True, kw_only=True)
class GrammarOptionGroup:
    """Options of grammars, by the names of request fields."""

    any_whitespace: types.AnyWhitespace = None
    max_whitespace: types.MaxWhitespace = None
    max_string_length: types.MaxStringLength = None
    max_items: types.MaxItems = None
    ebnf_root: types.EbnfRoot = None


def given_fields(group: SamplingGroup | GrammarOptionGroup) -> dict[str, Any]:
    """Returns the request fields of a group that the command line gives; an option given no time is an empty list."""
    return {name: value for name, value in asdict(group).items() if value not in (None, [])}


def spread(command: Callable[..., Command]) -> Callable[..., Command]:
    """Returns a command for typer: each parameter that is a group becomes that group's options.

    Groups are keyword-only parameters of ``command`` without a default.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type[Any]] = {}
    options: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        if not (isinstance(hint, type) and is_dataclass(hint)):
            options.append(parameter.replace(annotation=hint))
            continue
        groups[parameter.name] = hint
        own = get_type_hints(hint, include_extras=True)
        options += [
            parameter.replace(name=field.name, annotation=own[field.name], default=field.default)
            for field in fields(hint)
        ]

    def run(**given: Any) -> Command:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        return command(**given)

    update_wrapper(run, command)
    vars(run)["__signature__"] = inspect.Signature(options)
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run
