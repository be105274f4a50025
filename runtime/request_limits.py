"""What a request may ask for at most."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RequestLimits:
    """What a request may ask for at most.

    Args:
        vocab_size: Ids the model knows.
        max_model_len: Prompt and output together, in tokens.
        kv_cache_tokens: KV entries of one sequence at most.
        default_max_tokens: Tokens to generate at most for a request that does not say, if the context has room.
    """

    vocab_size: int
    max_model_len: int
    kv_cache_tokens: int
    default_max_tokens: int
