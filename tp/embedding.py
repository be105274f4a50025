"""Token embedding and LM head cut over the vocabulary: each rank holds the rows of its slice of canonical blocks.

Padding ids have no weights: the embedding never sees them, the head gives them −inf.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from tp.group import TensorParallelGroup
from tp.partition import VocabularySlice
from tp.products import Product


class VocabularyParallelEmbedding:
    """Token embeddings; every rank of the group gets the whole, equal rows.

    Args:
        weight: [piece.valid_size, D], the rows of the real ids that this rank owns; there may be none.
        piece: This rank's slice of the vocabulary.
        group: The ranks whose slices make up the vocabulary; all of them call the layer together.
    """

    def __init__(self, weight: torch.Tensor, piece: VocabularySlice, group: TensorParallelGroup) -> None:
        self.weight = weight
        self._piece = piece
        self._group = group

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns a fresh [T, D] in the weight's dtype for ``token_ids`` [T] int64.

        Ids of another rank's slice contribute zeros here, so that the sum over the group is exact.

        Raises:
            CollectiveError: The sum over the group failed.
        """
        if self._group.size == 1:
            return functional.embedding(token_ids, self.weight)
        if self._piece.valid_size == 0:
            rows = self.weight.new_zeros((token_ids.numel(), self.weight.shape[1]))
        else:
            local = token_ids - self._piece.start
            elsewhere = (local < 0) | (local >= self._piece.valid_size)
            rows = functional.embedding(local.masked_fill_(elsewhere, 0), self.weight)
            rows.masked_fill_(elsewhere.unsqueeze(1), 0.0)
        return self._group.all_reduce_sum_(rows)


class ParallelLMHead:
    """Logits of this rank's vocabulary slice; needs no collective, whole rows of logits exist nowhere.

    Args:
        product: With the weight's rows of the real ids that this rank owns: [S, D] to [S, piece.valid_size].
        piece: This rank's slice of the vocabulary.
    """

    def __init__(self, product: Product, piece: VocabularySlice) -> None:
        self._product = product
        self._piece = piece

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns a fresh float32 [S, piece.size] of ``hidden`` [S, D]; padding columns are −inf."""
        logits = self._product(hidden)
        if self._piece.valid_size == self._piece.size:
            return logits.float()
        padded = torch.full((hidden.shape[0], self._piece.size), -torch.inf, device=hidden.device)
        padded[:, : self._piece.valid_size] = logits
        return padded
