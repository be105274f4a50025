"""The engine's options as the command line gives them."""

from __future__ import annotations

from typer import BadParameter

from launch.cli.groups import EngineGroup, GeneratingGroup
from launch.default_model import default_model
from launch.options import EngineOptions


def engine_options(engine: EngineGroup, generating: GeneratingGroup) -> EngineOptions:
    """Returns the engine's options.

    Raises:
        BadParameter: A value is malformed.
        DefaultModelError: No model is named, and the default one is not there.
    """
    return EngineOptions(
        model=engine.model if engine.model is not None else default_model(),
        tp=engine.tp,
        pp=engine.pp,
        pp_layers=None
        if engine.pp_layers is None
        else counts("--pp-layers", engine.pp_layers, "numbers of layers such as 8,7"),
        dtype=engine.dtype,
        products=engine.products,
        invariant=engine.invariant,
        device=engine.device,
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.max_num_seqs,
        max_batch_tokens=engine.max_batch_tokens,
        kv_cache_bytes=engine.kv_cache_bytes,
        prefix_cache=engine.prefix_cache,
        speculate=engine.speculate,
        threads_per_rank=engine.threads_per_rank,
        trace=engine.trace,
        group_timeout_s=generating.group_timeout,
        start_timeout_s=generating.start_timeout,
        max_recoveries=generating.max_recoveries,
        recovery_window_s=generating.recovery_window,
        stall_timeout_s=generating.stall_timeout,
        fault_report=generating.fault_report,
        grammar_timeout_s=generating.grammar_timeout,
        grammar_backend=generating.grammar_backend,
        grammar_memory_bytes=generating.grammar_memory_bytes,
        grammar_cache_bytes=generating.grammar_cache_bytes,
        grammar_cache_dir=generating.grammar_cache_dir,
        reasoning_marker=generating.reasoning_marker,
        reasoning_start_marker=generating.reasoning_start_marker,
        post_check=generating.post_check,
        logit_processors=tuple(generating.logit_processors or ()),
        audit=generating.audit,
        audit_every=generating.audit_every,
    )


def counts(option: str, text: str, what: str) -> tuple[int, ...]:
    """Returns a comma-separated list of numbers.

    Raises:
        BadParameter: It is none.
    """
    parts = text.split(",")
    if not all(part.strip().isascii() and part.strip().isdecimal() for part in parts):
        raise BadParameter(f"{option} is {text!r}: {what} are needed")
    return tuple(int(part) for part in parts)
