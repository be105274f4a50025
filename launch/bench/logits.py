"""Logits to measure a sampler on: recorded from the default model, or drawn."""

from __future__ import annotations

from dataclasses import replace

import torch

from launch.default_model import DefaultModelError, default_model
from runtime.batch import Chunk, pack
from runtime.checkpoint import open_checkpoint
from runtime.kv_blocks import BlockTable
from runtime.model import DecoderStage
from runtime.tokenizer import Tokenizer
from runtime.weights import WeightReader
from tp.group import TensorParallelGroup

# The first tokens of a text have seen little context: their distributions are wide.
_SKIPPED_TOKENS = 16
_JITTER = 0.01
_FLAT_WIDTH = 3.0
_TEXT = """\
The lighthouse at the end of the bay had been dark for eleven years when Marta bought it. The roof leaked, the stairs \
were missing every third step, and the lamp room smelled of salt and old rope. She did not mind. She had grown up on \
the other side of the water, and every night of her childhood the beam had passed over her bedroom wall, slow and \
regular, like something breathing. On the first morning she carried her tools up to the lamp room and sat on the floor \
to look at what was left. The lens was still there. It was taller than she was, a great cage of glass prisms, and \
under the dust each one was whole. She spent the whole of that summer cleaning it, one prism at a time, with warm \
water and a soft cloth. People from the village came to watch. Some of them told her what they remembered: the \
keeper's dog, the storm of the year when the harbour wall broke, the ships that waited outside until the fog was gone. \
In September she turned the lamp on for the first time. The motor made a sound like a cough, and then the lens began \
to turn, and the light went out over the sea."""


def recorded_logits(rows: int, vocab_size: int) -> tuple[torch.Tensor, str]:
    """Returns logits shaped like a language model's, and where they come from: [rows, vocab_size] float32.

    The default model's at successive tokens of a text, repeated side by side up to the vocabulary size with a little
    noise against ties. Without the default model: logits that fall with the logarithm of the rank.
    """
    generator = torch.Generator().manual_seed(1)
    try:
        path = default_model()
    except DefaultModelError:
        rank = torch.arange(1, vocab_size + 1, dtype=torch.float32)
        places = torch.stack([torch.randperm(vocab_size, generator=generator) for _ in range(rows)])
        noise = torch.randn(rows, vocab_size, generator=generator)
        return (-1.3 * rank.log())[places] + 0.3 * noise, "synthetic: -1.3 ln(rank), the default model is not installed"
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    cpu = torch.device("cpu")
    stage = DecoderStage(
        config,
        WeightReader(checkpoint),
        range(config.num_layers),
        TensorParallelGroup(0, 1),
        dtype=torch.float32,
        device=cpu,
    )
    ids = Tokenizer.load(path).encode(_TEXT)
    cache = stage.new_cache(1, len(ids))
    table = BlockTable(0)
    table.append(0, 1)
    batch = replace(
        pack([Chunk(0, ids, 0, 1, table)], len(ids), cpu), sample_rows=torch.arange(_SKIPPED_TOKENS, len(ids))
    )
    logits = stage.logits(stage.forward(batch, None, cache))[:, : config.vocab_size]
    chosen = logits[torch.arange(rows) % len(logits)]
    tiled = chosen.repeat(1, -(-vocab_size // config.vocab_size))[:, :vocab_size].contiguous()
    tiled += _JITTER * torch.randn(tiled.shape, generator=generator)
    return tiled, f"recorded from {path.name} at successive tokens of a text, tiled from {config.vocab_size} ids"


def flat_logits(rows: int, vocab_size: int) -> tuple[torch.Tensor, str]:
    """Returns logits whose nucleus holds thousands, and what they are: [rows, vocab_size] float32."""
    drawn = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(2)) * _FLAT_WIDTH
    return drawn, f"normal, standard deviation {_FLAT_WIDTH:g}"
