"""A Hugging Face folder: ``config.json`` and safetensors, in one file or in shards with an index."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open

from runtime.checkpoint_layout import EMBEDDING, CheckpointError, check_tensors
from runtime.model_config import ModelConfig, ModelConfigError, read_model_config

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}


@dataclass(frozen=True)
class SafetensorsCheckpoint:
    """An opened and checked folder.

    Attributes:
        path: The folder.
        config: The model's configuration.
        files: The file that holds each tensor, by the tensor's name.
    """

    path: Path
    config: ModelConfig
    files: dict[str, Path]


def open_safetensors(folder: Path) -> SafetensorsCheckpoint:
    """Returns the checkpoint in ``folder``; reads JSON files and safetensors headers only.

    Raises:
        CheckpointError: A file or tensor is missing or broken, or the model is not supported.
    """
    raw = _read_json(folder / "config.json")
    generation_file = folder / "generation_config.json"
    generation = _read_json(generation_file) if generation_file.exists() else {}
    try:
        config = read_model_config(raw, generation)
    except ModelConfigError as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from error
    files = _tensor_files(folder)
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    for file in dict.fromkeys(files.values()):
        names = [name for name, holder in files.items() if holder == file]
        _read_header(file, names, shapes, dtypes)
    check_tensors(folder, config, shapes)
    if config.dtype is None:
        config = msgspec.structs.replace(config, dtype=dtypes[EMBEDDING])
    return SafetensorsCheckpoint(folder, config, files)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} does not exist") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{file} is not valid: {error}") from error


def _tensor_files(folder: Path) -> dict[str, Path]:
    index = folder / INDEX_FILE
    if not index.exists():
        file = folder / SINGLE_FILE
        with _open(file) as handle:
            return dict.fromkeys(handle.keys(), file)
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map")
    return {name: folder / str(file) for name, file in weight_map.items()}


def _read_header(file: Path, names: list[str], shapes: dict[str, tuple[int, ...]], dtypes: dict[str, str]) -> None:
    with _open(file) as handle:
        present = set(handle.keys())
        for name in names:
            if name not in present:
                raise CheckpointError(f"{file}: tensor {name} is missing, although {INDEX_FILE} names this file")
            header = handle.get_slice(name)
            shapes[name] = tuple(header.get_shape())
            dtype = _DTYPE_NAMES.get(header.get_dtype())
            if dtype is None:
                raise CheckpointError(
                    f"{file}: tensor {name} has dtype {header.get_dtype()}; supported are {', '.join(_DTYPE_NAMES)}"
                )
            dtypes[name] = dtype


def _open(file: Path) -> Any:
    # numpy as the framework: headers are all that is read here, and torch stays out of the command line.
    try:
        return safe_open(file, framework="numpy")
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} does not exist") from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} is not a whole safetensors file: {error}") from error
