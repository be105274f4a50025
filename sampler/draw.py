"""The draw itself, once the supports are known: by inverse CDF over the ids in ascending order."""

from __future__ import annotations

import torch

from sampler.group import SliceGroup
from sampler.slices import SliceShape, weights_in_block
from sampler.support import pick, pick_many
from sampler.truncation import Step, Supports, Truncated


class SliceDraw:
    """Draws for one rank; what the candidates do not settle is resolved by the rank that holds the id.

    Args:
        group: The ranks; all make the same calls in the same order.
        shape: Where this rank's slice lies.
    """

    def __init__(self, group: SliceGroup, shape: SliceShape) -> None:
        self._group = group
        self._shape = shape

    def once_(self, token_ids: torch.Tensor, step: Step, found: Supports, uniform: torch.Tensor) -> None:
        """Draws the sampled rows; every rank of the group calls it.

        Args:
            token_ids: [B] int64, where the ids go.
            step: The step.
            found: What the rows are drawn from.
            uniform: [B] float64 in [0, 1).
        """
        rows, ids, weights = _settled(found.truncated)
        index, _ = pick(weights, uniform[rows])
        token_ids[rows] = ids.gather(1, index.unsqueeze(1)).squeeze(1)
        if len(found.wide):
            token_ids[found.wide] = self._wide(step, found, uniform[found.wide])

    def many_(self, token_ids: torch.Tensor, step: Step, found: Supports, uniform: torch.Tensor) -> None:
        """Draws the sampled rows M times from one step; every rank of the group calls it.

        Each draw is the one that ``once_`` makes with its number, bit for bit.

        Args:
            token_ids: [B, M] int64, where the ids go.
            step: The step.
            found: What the rows are drawn from.
            uniform: [B, M] float64 in [0, 1).
        """
        rows, ids, weights = _settled(found.truncated)
        index, _ = pick_many(weights, uniform[rows])
        token_ids[rows] = ids.gather(1, index)
        for place, row in enumerate(found.wide.tolist()):
            block, fraction = pick_many(found.masses[place : place + 1], uniform[row : row + 1])
            drawn = torch.full_like(block, -1)
            for one in torch.bincount(block.view(-1)).nonzero().view(-1):
                if bool(self._shape.holds(one)):
                    at = block == one
                    weights = self._weights(step, found.wide[place : place + 1], found.floors[place], one.view(1))
                    inner, _ = pick_many(weights, fraction[at].unsqueeze(0))
                    drawn[at] = self._shape.start + self._columns(one) + inner.squeeze(0)
            token_ids[row] = self._group.all_reduce_max_(drawn).squeeze(0)

    def _wide(self, step: Step, found: Supports, uniform: torch.Tensor) -> torch.Tensor:
        """Returns the ids of rows whose support no rank holds: first the block, then the id, which its owner resolves.

        Args:
            step: The step.
            found: What the rows are drawn from.
            uniform: [N] float64.
        """
        block, fraction = pick(found.masses, uniform)
        ids = torch.full_like(found.wide, -1)
        own = self._shape.holds(block).nonzero().squeeze(1)
        if len(own):
            weights = self._weights(step, found.wide[own], found.floors[own].unsqueeze(1), block[own])
            index, _ = pick(weights, fraction[own])
            ids[own] = self._shape.start + self._columns(block[own]) + index
        return self._group.all_reduce_max_(ids)

    def _weights(self, step: Step, rows: torch.Tensor, floors: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
        """Returns the weights of the ids of one of this rank's blocks for each row: [N, ids of a block] float64.

        Args:
            step: The step.
            rows: [N] int64.
            floors: The smallest value in each support, [N, 1] float32; one number for one row.
            block: [N] int64.
        """
        local = block - self._shape.first_block
        values = step.logits.view(step.batch.row_count, self._shape.blocks, -1)[rows, local]
        maxima = step.block_maxima[rows, block].unsqueeze(1)
        inverse = (1.0 / step.batch.temperature[rows]).to(torch.float32).unsqueeze(1)
        return weights_in_block(values, maxima, inverse).masked_fill_(values < floors, 0.0).to(torch.float64)

    def _columns(self, block: torch.Tensor) -> torch.Tensor:
        """Returns where some of this rank's blocks begin in its slice."""
        return (block - self._shape.first_block) * self._shape.block_length


def _settled(truncated: Truncated) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the rows that the candidates settle, the same on every rank: [N] int64, and [N, C] ids and weights.

    Ids ascend; weights are float64, 0 outside the support.
    """
    decision = truncated.decision
    settled = decision.settled
    ids = torch.where(decision.inside, truncated.ids, torch.iinfo(torch.int64).max)[settled]
    ascending = ids.sort(dim=1)
    weights = torch.where(decision.inside, decision.weights, 0.0)[settled].gather(1, ascending.indices)
    return truncated.rows[settled], ascending.values, weights
