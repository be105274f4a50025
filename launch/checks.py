"""What can be wrong with a batch command, found before any rank is started."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from grammar_sync.spec import GRAMMAR_FIELDS, GRAMMAR_OPTION_FIELDS, GrammarError, parse_grammar
from launch.cli.parse import UsageError
from launch.commands import GenerateCommand
from launch.invariant_check import check_invariant
from launch.options import EngineOptions
from launch.speculate import speculation_limits
from pp.partition import layer_ranges
from runtime.checkpoint import open_checkpoint
from runtime.kv_budget import KV_BLOCK_TOKENS, kv_bytes_per_token
from runtime.model_config import ModelConfig, check_parallel
from runtime.thinking_fields import THINKING_FIELDS, ThinkingError, marker_pair, parse_thinking
from sampler.params import SamplingParams, SamplingParamsError
from sampler.processor_names import ProcessorLoadError, named_processors


def check_command(command: GenerateCommand) -> None:
    """Returns if model, layout, files and defaults are such that a run can begin.

    Raises:
        UsageError: An option or a file is wrong.
        CheckpointError, ModelConfigError, StagePartitionError: The model is, or cannot be cut as asked.
    """
    config = check_engine(command.engine)
    _check_defaults(command, config)
    check_files(command.input_file, command.output_file)
    if command.metrics_file is not None:
        check_target("--metrics-file", command.metrics_file)


def check_engine(engine: EngineOptions) -> ModelConfig:
    """Returns the model's configuration if model, layout and folders are such that an engine can start.

    Raises:
        UsageError: An option is wrong.
        CheckpointError, ModelConfigError, StagePartitionError: The model is, or cannot be cut as asked.
    """
    config = open_checkpoint(engine.model).config
    check_parallel(config, engine.tp, engine.pp)
    check_invariant(engine, config)
    speculation_limits(engine.speculate)
    _check_kv_cache(config, engine)
    try:
        marker_pair(engine.reasoning_start_marker, engine.reasoning_marker)
        named_processors(engine.logit_processors)
    except (ThinkingError, ProcessorLoadError) as error:
        raise UsageError(str(error)) from error
    _check_grammar_cache_dir(engine.grammar_cache_dir)
    if engine.fault_report is not None:
        check_target("--fault-report", engine.fault_report)
    if engine.trace is not None:
        check_target("--trace", engine.trace)
    return config


def _check_kv_cache(config: ModelConfig, engine: EngineOptions) -> None:
    layers = layer_ranges(config.num_layers, engine.pp, engine.pp_layers)
    if engine.kv_cache_bytes is None:
        return
    name = config.dtype if engine.dtype == "auto" else engine.dtype
    per_token = kv_bytes_per_token(config, layers, engine.tp, 2 if name == "bfloat16" else 4)
    least = KV_BLOCK_TOKENS * per_token
    if engine.kv_cache_bytes < least:
        raise UsageError(
            f"--kv-cache-bytes is {engine.kv_cache_bytes}: a block of {KV_BLOCK_TOKENS} tokens takes {least} bytes"
        )


def _check_defaults(command: GenerateCommand, config: ModelConfig) -> None:
    """Checks the command line's defaults as the leader would check a request that has them all."""
    length = min(command.engine.max_model_len or config.max_position_embeddings, config.max_position_embeddings)
    grammar = (*GRAMMAR_FIELDS, *GRAMMAR_OPTION_FIELDS)
    others = (*grammar, *THINKING_FIELDS)
    sampling = {name: value for name, value in command.defaults.items() if name not in others}
    try:
        SamplingParams.parse(sampling, vocab_size=config.vocab_size, max_model_len=length)
        parse_grammar({name: value for name, value in command.defaults.items() if name in grammar})
        parse_thinking(command.defaults, length)
    except (SamplingParamsError, GrammarError, ThinkingError) as error:
        raise UsageError(_as_option(str(error), error.param)) from error


def _as_option(message: str, param: str) -> str:
    """Returns a message about a request field as one about the option that gives its default."""
    option = "--num-choices" if param == "n" else f"--{param.replace('_', '-')}"
    return re.sub(rf"^{re.escape(param)}\b", option, message)


def _check_grammar_cache_dir(folder: Path | None) -> None:
    if folder is None:
        return
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Only writing tells: permission bits say little of a read-only file system, or to root.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"--grammar-cache-dir {folder}: {error.strerror}") from error


def check_files(input_file: str | None, output_file: Path | None) -> None:
    """Returns if the input (``-``: stdin) can be read and the output written.

    Raises:
        UsageError: One of them cannot.
    """
    source = None if input_file in (None, "-") else Path(str(input_file))
    if source is not None:
        try:
            with source.open("rb"):
                pass
        except OSError as error:
            raise UsageError(f"--input {source}: {error.strerror}") from error
    if output_file is None:
        return
    check_target("--output", output_file)
    if source is not None and output_file.exists() and output_file.samefile(source):
        raise UsageError(f"--output {output_file} is the same file as --input")


def check_target(option: str, target: Path) -> None:
    """Returns if a file can be written.

    Raises:
        UsageError: It cannot.
    """
    if target.is_dir():
        raise UsageError(f"{option} {target}: it is a folder")
    if not target.parent.is_dir():
        raise UsageError(f"{option} {target}: its folder does not exist")
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise UsageError(f"{option} {target}: it cannot be written")


def check_json_file(path: Path | None, option: str = "--json") -> None:
    """Returns if figures can be written there: said now, and not after minutes.

    Args:
        path: The file; None = nowhere.
        option: Who names it.

    Raises:
        UsageError: They cannot.
    """
    if path is None:
        return
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror}") from error
