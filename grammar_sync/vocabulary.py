"""The vocabulary as grammars see it: the tokens' texts, which of them are text at all, and how wide a mask row is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tp.partition import VocabularyBlocks

VocabularyType = Literal["byte_level", "byte_fallback", "raw"]


class VocabularyError(ValueError):
    """A model's vocabulary cannot be used for grammars."""


@dataclass(frozen=True)
class GrammarVocabulary:
    """A tokenizer's tokens, and the width of the model's LM head.

    Ids at or beyond the tokenizer's size, and at or beyond ``vocab_size``, are never allowed by a grammar.

    Args:
        tokens: The token strings as the tokenizer's vocabulary has them, in id order; not changed afterwards.
        vocab_type: How strings stand for bytes: ``byte_level`` (GPT-2's table), ``byte_fallback`` (<0x0A>), ``raw``.
        vocab_size: How many ids the model's LM head has; may be more or fewer than there are tokens.
        stop_token_ids: The ids that end an output: the union of all EOS sources.
        special_token_ids: Ids that are no text (control tokens, added tokens): never allowed inside an output.
        add_prefix_space: Whether the tokenizer puts a space before the first word.
    """

    tokens: Sequence[str]
    vocab_type: VocabularyType
    vocab_size: int
    stop_token_ids: tuple[int, ...]
    special_token_ids: frozenset[int] = frozenset()
    add_prefix_space: bool = False

    def __post_init__(self) -> None:
        """Checks the ids.

        Raises:
            VocabularyError: There is no stop token, or a stop token is out of range and so could never be allowed.
        """
        usable = min(len(self.tokens), self.vocab_size)
        if not self.stop_token_ids:
            raise VocabularyError("stop_token_ids is empty: an output under a grammar could never end")
        for token_id in self.stop_token_ids:
            if not 0 <= token_id < usable:
                raise VocabularyError(f"stop_token_ids has {token_id}, allowed is 0 to {usable - 1}")

    @property
    def blocks(self) -> VocabularyBlocks:
        """How the LM head's ids are cut over tensor-parallel ranks."""
        return VocabularyBlocks(self.vocab_size)

    @property
    def mask_words(self) -> int:
        """How many 32-bit words a mask row has, padding included."""
        return self.blocks.mask_words

    def text_tokens(self) -> list[str]:
        """Returns the usable tokens in id order, an empty string for each that is no text (stop tokens among them)."""
        silent = self.special_token_ids.union(self.stop_token_ids)
        usable = self.tokens[: self.vocab_size]
        return ["" if token_id in silent else token for token_id, token in enumerate(usable)]
