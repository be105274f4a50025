"""The tree of invariant sums: one shape for any number of ranks, and another shape gives other bits."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tp.group import TensorParallelGroup
from tp.partition import even_run
from tp.reduction_tree import Node, ReductionTree, own_subtrees


class FakeGroup(TensorParallelGroup):
    """Gathers what a list of ranks, played one after the other, has prepared."""

    def __init__(self, rank: int, size: int, prepared: list[torch.Tensor]) -> None:
        super().__init__(0, 1)
        self.rank, self.size = rank, size
        self._prepared = prepared

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        gathered = torch.stack(self._prepared)
        assert gathered.shape[1:] == tensor.shape
        return gathered


def recursive_sum(partials: torch.Tensor) -> torch.Tensor:
    """Returns the sum by the definition: neighbours two by two, level by level."""
    nodes: list[torch.Tensor] = list(partials)
    while len(nodes) > 1:
        nodes = [nodes[at] + nodes[at + 1] if at + 1 < len(nodes) else nodes[at] for at in range(0, len(nodes), 2)]
    return nodes[0]


def distributed_sums(partials: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Returns what each of ``size`` ranks gets."""
    units = len(partials)
    sums, most = [], 0
    for rank in range(size):
        tree = ReductionTree(units, FakeGroup(rank, size, []))
        sums.append(tree.reduce(partials[tree.run.start : tree.run.stop]))
        assert sums[-1].shape[0] == tree.own
        most = max(most, tree.own)
    padded = [torch.nn.functional.pad(one, (0, 0, 0, 0, 0, most - len(one))) for one in sums]
    return [ReductionTree(units, FakeGroup(rank, size, padded)).finish(sums[rank]) for rank in range(size)]


@settings(deadline=None, max_examples=60)
@given(units=st.integers(1, 70), data=st.data())
def test_every_number_of_ranks_gives_the_same_bits(units: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, units))
    partials = torch.randn(units, 3, 5, generator=torch.Generator().manual_seed(units))
    expected = recursive_sum(partials)
    for found in distributed_sums(partials, size):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_two_units_swapped_give_other_bits(size: int) -> None:
    partials = torch.randn(8, 64, 64, generator=torch.Generator().manual_seed(1))
    swapped = partials.clone()
    swapped[[1, 2]] = partials[[2, 1]]
    differing = distributed_sums(partials, size)[0] != distributed_sums(swapped, size)[0]
    assert differing.float().mean() > 0.1


@settings(deadline=None, max_examples=60)
@given(units=st.integers(1, 100), data=st.data())
def test_subtrees_are_few_and_cover_each_unit_once(units: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, units))
    covered: list[int] = []
    for rank in range(size):
        run = even_run(units, rank, size)
        nodes = own_subtrees(units, run)
        assert len(nodes) <= 2 * len(run).bit_length()
        for node in nodes:
            covered += range(node.place << node.level, min((node.place + 1) << node.level, units))
        assert not any(
            one.level == other.level and one.place ^ 1 == other.place for one, other in itertools.pairwise(nodes)
        )
    assert covered == list(range(units))


def test_a_rank_with_all_units_has_the_root() -> None:
    assert own_subtrees(9, range(9)) == [Node(4, 0)]
    assert own_subtrees(9, range(5)) == [Node(2, 0), Node(0, 4)]
    assert own_subtrees(9, range(5, 9)) == [Node(0, 5), Node(1, 3), Node(3, 1)]
