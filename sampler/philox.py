"""The one uniform number behind every draw: Philox4x32-10, keyed by (seed, choice, position).

A counter-based generator has no state, so a draw depends on nothing but its key: not on batch mates, rows, ranks,
restarts or chunking. Philox4x32-10 is the generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"
(SC 2011). ``numpy.random.Philox`` is the 64-bit sister Philox4x64-10, so the two cannot be compared directly: the tests
hold both against one independent implementation whose word size is a parameter.
"""

from __future__ import annotations

import torch

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def uniform_53(seeds: torch.Tensor, choices: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Returns one uniform number per row, [B] float64 in [0, 1), a multiple of 2**-53.

    Shapes that broadcast give as many numbers: [B, 1], [B, 1] and [M] give [B, M].

    Args:
        seeds: [B] int64, the bit pattern of an unsigned 64-bit seed: the key.
        choices: [B] int64, 0 ≤ choice < 2**32, which of a request's ``n`` choices the row is.
        positions: [B] int64, index of the token drawn among its choice's output tokens, 0 for the first.
    """
    counter = (positions & _WORD, (positions >> 32) & _WORD, choices & _WORD, torch.zeros_like(positions))
    first, second, _, _ = philox_4x32(counter, (seeds & _WORD, (seeds >> 32) & _WORD))
    return ((first >> 5) * 67108864 + (second >> 6)).to(torch.float64) * 2.0**-53


def philox_4x32(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], key: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns Philox4x32-10 of a counter under a key: four 32-bit words, as int64 tensors of the arguments' shape."""
    first, second, third, fourth = counter
    low_key, high_key = key
    for _ in range(_ROUNDS):
        high_0, low_0 = _multiply(first, _MULTIPLIERS[0])
        high_1, low_1 = _multiply(third, _MULTIPLIERS[1])
        first, second, third, fourth = high_1 ^ second ^ low_key, low_1, high_0 ^ fourth ^ high_key, low_0
        low_key, high_key = (low_key + _WEYL[0]) & _WORD, (high_key + _WEYL[1]) & _WORD
    return first, second, third, fourth


def _multiply(word: torch.Tensor, multiplier: int) -> tuple[torch.Tensor, torch.Tensor]:
    # The 64-bit product wraps into int64's sign bit; its two halves are right as bit patterns.
    product = word * multiplier
    return (product >> 32) & _WORD, product & _WORD
