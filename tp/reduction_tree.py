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
        left: list[torch.Tensor] = []
        right: list[torch.Tensor] = []
        count, start, nodes = self._units, self.run.start, partials
        while nodes.shape[0] and count > 1:
            if start % 2:
                left.append(nodes[0])
                start, nodes = start + 1, nodes[1:]
            if nodes.shape[0] % 2 and start + nodes.shape[0] < count:
                right.append(nodes[-1])
                nodes = nodes[:-1]
            nodes = _add_pairs(nodes)
            count, start = -(-count // 2), start // 2
        if not left and not right:
            return nodes
        return torch.stack([*left, *nodes.unbind(0), *right[::-1]])

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
        nodes = {
            node: gathered[rank, place] for rank, owned in enumerate(self._subtrees) for place, node in enumerate(owned)
        }
        return _root(nodes, self._units)


def _add_pairs(nodes: torch.Tensor) -> torch.Tensor:
    """Returns the next level of [n, T, D]: neighbours added, a last one without a neighbour as it is."""
    pairs = nodes.shape[0] // 2
    if pairs == 0:
        return nodes
    added = nodes[: 2 * pairs : 2] + nodes[1 : 2 * pairs : 2]
    return added if nodes.shape[0] % 2 == 0 else torch.cat((added, nodes[-1:]))


def _root(nodes: dict[Node, torch.Tensor], units: int) -> torch.Tensor:
    """Returns the sum of all units from the sums of subtrees that cover each of them once."""
    level, count = 0, units
    while count > 1:
        for index in range(0, count, 2):
            one, other = nodes.pop(Node(level, index), None), nodes.pop(Node(level, index + 1), None)
            if one is not None:
                nodes[Node(level + 1, index // 2)] = one if other is None else one + other
        level, count = level + 1, -(-count // 2)
    return nodes[Node(level, 0)]
