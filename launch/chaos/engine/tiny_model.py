"""A tiny random model with a tokenizer, so that an engine can be put to faults anywhere and starts at once."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from string import ascii_letters
from typing import Any, Final

import numpy as np
from safetensors.numpy import save_file

from runtime.checkpoint_layout import required_tensors
from runtime.model_config import read_model_config

_EOS: Final = "<|endoftext|>"
_PLAIN = (*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_SEED = 8
_SPREAD = 0.12


def write_tiny_model(folder: Path) -> Path:
    """Returns ``folder``, made to hold a Llama of three layers and 9 heads, the same at every call.

    Its vocabulary (bytes, and pairs of letters) is wide enough for both ranks of a stage to own some of it.
    """
    folder.mkdir(parents=True)
    tokens = _tokens()
    config = _config(len(tokens))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": _EOS}))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(tokens)))
    source = np.random.default_rng(_SEED)
    tensors = {}
    for name, shape in required_tensors(read_model_config(config, {})).items():
        values = source.uniform(0.5, 1.5, shape) if "norm" in name else source.normal(0, _SPREAD, shape)
        tensors[name] = values.astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    return folder


def _config(vocab_size: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": vocab_size,
        "hidden_size": 72,
        "intermediate_size": 150,
        "num_hidden_layers": 3,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
    }


def _tokens() -> list[str]:
    """Returns the vocabulary: the end, the bytes by their letters in byte-level vocabularies, pairs of letters."""
    others = (chr(256 + at) for at in range(256 - len(_PLAIN)))
    pairs = (one + other for one, other in product(ascii_letters, repeat=2))
    return [_EOS, *(chr(byte) for byte in _PLAIN), *others, *pairs]


def _tokenizer(tokens: list[str]) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    end = {"id": 0, "content": _EOS, "single_word": False, "lstrip": False, "rstrip": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end | {"normalized": False, "special": True}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: at for at, token in enumerate(tokens)},
            "merges": [[token[0], token[1]] for token in tokens if len(token) == 2],
        },
    }
