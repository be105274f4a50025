"""The bytes that a vocabulary's tokens stand for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from grammar_sync.vocabulary import GrammarVocabulary

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(vocabulary: GrammarVocabulary) -> list[bytes]:
    """Returns the bytes of each usable token in id order, none for those that are no text."""
    tokens = vocabulary.text_tokens()
    match vocabulary.vocab_type:
        case "byte_level":
            table = _byte_level_table()
            return [_byte_level(token, table) for token in tokens]
        case "byte_fallback":
            return [_byte_fallback(token) for token in tokens]
        case "raw":
            return [token.encode() for token in tokens]


def _byte_level_table() -> Mapping[str, int]:
    """Returns GPT-2's characters for bytes: printable ones stand for themselves, the others come after U+00FF."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + index): byte for index, byte in enumerate(hidden)}


def _byte_level(token: str, table: Mapping[str, int]) -> bytes:
    # A token with a character that stands for no byte is an added one, as it is.
    if all(character in table for character in token):
        return bytes(table[character] for character in token)
    return token.encode()


def _byte_fallback(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()
