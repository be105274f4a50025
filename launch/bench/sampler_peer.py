"""Plain torch samplers to compare with, written from their published definitions; they see whole, gathered logits.

Temperature, softmax, then the filters: sort by probability, cumulate, cut (top-k; top-p, Holtzman et al. 2020; min-p,
Nguyen et al. 2024), renormalise, draw with ``torch.multinomial``. A seeded row draws by the exponential race instead
(the Gumbel trick): argmax of p / q with q exponential noise from the row's own generator.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_NONE = float("-inf")


@dataclass(frozen=True)
class PeerRows:
    """The parameters of a batch as plain torch samplers take them.

    Attributes:
        temperature: [B, 1] float32.
        top_k: [B, 1] int64; the vocabulary size = off.
        top_p: [B, 1] float32; 1 = off.
        min_p: [B, 1] float32; 0 = off.
        frequency: [B, 1] float32.
        presence: [B, 1] float32.
        repetition: [B, 1] float32.
        counts: [B, V] float32, how often each id was generated; None without penalties.
        seen: [B, V] bool, which ids are in prompt or output; None without penalties.
        allowed: [B, V] bool, the grammar mask; None without.
        generators: One per row for seeded rows; empty when they share the default one.
        top_logprobs: How many of the most likely ids to report.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    repetition: torch.Tensor
    counts: torch.Tensor | None = None
    seen: torch.Tensor | None = None
    allowed: torch.Tensor | None = None
    generators: tuple[torch.Generator, ...] = ()
    top_logprobs: int = 0


def sample_argmax(logits: torch.Tensor, rows: PeerRows) -> torch.Tensor:
    """Returns each row's largest allowed id: [B] int64 from [B, V] float32."""
    if rows.allowed is not None:
        logits = logits.masked_fill(~rows.allowed, _NONE)
    return logits.argmax(dim=-1)


def sample_multinomial(logits: torch.Tensor, rows: PeerRows) -> torch.Tensor:
    """Returns a draw from the whole distribution, after dense penalties and with logprobs where they are asked for."""
    if rows.counts is not None and rows.seen is not None:
        logits = logits - rows.frequency * rows.counts - rows.presence * (rows.counts > 0)
        repeated = torch.where(logits > 0, logits / rows.repetition, logits * rows.repetition)
        logits = torch.where(rows.seen, repeated, logits)
    scaled = logits / rows.temperature
    token_ids = _draw(scaled.softmax(dim=-1), rows)
    if rows.top_logprobs:
        logprobs = logits.log_softmax(dim=-1)
        logprobs.topk(rows.top_logprobs, dim=-1)
        logprobs.gather(1, token_ids.unsqueeze(1))
    return token_ids


def sample_full_sort(logits: torch.Tensor, rows: PeerRows) -> torch.Tensor:
    """Returns a draw after a sort of the whole vocabulary, which any mix of filters can take."""
    return _cut_and_draw(*(logits / rows.temperature).softmax(dim=-1).sort(dim=-1, descending=True), rows)


def sample_top_k(logits: torch.Tensor, rows: PeerRows) -> torch.Tensor:
    """Returns a draw after a partial sort, which takes batches whose every row has a top_k."""
    probabilities = (logits / rows.temperature).softmax(dim=-1)
    return _cut_and_draw(*probabilities.topk(int(rows.top_k.max()), dim=-1), rows)


def _cut_and_draw(ordered: torch.Tensor, ids: torch.Tensor, rows: PeerRows) -> torch.Tensor:
    greater = ordered.cumsum(dim=-1) - ordered
    cut = greater > rows.top_p
    cut |= torch.arange(ordered.shape[-1], device=ordered.device) >= rows.top_k
    cut |= ordered < ordered[:, :1] * rows.min_p
    kept = ordered.masked_fill(cut, 0.0)
    return ids.gather(1, _draw(kept / kept.sum(dim=-1, keepdim=True), rows).unsqueeze(1)).squeeze(1)


def _draw(probabilities: torch.Tensor, rows: PeerRows) -> torch.Tensor:
    if not rows.generators:
        return torch.multinomial(probabilities, 1).squeeze(1)
    noise = torch.empty_like(probabilities)
    for row, generator in zip(noise, rows.generators, strict=True):
        row.exponential_(generator=generator)
    return (probabilities / noise).argmax(dim=-1)
