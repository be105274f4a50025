"""A sum over canonical units in one binary tree, whatever number of ranks share the units.

Neighbours are added two by two, then their sums two by two, and so on; a node without a neighbour goes up as it is. So
the tree depends on the number of units alone. A rank adds up every subtree whose units are all its own; each rank then
finishes the tree from all ranks' subtrees. Addition is not associative in floats: another tree gives other bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tp.group import TensorParallelGroup
from tp.partition import even_run


class Node(NamedTuple):
    """A subtree: ``place`` counts the nodes of its level, level 0 being the units."""

    level: int
    place: int


def own_subtrees(units: int, run: range) -> list[Node]:
    """Returns the largest subtrees whose units all lie in ``run``, in the order of their units.

    Args:
        units: Units of the whole tree.
        run: The units that one rank owns.
    """
    left: list[Node] = []
    right: list[Node] = []
    level, count, start, stop = 0, units, run.start, run.stop
    while start < stop and count > 1:
        if start % 2:
            left.append(Node(level, start))
            start += 1
        if start < stop and stop % 2 and stop < count:
            stop -= 1
            right.append(Node(level, stop))
        level, count, start, stop = level + 1, -(-count // 2), start // 2, -(-stop // 2)
    middle = [Node(level, start)] if start < stop else []
    return left + middle + right[::-1]


class ReductionTree:
    """One rank's part in a sum over ``units`` units.

    Attributes:
        run: The units that this rank owns.
        own: How many subtrees ``reduce`` returns.

    Args:
        units: How many units the whole group has.
        group: The ranks; each owns an even, contiguous run of the units.
    """

    def __init__(self, units: int, group: TensorParallelGroup) -> None:
        self._units = units
        self._group = group
        runs = [even_run(units, rank, group.size) for rank in range(group.size)]
        self.run = runs[group.rank]
        self._subtrees = [own_subtrees(units, run) for run in runs]
        self.own = len(self._subtrees[group.rank])
        self._most = max(len(subtrees) for subtrees in self._subtrees)

    def reduce(self, partials: torch.Tensor) -> torch.Tensor:
        """Returns the sums of this rank's subtrees, [S, T, D] float32, in the order of their units.

        Args:
            partials: [units of this rank, T, D] float32, one product a unit.
        """
        known = {Node(0, unit): product for unit, product in zip(self.run, partials.unbind(0), strict=True)}
        sums = [self._sum(node, known) for node in self._subtrees[self._group.rank]]
        if not sums:
            return partials
        return sums[0].unsqueeze(0) if len(sums) == 1 else torch.stack(sums)

    def adds(self) -> list[int]:
        """Returns ``reduce`` as a program for a stack of nodes, one number for each unit of this rank.

        After a unit's product so many sums are taken, each of the two nodes on top; where that completes a subtree of
        this rank the number is -1 - sums.
        """
        program: list[int] = []
        for node in self._subtrees[self._group.rank]:
            self._add_up(node, program)
            program[-1] = -1 - program[-1]
        return program

    def _add_up(self, node: Node, program: list[int]) -> None:
        if node.level == 0:
            program.append(0)
            return
        below, left = node.level - 1, 2 * node.place
        self._add_up(Node(below, left), program)
        if (left + 1) << below < self._units:
            self._add_up(Node(below, left + 1), program)
            program[-1] += 1

    def finish(self, subtrees: torch.Tensor) -> torch.Tensor:
        """Returns the whole sum, [T, D] float32, the same bits on every rank; all ranks call it together.

        Args:
            subtrees: [S, T, D] float32, from ``reduce``.

        Raises:
            CollectiveError: The gather over the group failed.
        """
        if self._group.size == 1:
            return subtrees[0]
        missing = self._most - subtrees.shape[0]
        padded = torch.nn.functional.pad(subtrees, (0, 0, 0, 0, 0, missing)) if missing else subtrees
        gathered = self._group.all_gather(padded)
        known = {
            node: gathered[rank, place] for rank, owned in enumerate(self._subtrees) for place, node in enumerate(owned)
        }
        return self._sum(Node((self._units - 1).bit_length(), 0), known)

    def _sum(self, node: Node, known: dict[Node, torch.Tensor]) -> torch.Tensor:
        """Returns the sum of a subtree from those of ``known`` that make it up."""
        if node in known:
            return known[node]
        below, left = node.level - 1, 2 * node.place
        one = self._sum(Node(below, left), known)
        if (left + 1) << below >= self._units:
            return one
        return one + self._sum(Node(below, left + 1), known)
