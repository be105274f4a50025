"""Small tokenizers for tests, written the way models ship them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gguf import GGUFWriter
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

SPECIAL_TOKENS = ("<|end|>", "<|begin|>", "<|turn|>")
CORPUS = (
    "The quick brown fox jumps over the lazy dog. It's 2024, isn't it? We've 1234567 of them!",
    "def function(self, value):\n    return value  # nothing\n\n\n\tif x == 10:\n        pass\r\n",
    "Größe über naïve café Ελληνικά привет мир 你好世界 こんにちは 안녕 😀😀 👩‍👩‍👧‍👦 {'a': [1, 22, 333]}",
)
HARD_TEXTS = (
    "Hello, world!",
    "",
    " ",
    "  two leading blanks",
    " one leading blank",
    "trailing blanks   ",
    "\n\n\nnewlines\n \n\t\ttabs\r\nend\n",
    "It's we've I'LL don'T 'twas",
    "12345 and 1,234.56 at 10:00, x2y3z, ½ and ٣٤",
    "def f(x):\n    return x+1  # comment\n",
    "😀",
    "a😀b👩‍👩‍👧‍👦c🏳️‍🌈",
    "é and e\u0301, n\u0303, \u0301alone",
    "你好，世界！日本語テキスト 한국어",
    "עברית العربية हिन्दी ไทย",
    "zero\u200bwidth \u00a0nbsp \ufeffbom \u2028line",
    "nul\x00 and \x7f and \x1b[0m",
    "\ufffd itself \ufffd\ufffd",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ﬁ ligature",
    "a" * 300,
    '{"key": [1, 2.5e-3, null, "v\\n"]}',
    "<|turn|>user\nhi<|end|>",
    "before<|end|>after <|begin|> <|begin| > x<|end|><|end|>",
)


def byte_level_backend(vocab_size: int = 500) -> Backend:
    """Returns a byte-level BPE tokenizer with GPT-2's split, the special tokens first."""
    backend = Backend(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        CORPUS,
        BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return backend


def write_folder(folder: Path, backend: Backend, **files: Mapping[str, Any]) -> Path:
    """Writes a Hugging Face folder; each keyword is a JSON file's name without its ending."""
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def byte_level_keys(backend: Backend, pre: str | None) -> dict[str, Any]:
    """Returns the tokenizer keys of a GGUF file for a byte-level backend."""
    state = json.loads(backend.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].__getitem__)
    keys: dict[str, Any] = {
        "model": "gpt2",
        "tokens": tokens,
        "token_type": [3 if token in SPECIAL_TOKENS else 1 for token in tokens],
        "merges": [" ".join(pair) for pair in state["merges"]],
        "bos_token_id": 1,
        "eos_token_id": 0,
    }
    return keys if pre is None else {**keys, "pre": pre}


def sentencepiece_keys() -> dict[str, Any]:
    """Returns the tokenizer keys of a GGUF file for a SentencePiece vocabulary: words earlier in the list win."""
    words = ["▁t", "he", "▁the", "er", "in", "▁a", "▁w", "or", "ld", "▁wor", "▁world", "ll", "▁h", "▁hello", "llo"]
    words += ["▁he", "▁▁", "▁▁▁", "lo", "hello", "re", "th", "the", "aa", "aaa", "▁😀"]
    letters = sorted({letter for text in (*CORPUS, *words) for letter in text if letter != "😀"} | {"▁"} - {" "})
    letters = [letter for letter in letters if letter not in " \n\t\r"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *letters, "<|user|>"]
    special = len(tokens) - len(words) - len(letters) - 1
    scores = [0.0] * special + [-float(rank) for rank in range(len(words))] + [-1000.0] * (len(letters) + 1)
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(words) + len(letters)) + [4]
    return {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "scores": scores,
        "token_type": kinds,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }


def write_gguf(path: Path, keys: Mapping[str, Any], chat_template: str | None = None) -> Path:
    """Writes a GGUF file that holds a tokenizer and the shape of a small Llama, but no tensors."""
    writer = GGUFWriter(path, "llama")
    for name, number in (("block_count", 1), ("embedding_length", 8), ("attention.head_count", 1)):
        writer.add_uint32(f"llama.{name}", number)
    for name, value in keys.items():
        _add(writer, f"tokenizer.ggml.{name}", value)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, key: str, value: bool | int | str | Sequence[Any]) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)
