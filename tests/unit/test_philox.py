"""Philox4x32-10 against an independent implementation.

``numpy.random.Philox`` is Philox4x64-10, the 64-bit sister, so it cannot judge the 32-bit generator directly. One plain
Python implementation whose word size is a parameter is checked against numpy at 64 bits (numpy counts up before it
generates) and against Random123's published known answers at 32 bits; ours is then checked against it.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from scipy import stats

from sampler.philox import philox_4x32, uniform_53

_CONSTANTS = {
    32: ((0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)),
    64: ((0xD2E7470EE14C6C93, 0xCA5A826395121157), (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)),
}
# Random123 1.14, kat_vectors: counter, key, result of philox4x32-10.
_KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def _reference(bits: int, counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    word = (1 << bits) - 1
    (m0, m1), (w0, w1) = _CONSTANTS[bits]
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * m0, c2 * m1
        c0, c1, c2, c3 = (p1 >> bits) ^ c1 ^ k0, p1 & word, (p0 >> bits) ^ c3 ^ k1, p0 & word
        k0, k1 = (k0 + w0) & word, (k1 + w1) & word
    return c0, c1, c2, c3


def _ours(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    c0, c1, c2, c3 = (torch.tensor([word], dtype=torch.int64) for word in counter)
    k0, k1 = (torch.tensor([word], dtype=torch.int64) for word in key)
    return tuple(int(word) for word in philox_4x32((c0, c1, c2, c3), (k0, k1)))


def _signed(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed


def test_the_reference_is_numpys_philox_at_64_bits() -> None:
    source = random.Random(1)
    for _ in range(20):
        key = source.getrandbits(128)
        counter = source.getrandbits(256) % (2**256 - 1)
        generator = np.random.Philox(key=key, counter=counter)
        state = counter + 1
        words = tuple((state >> (64 * index)) & (2**64 - 1) for index in range(4))
        expected = _reference(64, words, (key & (2**64 - 1), key >> 64))
        assert tuple(int(value) for value in generator.random_raw(4)) == expected


@pytest.mark.parametrize(("counter", "key", "expected"), _KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert _reference(32, counter, key) == expected
    assert _ours(counter, key) == expected


def test_the_uniform_is_53_bits_of_the_reference() -> None:
    source = random.Random(2)
    keys = [(0, 0, 0), (2**64 - 1, 0, 0), (2**63, 2**32 - 1, 2**40 + 7)]
    keys += [(source.getrandbits(64), source.getrandbits(7), source.getrandbits(33)) for _ in range(300)]
    seeds = torch.tensor([_signed(seed) for seed, _, _ in keys])
    choices = torch.tensor([choice for _, choice, _ in keys])
    positions = torch.tensor([position for _, _, position in keys])
    for (seed, choice, position), drawn in zip(keys, uniform_53(seeds, choices, positions).tolist(), strict=True):
        words = (position & 0xFFFFFFFF, position >> 32, choice, 0)
        first, second, _, _ = _reference(32, words, (seed & 0xFFFFFFFF, seed >> 32))
        assert drawn == ((first >> 5) * 2**26 + (second >> 6)) / 2**53
        assert 0 <= drawn < 1


def test_numbers_are_uniform_and_every_part_of_the_key_counts() -> None:
    count = 50_000
    positions = torch.arange(count)
    zeros = torch.zeros_like(positions)
    for seeds, choices, places in ((zeros, zeros, positions), (positions, zeros, zeros), (zeros, positions, zeros)):
        drawn = uniform_53(seeds, choices, places)
        assert len(set(drawn.tolist())) == count
        assert stats.kstest(drawn.numpy(), "uniform").pvalue > 1e-3
