"""Reads slices of a checkpoint's tensors: a rank never loads what it does not own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from runtime.checkpoint import Checkpoint
from runtime.gguf_checkpoint import GgufCheckpoint
from runtime.model_config import ModelConfig


class WeightReader:
    """Reads tensors of one opened checkpoint.

    Args:
        checkpoint: What ``open_checkpoint`` returned.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._handles: dict[Path, Any] = {}

    def read(self, name: str, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        """Returns a tensor, or rows and columns of it, on the CPU in the dtype it is stored in (GGUF: float32).

        Args:
            name: Its Hugging Face name.
            rows: Contiguous rows (elements of a vector); None is all.
            columns: Contiguous columns of a matrix; None is all.
        """
        if isinstance(self._checkpoint, GgufCheckpoint):
            return torch.from_numpy(np.array(self._checkpoint.read(name, rows, columns), order="C"))
        file = self._checkpoint.files[name]
        if file not in self._handles:
            self._handles[file] = safe_open(file, framework="pt", device="cpu")
        stored = self._handles[file].get_slice(name)
        cuts = [slice(None) if part is None else slice(part.start, part.stop) for part in (rows, columns)]
        tensor: torch.Tensor = stored[tuple(cuts[: len(stored.get_shape())])]
        return tensor


def resolve_dtype(name: str, config: ModelConfig) -> torch.dtype:
    """Returns the dtype to run a model in.

    Args:
        name: ``"float32"``, ``"bfloat16"``, or ``"auto"``: bfloat16 when the checkpoint was saved so, else float32.
        config: The model's configuration.

    Raises:
        ValueError: ``name`` is none of these.
    """
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name == "auto":
        return dtypes["bfloat16" if config.dtype == "bfloat16" else "float32"]
    if name not in dtypes:
        raise ValueError(f"dtype {name!r} is not one of auto, {', '.join(dtypes)}")
    return dtypes[name]
