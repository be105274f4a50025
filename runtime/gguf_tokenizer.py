"""A tokenizer from the metadata of a GGUF file.

Two vocabulary models are known: ``gpt2`` (byte-level BPE) and ``llama`` (SentencePiece BPE with byte fallback). How
text is split before the merges is a name in the file; an unknown name is an error, because a wrong split gives ids that
the model never saw. ``default`` and a missing name (files older than the names) mean the split of GPT-2.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from runtime.gguf_header import read_gguf_header
from runtime.tokenizer_parts import TokenizerFileError, TokenizerParts, library_errors_in

T = TypeVar("T")
Metadata = Mapping[str, Any]

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_END_KEYS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
_NAMED_KEYS: Final = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
# Ids that a SentencePiece file without the keys means.
_SENTENCEPIECE_IDS: Final = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

_ONE_NUMERAL: Final = r"\p{N}"
_GPT2_SPLIT_KINDS: Final = ("default", "gpt-2", "mpt", "olmo", "phi-2", "jais")
_DIGIT_SPLIT_KINDS: Final = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
_LLAMA3_SPLIT_KINDS: Final = ("llama-bpe", "llama3", "llama-v3", "falcon3")
_QWEN2_SPLIT_KINDS: Final = ("qwen2", "deepseek-r1-qwen")
_WORD_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numerals}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read_gguf_tokenizer(path: Path) -> TokenizerParts:
    """Returns the tokenizer that a GGUF file describes; a BOS that is to be added but not named is not added.

    Raises:
        CheckpointError: It is no GGUF file.
        TokenizerFileError: It lacks a key, or names a model or split that is not known.
    """
    metadata = read_gguf_header(path).metadata
    model = _value(metadata, "tokenizer.ggml.model", str)
    if model not in ("gpt2", "llama"):
        raise TokenizerFileError(f"tokenizer.ggml.model {model!r} is not supported, only 'gpt2' and 'llama'")
    tokens = _values(metadata, "tokenizer.ggml.tokens", str)
    if not tokens:
        raise TokenizerFileError("tokenizer.ggml.tokens is empty")
    kinds = _token_kinds(metadata, tokens)
    ids = _token_ids(metadata, model, len(tokens))
    backend = (
        _byte_level_backend(metadata, tokens)
        if model == "gpt2"
        else _sentencepiece_backend(metadata, tokens, kinds, ids.get("unknown_token_id"))
    )
    _add_whole_tokens(backend, tokens, kinds)
    named_tokens = {name: tokens[ids[key]] for name, key in _NAMED_KEYS.items() if key in ids}
    add_bos = _value(metadata, "tokenizer.ggml.add_bos_token", bool, _adds_bos_unless_told(metadata, model))
    add_eos = _value(metadata, "tokenizer.ggml.add_eos_token", bool, default=False)
    _wrap_with_bos_eos(
        backend,
        named_tokens.get("bos_token") if add_bos else None,
        named_tokens.get("eos_token") if add_eos else None,
    )
    eos_token_ids = [ids[key] for key in _END_KEYS if key in ids]
    return TokenizerParts(backend, eos_token_ids, named_tokens, _chat_templates(metadata))


def _token_kinds(metadata: Metadata, tokens: list[str]) -> list[int]:
    key = "tokenizer.ggml.token_type"
    if key not in metadata:
        return [1] * len(tokens)
    kinds = _values(metadata, key, int)
    if len(kinds) != len(tokens):
        raise TokenizerFileError(f"{key} has {len(kinds)} entries for {len(tokens)} tokens")
    return kinds


def _token_ids(metadata: Metadata, model: str, size: int) -> dict[str, int]:
    """Returns the ids the file names, by key without its prefix; each is checked against the vocabulary."""
    defaults = _SENTENCEPIECE_IDS if model == "llama" else {}
    ids: dict[str, int] = {}
    for key in (*_NAMED_KEYS.values(), *_END_KEYS):
        name = f"tokenizer.ggml.{key}"
        if name not in metadata and key not in defaults:
            continue
        token_id = _value(metadata, name, int, defaults.get(key))
        if not 0 <= token_id < size:
            raise TokenizerFileError(f"{name} is {token_id}, must be in [0, {size})")
        ids[key] = token_id
    return ids


def _adds_bos_unless_told(metadata: Metadata, model: str) -> bool:
    return model == "llama" or _split_kind(metadata) in _LLAMA3_SPLIT_KINDS


def _split_kind(metadata: Metadata) -> str:
    return _value(metadata, "tokenizer.ggml.pre", str, "default")


def _byte_level_backend(metadata: Metadata, tokens: list[str]) -> Backend:
    merges = []
    for line in _values(metadata, "tokenizer.ggml.merges", str):
        left, separator, right = line.partition(" ")
        if not (left and separator and right):
            raise TokenizerFileError(f"tokenizer.ggml.merges: {line!r} is not two tokens")
        merges.append((left, right))
    kind = _split_kind(metadata)
    # Files of the Llama 3 family hold whole words that their own merges do not reach.
    with library_errors_in("tokenizer.ggml.merges"):
        backend = Backend(BPE(_vocabulary(tokens), merges, ignore_merges=kind in _LLAMA3_SPLIT_KINDS))
    backend.pre_tokenizer = _splitter(kind)
    backend.decoder = decoders.ByteLevel()
    return backend


def _splitter(kind: str) -> pre_tokenizers.PreTokenizer:
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind in _GPT2_SPLIT_KINDS:
        return gpt2
    if kind in _DIGIT_SPLIT_KINDS:
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_ONE_NUMERAL), "isolated"), gpt2])
    if kind in _LLAMA3_SPLIT_KINDS:
        pattern = _WORD_SPLIT.format(numerals=r"\p{N}{1,3}")
    elif kind in _QWEN2_SPLIT_KINDS:
        pattern = _WORD_SPLIT.format(numerals=_ONE_NUMERAL)
    else:
        known = sorted((*_GPT2_SPLIT_KINDS, *_DIGIT_SPLIT_KINDS, *_LLAMA3_SPLIT_KINDS, *_QWEN2_SPLIT_KINDS))
        raise TokenizerFileError(f"tokenizer.ggml.pre {kind!r} is not supported, only {', '.join(known)}")
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _sentencepiece_backend(metadata: Metadata, tokens: list[str], kinds: list[int], unknown_id: int | None) -> Backend:
    scores = _values(metadata, "tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise TokenizerFileError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens")
    vocabulary = _vocabulary(tokens)
    mergeable = {token for token, kind in zip(tokens, kinds, strict=True) if kind not in (_UNKNOWN, _CONTROL)}
    backend = Backend(
        BPE(
            vocabulary,
            _merges_of_scores(vocabulary, scores, mergeable),
            unk_token=None if unknown_id is None else tokens[unknown_id],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    blanks = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.normalizer = blanks
    if _value(metadata, "tokenizer.ggml.add_space_prefix", bool, default=True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), blanks])
        backend.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    return backend


def _merges_of_scores(vocabulary: dict[str, int], scores: list[float], mergeable: set[str]) -> list[tuple[str, str]]:
    """Returns the merges that SentencePiece would try: every cut of a token into two tokens, best score first."""
    ranked: list[tuple[float, int, tuple[str, str]]] = []
    for token, token_id in vocabulary.items():
        if token not in mergeable:
            continue
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        ranked += [
            (-scores[token_id], -len(left), (left, right))
            for left, right in cuts
            if left in mergeable and right in mergeable
        ]
    ranked.sort(key=lambda entry: entry[:2])
    return [merge for *_, merge in ranked]


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    """Returns the id of each token; of a token that stands twice, the first id."""
    vocabulary: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        vocabulary.setdefault(token, token_id)
    return vocabulary


def _add_whole_tokens(backend: Backend, tokens: list[str], kinds: list[int]) -> None:
    """Marks the tokens that are found whole in a text: control and unknown ones as special, the user's own as plain."""
    typed = list(zip(tokens, kinds, strict=True))
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, kind in typed if kind in (_UNKNOWN, _CONTROL)]
    )
    backend.add_tokens([AddedToken(token, normalized=False) for token, kind in typed if kind == _USER_DEFINED])


