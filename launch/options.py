"""How ranks, nodes, an engine and a server are to be: frozen, read once, passed down by value."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

LONGEST_S: Final = 1_000_000
"""Of every time-out: clocks of libraries below take no number of seconds that is much larger."""

LONGEST_KEPT_S: Final = 1_000_000_000
"""Of how long an answer is kept."""


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
    group_timeout_s: Annotated[float, msgspec.Meta(ge=0.1, le=LONGEST_S)] = 30.0
    start_timeout_s: Annotated[float, msgspec.Meta(ge=1, le=LONGEST_S)] = 120.0
    threads_per_rank: Annotated[int, msgspec.Meta(ge=1)] | None = None

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
        speculate: ``ngram:K`` = up to K next tokens are guessed from a sequence's own and checked at once; None = off.
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
    max_model_len: Annotated[int, msgspec.Meta(ge=2)] | None = None
    max_num_seqs: Annotated[int, msgspec.Meta(ge=1)] = 64
    max_batch_tokens: Annotated[int, msgspec.Meta(ge=1)] = 2048
    kv_cache_bytes: Annotated[int, msgspec.Meta(ge=1)] | None = None
    prefix_cache: bool = True
    speculate: str | None = None
    grammar_timeout_s: Annotated[float, msgspec.Meta(ge=0.1, le=LONGEST_S)] = 10.0
    reasoning_marker: str | None = None
    reasoning_start_marker: str | None = None
    grammar_backend: Literal["auto", "xgrammar", "llguidance"] = "auto"
    grammar_memory_bytes: Annotated[int, msgspec.Meta(ge=16 << 20)] = 512 << 20
    grammar_cache_bytes: Annotated[int, msgspec.Meta(ge=0)] = 512 << 20
    grammar_cache_dir: Path | None = None
    post_check: bool = True
    logit_processors: tuple[str, ...] = ()
    audit: bool = False
    audit_every: Annotated[int, msgspec.Meta(ge=0)] = 0
    trace: Path | None = None
    max_recoveries: Annotated[int, msgspec.Meta(ge=0)] = 5
    recovery_window_s: Annotated[float, msgspec.Meta(ge=1, le=LONGEST_S)] = 300.0
    stall_timeout_s: Annotated[float, msgspec.Meta(ge=0.2, le=LONGEST_S)] = 3.0
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
    health_timeout_s: Annotated[float, msgspec.Meta(ge=1, le=LONGEST_S)] = 30.0
    journal: Path | None = None
    journal_keep_s: Annotated[float, msgspec.Meta(ge=1, le=LONGEST_KEPT_S)] = 86400.0
    journal_bytes: int = 1 << 30
