"""A model's files, found, opened and checked by their headers: no torch, no weights read.

``open_checkpoint`` finds every fault of a model's files before a rank starts; ``runtime.weights`` reads slices of them
afterwards. Whatever the format, tensors go by their Hugging Face names.
"""

from __future__ import annotations

from pathlib import Path

from runtime.checkpoint_layout import CheckpointError
from runtime.gguf_checkpoint import GgufCheckpoint, open_gguf
from runtime.safetensors_checkpoint import INDEX_FILE, SINGLE_FILE, SafetensorsCheckpoint, open_safetensors

Checkpoint = SafetensorsCheckpoint | GgufCheckpoint


def open_checkpoint(path: Path) -> Checkpoint:
    """Returns the checked checkpoint at ``path``: a Hugging Face folder, a GGUF file, or a folder with one GGUF file.

    Raises:
        CheckpointError: There is no such model, it is broken, or it is not one this runtime can run.
    """
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path} is not a model: expected a folder or a .gguf file")
        return open_gguf(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist")
    if (path / SINGLE_FILE).exists() or (path / INDEX_FILE).exists():
        return open_safetensors(path)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return open_gguf(files[0])
    if files:
        raise CheckpointError(f"{path} has {len(files)} GGUF files; name one of them: {files[0].name}, …")
    raise CheckpointError(f"{path} is not a model folder: it has no {SINGLE_FILE}, {INDEX_FILE} or .gguf file")
