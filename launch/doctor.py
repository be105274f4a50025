"""``lockstep doctor``: what this machine has, and what would fail."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import msgspec

from launch.commands import DoctorCommand
from launch.default_model import DefaultModelError, default_model
from launch.environment import with_import_path
from launch.exit_codes import ExitCode
from launch.node.rank_processes import threads_per_rank
from pp.partition import StagePartitionError, layer_ranges
from runtime.checkpoint import open_checkpoint
from runtime.checkpoint_layout import CheckpointError
from runtime.model_config import ModelConfig, ModelConfigError, check_parallel
from runtime.tokenizer import Tokenizer, TokenizerError
from tp.compiled_library import BuildError, compiler

_PACKAGES = ("torch", "xgrammar", "llguidance", "jsonschema", "msgspec", "pyzmq", "tokenizers", "safetensors", "gguf")
_PROBE_TIMEOUT_S = 120.0
_MIN_SHARED_MEMORY_BYTES = 64 << 20
_MIN_FILES_PER_RANK = 64


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at.

    Args:
        name: What.
        status: ``ok``, ``warn`` (works, but not as well) or ``fail`` (would not run).
        detail: One line.
    """

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str


def run_doctor(command: DoctorCommand) -> int:
    """Prints the findings; returns ``USAGE`` when something would fail."""
    findings = examine(command)
    if command.as_json:
        print(msgspec.json.format(msgspec.json.encode(findings)).decode())
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            print(f"{finding.status:4}  {finding.name:{width}}  {finding.detail}")
    return ExitCode.USAGE if any(finding.status == "fail" for finding in findings) else ExitCode.OK


def examine(command: DoctorCommand) -> list[Finding]:
    """Returns what was found, in a fixed order."""
    ranks = command.tp * command.pp
    torch_findings, cuda_devices = _torch()
    return [
        _python(),
        *(_package(name) for name in _PACKAGES),
        *torch_findings,
        _compiler(),
        _cores(ranks, cuda_devices),
        _loopback(),
        _temporary_folder(),
        _shared_memory(),
        _open_files(ranks),
        *_model(command),
    ]


def _python() -> Finding:
    found = platform.python_version()
    status: Literal["ok", "fail"] = "ok" if sys.version_info >= (3, 11) else "fail"
    return Finding("python", status, f"{found} (3.11 or newer is needed)")


def _package(name: str) -> Finding:
    try:
        return Finding(name, "ok", version(name))
    except PackageNotFoundError:
        return Finding(name, "fail", f"not installed: pip install {name}")


def _torch() -> tuple[list[Finding], int]:
    """Returns findings about torch's devices and backends, and how many CUDA devices there are."""
    try:
        probe = subprocess.run(
            [sys.executable, "-m", "launch.probe"],
            env=with_import_path(os.environ),
            capture_output=True,
            timeout=_PROBE_TIMEOUT_S,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
        return [Finding("torch imports", "fail", last[0])], 0
    except subprocess.TimeoutExpired:
        return [Finding("torch imports", "fail", f"took more than {_PROBE_TIMEOUT_S:g} s")], 0
    seen: dict[str, Any] = msgspec.json.decode(probe.stdout)
    devices: list[str] = seen["cuda_devices"]
    gpu = ", ".join(devices) if devices else "none: ranks run on the CPU over gloo"
    nccl: Literal["ok", "fail"] = "ok" if seen["nccl"] or not devices else "fail"
    return [
        Finding("gloo", "ok" if seen["gloo"] else "fail", "available" if seen["gloo"] else "this torch lacks it"),
        Finding("nccl", nccl, "available" if seen["nccl"] else "this torch lacks it (needed on GPUs only)"),
        Finding("cuda devices", "ok", gpu),
        Finding("cpu capability", "ok", str(seen["cpu_capability"])),
    ], len(devices)


def _compiler() -> Finding:
    try:
        return Finding("c compiler", "ok", " ".join(compiler(os.environ)))
    except BuildError as error:
        return Finding("c compiler", "warn", f"{error}; --invariant takes longer")


def _cores(ranks: int, cuda_devices: int) -> Finding:
    cores = len(os.sched_getaffinity(0))
    detail = f"{cores} for {ranks} ranks: {threads_per_rank(None, ranks)} threads each"
    if ranks > cores and cuda_devices == 0:
        return Finding("cores", "warn", f"{detail}; ranks take turns, so steps are slow")
    return Finding("cores", "ok", detail)


def _loopback() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5):
            return Finding("loopback", "ok", "127.0.0.1 takes connections")
    except OSError as error:
        return Finding("loopback", "fail", f"127.0.0.1: {error}")


def _temporary_folder() -> Finding:
    try:
        folder = Path(tempfile.mkdtemp(prefix="lockstep-"))
    except OSError as error:
        return Finding("temporary folder", "fail", f"{tempfile.gettempdir()}: {error}")
    shutil.rmtree(folder)
    return Finding("temporary folder", "ok", str(folder.parent))


def _shared_memory() -> Finding:
    path = Path("/dev/shm")  # noqa: S108
    if not path.is_dir():
        return Finding("shared memory", "warn", f"{path} does not exist")
    free = shutil.disk_usage(path).free
    status: Literal["ok", "warn"] = "ok" if free >= _MIN_SHARED_MEMORY_BYTES else "warn"
    return Finding("shared memory", status, f"{free >> 20} MiB free in {path}")


def _open_files(ranks: int) -> Finding:
    limit = os.sysconf("SC_OPEN_MAX")
    needed = _MIN_FILES_PER_RANK * ranks
    if limit < needed:
        return Finding("open files", "fail", f"the limit is {limit}, {needed} are needed: raise it with ulimit -n")
    return Finding("open files", "ok", f"the limit is {limit}")


def _model(command: DoctorCommand) -> list[Finding]:
    try:
        path = command.model if command.model is not None else default_model()
        config = open_checkpoint(path).config
    except (DefaultModelError, CheckpointError, ModelConfigError) as error:
        return [Finding("model", "fail", str(error))]
    summary = f"{path}: {config.architecture}, {config.num_layers} layers, {config.vocab_size} ids"
    return [
        Finding("model", "ok", summary),
        _check(
            f"tp {command.tp} x pp {command.pp}",
            "fits the model",
            lambda: _check_cut(config, command),
        ),
        _check("tokenizer", "loads", lambda: Tokenizer.load(path)),
    ]


def _check_cut(config: ModelConfig, command: DoctorCommand) -> None:
    check_parallel(config, command.tp, command.pp)
    layer_ranges(config.num_layers, command.pp)


def _check(name: str, good: str, action: Callable[[], object]) -> Finding:
    try:
        action()
    except (ModelConfigError, StagePartitionError, TokenizerError) as error:
        return Finding(name, "fail", str(error))
    return Finding(name, "ok", good)
