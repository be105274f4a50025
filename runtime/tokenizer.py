"""The tokenizer of a model: text to ids and back, chat messages to a prompt, and what the grammar compiler must know.

It is built on first-stage ranks only and needs no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

from tokenizers import Tokenizer as Backend

from runtime.chat_template import ChatTemplate
from runtime.gguf_tokenizer import read_gguf_tokenizer
from runtime.tokenizer_folder import TOKENIZER_FILE, read_tokenizer_folder
from runtime.tokenizer_parts import TokenizerParts

VocabularyType = Literal["byte_level", "byte_fallback", "raw"]

_BLANK: Final = "▁"
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WHOLE_BYTES: Final = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))


class TokenizerError(ValueError):
    """A tokenizer cannot be read, or cannot take a text; one line that names the file or field and what is wrong."""


class Tokenizer:
    """A tokenizer read from a model's files; use ``load``.

    Special tokens written in a text become their ids, as in transformers: a prompt may hold whole chat turns, and who
    passes on text of strangers must look for such tokens in it. Decoding never tidies blanks: it gives the exact text.

    Args:
        parts: What was read.

    Raises:
        ChatTemplateError: A chat template cannot be compiled.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._backend = parts.backend
        self._chat_template = ChatTemplate(parts.chat_templates, parts.named_tokens)
        self._decoder = _Steps(parts.backend.decoder)
        self.token_strings: list[str] = _strings_by_id(parts.backend)
        """The tokens in id order as the vocabulary spells them (``Ġthe``, ``▁the``); empty where an id has none."""
        self.size: int = len(self.token_strings)
        """How many ids there are, added tokens included."""
        # An id beyond the vocabulary pads the model's rows: it is never sampled, so it ends nothing.
        self.eos_token_ids: tuple[int, ...] = tuple(sorted({i for i in parts.eos_token_ids if i < self.size}))
        """The ids that end a generation: the union of tokenizer, generation and model configuration, ascending."""
        added = parts.backend.get_added_tokens_decoder()
        self.added_tokens: dict[str, int] = {token.content: token_id for token_id, token in sorted(added.items())}
        """The ids of added tokens, special or not, by their text."""
        self.special_token_ids: frozenset[int] = frozenset(
            token_id for token_id, token in added.items() if token.special
        )
        """The ids of special tokens, which decoding leaves out unless told otherwise."""
        self.vocabulary_type: VocabularyType = self._decoder.vocabulary_type
        """How ``token_strings`` spells bytes: in GPT-2's alphabet, as ``<0x0A>`` beside plain text, or not at all."""
        self.add_prefix_space: bool = _Steps(parts.backend.normalizer).prepends_blank or (
            _Steps(parts.backend.pre_tokenizer).prepends_blank
        )
        """Whether a blank is put before a text when it is encoded."""

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Returns the tokenizer of a model: a Hugging Face folder, a GGUF file, or a folder with one GGUF file.

        Raises:
            TokenizerError: There is none, or a file is broken; the message names the file and what is missing.
        """
        source = _source_of(path)
        try:
            return cls(read_gguf_tokenizer(source) if source.is_file() else read_tokenizer_folder(source))
        except (ValueError, OSError) as error:
            reason = " ".join(str(error).split())
            raise TokenizerError(reason if str(source) in reason else f"{source}: {reason}") from error

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of ``text``; ``add_special_tokens`` adds BOS and EOS where the model's files ask for them.

        Text from a chat template holds its special tokens already: encode it with ``add_special_tokens=False``.

        Raises:
            TokenizerError: The text holds a lone surrogate, which no encoding of characters can express.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TokenizerError(f"text holds a lone surrogate at character {error.start}") from error
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of ``ids``; bytes that are no UTF-8 become U+FFFD, ids without a token give nothing.

        SentencePiece replaces every byte of a run of byte tokens in which one is wrong, be the others right or not; the
        text that the incremental detokenizer builds from ``piece`` keeps the right ones.
        """
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def piece(self, token_id: int, previous_id: int | None) -> bytes:
        """Returns the bytes that a token adds to a text after ``previous_id`` (None: at its beginning).

        They need not be whole characters. An id without a token gives nothing.
        """
        token = self.token_strings[token_id] if 0 <= token_id < self.size else ""
        match self.vocabulary_type:
            case "byte_level":
                return _bytes_of_letters(token)
            case "byte_fallback":
                if (byte := _BYTE_TOKEN.fullmatch(token)) is not None:
                    return bytes.fromhex(byte[1])
                text = token.replace(_BLANK, " ")
                strips = previous_id is None and self._decoder.strips_blank
                return (text.removeprefix(" ") if strips else text).encode("utf-8")
            case "raw":
                before = [] if previous_id is None else [previous_id]
                known = self.decode(before, skip_special_tokens=False)
                return self.decode([*before, token_id], skip_special_tokens=False).removeprefix(known).encode("utf-8")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the prompt for chat messages; encode it with ``add_special_tokens=False``.

        ``variables`` are seen by the template beside the model's own.

        Raises:
            ChatTemplateError: The model has no template, the messages have a wrong shape, or the template refused them.
        """
        return self._chat_template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, variables=variables
        )

    def template_mentions(self, text: str) -> bool:
        """Returns whether ``text`` stands in the default chat template."""
        return self._chat_template.mentions(text)


class _Steps:
    """The steps that a decoder, normalizer or pre-tokenizer of the library is made of."""

    def __init__(self, component: Any) -> None:
        state = None if component is None else json.loads(component.__getstate__())
        self._steps = list(_flat_steps(state))

    @cached_property
    def _types(self) -> frozenset[str]:
        return frozenset(step["type"] for step in self._steps)

    @property
    def vocabulary_type(self) -> VocabularyType:
        if "ByteLevel" in self._types:
            return "byte_level"
        return "byte_fallback" if "ByteFallback" in self._types else "raw"

    @property
    def strips_blank(self) -> bool:
        return any(step["type"] == "Strip" and step["content"] == " " and step["start"] for step in self._steps)

    @property
    def prepends_blank(self) -> bool:
        return any(
            step["type"] == "Prepend"
            or (step["type"] == "Metaspace" and step["prepend_scheme"] != "never")
            or (step["type"] == "ByteLevel" and step["add_prefix_space"])
            for step in self._steps
        )


def _flat_steps(state: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if state is None:
        return
    if state["type"] != "Sequence":
        yield state
        return
    for inner in ("decoders", "normalizers", "pretokenizers"):
        for step in state.get(inner, ()):
            yield from _flat_steps(step)


def _source_of(path: Path) -> Path:
    """Returns the folder or GGUF file that a model path means."""
    if path.is_file():
        if path.suffix != ".gguf":
            raise TokenizerError(f"{path}: a model is a folder or a .gguf file")
        return path
    if not path.is_dir():
        raise TokenizerError(f"{path}: no such file or folder")
    if (path / TOKENIZER_FILE).is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "no .gguf file"
        raise TokenizerError(f"{path}: {TOKENIZER_FILE} is missing (and not exactly one .gguf file: {found})")
    return files[0]


def _strings_by_id(backend: Backend) -> list[str]:
    vocabulary = backend.get_vocab(with_added_tokens=True)
    strings = [""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        strings[token_id] = token
    return strings


def _bytes_of_letters(token: str) -> bytes:
    """Returns the bytes that a token of a byte-level vocabulary spells, its UTF-8 where a letter is none of them."""
    try:
        return bytes(_BYTE_OF_LETTER[letter] for letter in token)
    except KeyError:
        return token.encode("utf-8")


def _letters_of_bytes() -> dict[str, int]:
    """Returns the byte of each letter: printable Latin-1 stands for itself, the rest follows in order from U+0100."""
    others = [byte for byte in range(256) if byte not in _WHOLE_BYTES]
    return {chr(byte): byte for byte in _WHOLE_BYTES} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTE_OF_LETTER: Final = _letters_of_bytes()