def _wrap_with_bos_eos(backend: Backend, bos_token: str | None, eos_token: str | None) -> None:
    """Makes ``backend`` put ``bos_token`` before and ``eos_token`` behind a text; None adds nothing."""
    added = [(token, backend.token_to_id(token)) for token in (bos_token, eos_token) if token is not None]
    single = [token for token in (bos_token, "$A", eos_token) if token is not None]
    backend.post_processor = TemplateProcessing(single=single, pair=[*single, "$B"], special_tokens=added)


def _chat_templates(metadata: Metadata) -> dict[str, str]:
    """Returns the templates by name; the key ``tokenizer.chat_templates`` lists the names and holds none."""
    default = "tokenizer.chat_template"
    names = {key: key.removeprefix(default + ".") for key in metadata if key.startswith(default + ".")}
    if default in metadata:
        names[default] = "default"
    return {name: _value(metadata, key, str) for key, name in names.items()}


def _value(metadata: Metadata, key: str, kind: type[T], default: T | None = None) -> T:
    value = metadata.get(key, default)
    if value is None:
        raise TokenizerFileError(f"{key} is missing")
    # Not isinstance: a boolean is no integer here.
    if type(value) is not kind:
        raise TokenizerFileError(f"{key} must be of type {kind.__name__}, got {type(value).__name__}")
    return value


def _values(metadata: Metadata, key: str, kind: type[T]) -> list[T]:
    values: list[T] = _value(metadata, key, list)
    if any(type(value) is not kind for value in values):
        raise TokenizerFileError(f"{key} must hold values of type {kind.__name__} only")
    return values
