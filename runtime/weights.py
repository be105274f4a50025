"""Reads slices of a checkpoint's tensors: a rank never loads what it does not own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open

from runtime.checkpoint import Checkpoint
from runtime.gguf_checkpoint import GgufCheckpoint
from runtime.kept_weights import KeptWeights
from runtime.model_config import ModelConfig


class WeightPart(NamedTuple):
    """A slice of a checkpoint's tensor.

    Attributes:
        name: Its Hugging Face name.
        rows: Contiguous rows (elements of a vector); None is all.
        columns: Contiguous columns of a matrix; None is all.
    """

    name: str
    rows: range | None = None
    columns: range | None = None


class WeightReader:
    """Reads tensors of one opened checkpoint.

    Args:
        checkpoint: What ``open_checkpoint`` returned.
        kept: Where what is loaded stays for the next process of this rank, or was left by the last one; None = nowhere.
    """

    def __init__(self, checkpoint: Checkpoint, kept: KeptWeights | None = None) -> None:
        self._checkpoint = checkpoint
        self._kept = kept
        self._handles: dict[Path, Any] = {}

    def load(self, parts: Sequence[WeightPart], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns slices, one below the other, as a model computes with them: contiguous; never write to it.

        Args:
            parts: At least one slice; all have the same number of columns.
            dtype: To what they are rounded.
            device: Where they go.
        """
        if self._kept is None:
            return self._joined(parts, dtype, device)
        name = f"{dtype} " + " ".join(f"{part.name}[{_shown(part.rows)},{_shown(part.columns)}]" for part in parts)
        weight = self._kept.find(name)
        if weight is None:
            weight = self._kept.keep(name, self._joined(parts, dtype, torch.device("cpu")))
        return weight.to(device)

    def _joined(self, parts: Sequence[WeightPart], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        weights = [self.read(*part).to(device=device, dtype=dtype).contiguous() for part in parts]
        return weights[0] if len(weights) == 1 else torch.cat(weights)

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


def _shown(part: range | None) -> str:
    return "" if part is None else f"{part.start}:{part.stop}"


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
