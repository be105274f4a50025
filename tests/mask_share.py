"""Measures what filling masks takes of a step: 64 constrained rows, a vocabulary of 151,936, a model of real shape.

``python tests/mask_share.py --folder F --tp 1 --pp 1`` writes a model of SmolLM2-135M's shapes with random weights, and
its tokenizer grown to that size, to F unless it is there; runs it with a trace, and prints what the trace says.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from default_model import default_model_path
from tiny_checkpoints import write_tiny_checkpoint
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from launch.trace.summary import summarize

VOCAB_SIZE = 151_936
SHAPES: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "vocab_size": VOCAB_SIZE,
    "initializer_range": 0.02,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "size": {"type": "number"},
        "kind": {"enum": ["small", "large"]},
    },
    "required": ["name", "tags", "size", "kind"],
}
ROWS, TOKENS = 64, 48


def write_model(folder: Path) -> None:
    """Writes the checkpoint."""
    write_tiny_checkpoint(folder, "llama", **SHAPES)
    path = default_model_path()
    model = json.loads(AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).backend_tokenizer.to_str())
    vocabulary: dict[str, int] = model["model"]["vocab"]
    words = sorted(word for word in vocabulary if word.strip("Ġ").isalpha())
    draw = random.Random(0)
    while len(vocabulary) < VOCAB_SIZE - len(model["added_tokens"]):
        # Two words of the model's own: as varied as those of a larger vocabulary.
        vocabulary.setdefault(draw.choice(words) + draw.choice(words).strip("Ġ"), len(vocabulary))
    backend = Backend.from_str(json.dumps(model))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=model["added_tokens"][0]["content"]).save_pretrained(
        folder
    )


def main() -> int:
    """Prints the figures; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    given = parser.parse_args()
    if not given.folder.exists():
        write_model(given.folder)
    with tempfile.TemporaryDirectory() as name:
        requests, trace = Path(name) / "requests.jsonl", Path(name) / "trace.json"
        line = {"prompt": "A thing as JSON:", "max_tokens": TOKENS, "temperature": 1.0, "json_schema": SCHEMA}
        requests.write_text("".join(json.dumps({**line, "seed": seed}) + "\n" for seed in range(ROWS)))
        command = [sys.executable, "-m", "launch", "generate", "--model", str(given.folder), "--input", str(requests)]
        command += ["--tp", str(given.tp), "--pp", str(given.pp), "--trace", str(trace), "--output", "/dev/null"]
        subprocess.run(command, check=True)
        for one in summarize(trace):
            if one.fill_s:
                share, waited = one.fill_s / one.busy_s, one.own_s.get("wait for masks", 0.0) / one.busy_s
                print(
                    f"rank {one.rank}: {one.busy_steps} steps, {1e3 * one.busy_s / one.busy_steps:.0f} ms each; "
                    f"filling masks {share:.1%} of that, {one.fill_hidden:.0%} of it under the forward pass; "
                    f"waiting for masks {waited:.2%}"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
