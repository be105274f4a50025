"""What a tokenizer is made of, whatever kind of file it was read from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from tokenizers import Tokenizer as Backend


class TokenizerFileError(ValueError):
    """A file does not hold the tokenizer it should; the message names the key, the reader of the path adds the path."""


class TokenizerParts(NamedTuple):
    """The parts of one tokenizer.

    Attributes:
        backend: Encodes and decodes; its post-processor adds BOS and EOS as the model wants them.
        eos_token_ids: All ids that end a generation, from every source; may hold repeats.
        named_tokens: ``bos_token``, ``eos_token``, ... as chat templates see them.
        chat_templates: Template texts by name; the usual one is ``default``.
    """

    backend: Backend
    eos_token_ids: list[int]
    named_tokens: dict[str, str]
    chat_templates: dict[str, str]


@contextmanager
def library_errors_in(part: str) -> Iterator[None]:
    """Turns what the tokenizers library raises while it builds ``part`` into an error that names the part.

    Raises:
        TokenizerFileError: The library refused the part.
    """
    try:
        yield
    except Exception as error:
        # The library raises Exception itself; everything else is not its own word.
        if type(error) is not Exception:
            raise
        raise TokenizerFileError(f"{part}: {error}") from error
