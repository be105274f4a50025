"""Writes tiny random checkpoints of the supported families: by transformers, and as GGUF by the gguf package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from runtime.checkpoint import open_checkpoint
from runtime.checkpoint_layout import required_tensors
from runtime.gguf_checkpoint import _NAMES
from runtime.weights import WeightReader

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
EOS_TOKEN = "<|endoftext|>"
EOS_TOKEN_ID = 0
TOKENIZER_SIZE = 320
_COMMON: dict[str, Any] = {
    "vocab_size": TOKENIZER_SIZE,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "initializer_range": 0.12,
    "eos_token_id": EOS_TOKEN_ID,
    "bos_token_id": None,
    "pad_token_id": None,
}
# Odd sizes on purpose: heads and units that no rank count divides, a head_dim that is not hidden / heads.
_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 72,
        "intermediate_size": 150,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "mistral": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "sliding_window": 8,
    },
    "qwen2": {
        "hidden_size": 48,
        "intermediate_size": 100,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "use_sliding_window": True,
        "sliding_window": 10,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
    },
}
_CORPUS = (
    "The quick brown fox jumps over the lazy dog. ",
    '{"name": "Ada", "age": 36, "tags": ["a", "b"], "ok": true, "none": null}',
    "One two three four five six seven eight nine ten, and then some more words to learn from.",
)


def write_tiny_checkpoint(
    folder: Path, family: str, *, seed: int = 0, max_shard_size: str = "1GB", **overrides: Any
) -> Path:
    """Returns ``folder``, holding a random model, its configuration and a byte-level BPE tokenizer with one EOS token.

    Args:
        folder: Made when it does not exist.
        family: One of ``FAMILIES``.
        seed: Of the weights.
        max_shard_size: As transformers takes it; a small one gives several files and an index.
        overrides: Configuration fields in place of this module's.
    """
    config = AutoConfig.for_model(family, **(_COMMON | _FAMILY[family] | overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        # Fresh norms are all ones and fresh biases zeros: a mistake in either would not show.
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
            elif name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    write_tiny_tokenizer(folder)
    return folder


def write_tiny_tokenizer(folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json: byte-level BPE of ``TOKENIZER_SIZE`` ids, EOS first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_SIZE,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 3, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS_TOKEN).save_pretrained(folder)


def write_tiny_gguf(
    path: Path, folder: Path, kind: GGMLQuantizationType, add: Callable[[GGUFWriter], None] | None = None
) -> Path:
    """Returns ``path``, holding the model in ``folder`` as llama.cpp's converter would write it.

    Args:
        path: The file to write.
        folder: A checkpoint in Hugging Face form.
        kind: How matrices are stored; vectors are float32.
        add: Adds metadata or tensors of its own.
    """
    checkpoint = open_checkpoint(folder)
    config, reader = checkpoint.config, WeightReader(checkpoint)
    architecture = "llama" if config.architecture == "mistral" else config.architecture
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_eos_token_id(EOS_TOKEN_ID)
    if add is not None:
        add(writer)
    short = {long: name for name, long in _NAMES.items()}
    for name in required_tensors(config):
        values = reader.read(name).float().numpy()
        stem, suffix = name.rsplit(".", 1)
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        in_layer = name.startswith("model.layers.")
        target = f"blk.{layer}.{short[part]}.{suffix}" if in_layer else f"{short[stem]}.{suffix}"
        if architecture == "llama" and part in {"self_attn.q_proj", "self_attn.k_proj"}:
            halves = values.reshape(-1, 2, config.head_dim // 2, *values.shape[1:])
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        if values.ndim == 1:
            writer.add_tensor(target, values)
        else:
            writer.add_tensor(target, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
