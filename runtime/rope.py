"""Rotary position embedding: the frequencies of each scaling variant, and a table of their cosines and sines."""

from __future__ import annotations

import math

import torch

from runtime.model_config import RopeConfig

_FIRST_POSITIONS = 4096


class RotaryEmbedding:
    """Cosines and sines by position, as ``rotate`` takes them, computed in float32 and kept in the model's dtype.

    The table grows by doubling; an entry's value does not depend on the table's length.

    Args:
        rope: The variant and its parameters.
        head_dim: How many elements a head has; all of them are rotated.
        dtype: The model's dtype.
        device: The model's device.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._inverse_frequencies, self._scale = inverse_frequencies(rope, head_dim)
        self._dtype = dtype
        self._device = device
        self._cos, self._sin = self._table(_FIRST_POSITIONS)

    def at(self, positions: torch.Tensor, max_position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the cosines and sines, [T, 1, head_dim] each.

        Args:
            positions: [T] int64 on the device.
            max_position: The largest of them, known on the host so that no device has to be asked.
        """
        if max_position >= self._cos.shape[0]:
            self._cos, self._sin = self._table(1 << max_position.bit_length())
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)

    def _table(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.arange(length, dtype=torch.float32)[:, None] * self._inverse_frequencies
        cos, sin = angles.cos(), angles.sin()
        return self._entries(torch.cat((cos, cos), dim=1)), self._entries(torch.cat((-sin, sin), dim=1))

    def _entries(self, values: torch.Tensor) -> torch.Tensor:
        return (values * self._scale).to(device=self._device, dtype=self._dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Returns a fresh [T, heads, head_dim] with element i of each head rotated with element i + head_dim / 2.

    Args:
        x: [T, heads, head_dim].
        cos: [T, 1, head_dim], the cosines twice.
        sin: [T, 1, head_dim], the sines negated and then as they are.
    """
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, dims=-1), sin)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Returns each pair's angle per position, [head_dim / 2] float32, and a factor on cosine and sine."""
    powers = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    plain = 1.0 / powers
    if rope.frequency_divisors:
        return plain / torch.tensor(rope.frequency_divisors, dtype=torch.float32), 1.0
    if rope.rope_type == "linear":
        return plain / rope.factor, 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, powers, head_dim), _yarn_attention_factor(rope)
    return plain, 1.0


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Returns low frequencies divided by the factor, high ones kept, those between blended."""
    trained = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / plain
    longest, shortest = trained / rope.low_freq_factor, trained / rope.high_freq_factor
    blend = (trained / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * plain / rope.factor + blend * plain
    outside = torch.where(wavelengths > longest, plain / rope.factor, plain)
    return torch.where((wavelengths >= shortest) & (wavelengths <= longest), blended, outside)


def _yarn(rope: RopeConfig, powers: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Returns frequencies that turn often kept, those that turn seldom divided by the factor, a ramp between."""

    def pair_turning(rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low if high != low else 0.001
    kept = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_scale(rope.factor, rope.mscale) / _yarn_scale(rope.factor, rope.mscale_all_dim)
    return _yarn_scale(rope.factor, 1.0)


def _yarn_scale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
