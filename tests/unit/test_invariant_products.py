"""Products of invariant mode: right, and of the same bits for any rows, columns and way they are computed."""

from __future__ import annotations

import random

import pytest
import torch

from tp import invariant_products
from tp.group import TensorParallelGroup
from tp.invariant_products import CPU_TILES, BatchedProduct, InvariantProduct, InvariantProductFactory
from tp.linear import UnitParallelLinear, invariant_gated
from tp.product_measure import onednn_supports
from tp.reduction_tree import ReductionTree
from tp.tiles import cut_rows

CPU = torch.device("cpu")
ROWS = (1, 2, 3, 7, 8, 9, 33, 70)
DTYPES = (torch.float32, torch.bfloat16)


def factory(*, onednn: bool | None = None) -> InvariantProductFactory:
    return InvariantProductFactory(CPU, onednn=onednn_supports(torch.float32) if onednn is None else onednn)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("heights", [(8,), (64,), (8, 16, 24, 32, 48, 64, 128, 256)])
def test_tiles_cover_the_rows_without_much_waste(heights: tuple[int, ...]) -> None:
    for rows in range(700):
        tiles = cut_rows(rows, heights)
        covered = [row for tile in tiles for row in range(tile.start, tile.stop)]
        assert covered == list(range(rows))
        assert all(tile.height in heights and tile.stop - tile.start <= tile.height for tile in tiles)
        assert sum(tile.height for tile in tiles) - rows < max(heights[0], 32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("onednn", [None, False])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("out_features", "in_features", "unit"), [(120, 72, 8), (40, 576, 20), (5, 33, 2), (1, 8, 1)])
def test_rows_and_columns_have_the_same_bits_in_any_company(
    dtype: torch.dtype, onednn: bool | None, *, shared: bool, out_features: int, in_features: int, unit: int
) -> None:
    weight = randn(out_features, in_features).div_(in_features**0.5).to(dtype)
    bias = randn(out_features, seed=1).to(dtype)
    x = randn(80, in_features, seed=2).to(dtype)
    whole = factory(onednn=onednn).make(weight, bias, unit, shared=shared)(x)
    expected = x.double() @ weight.double().T + bias.double()
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(whole.double(), expected, atol=tolerance, rtol=tolerance)
    assert whole.dtype == dtype
    assert whole.is_contiguous()
    for stop in {unit, max(out_features // 2 // unit * unit, unit)}:
        product = factory(onednn=onednn).make(weight[:stop].contiguous(), bias[:stop], unit)
        for rows in ROWS:
            assert torch.equal(product(x[3 : 3 + rows]), whole[3 : 3 + rows, :stop])


def test_without_a_passed_trial_products_follow_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = randn(96, 40), randn(21, 40, seed=2)
    merged = factory().make(weight, None, 24)(x)
    monkeypatch.setattr(invariant_products, "same_bits", lambda *_: False)
    by_definition = factory()
    assert torch.equal(by_definition.make(weight, None, 24)(x), merged)
    assert not by_definition.all_merged
    tree = ReductionTree(4, TensorParallelGroup(0, 1))
    rows = by_definition.make_units(weight.T.contiguous(), 24, tree)(randn(21, 96))
    assert by_definition.batched(16, 64).heights == (8,)
    monkeypatch.undo()
    assert torch.equal(factory().make_units(weight.T.contiguous(), 24, tree)(randn(21, 96)), rows)


def test_a_kernel_whose_bits_depend_on_the_height_fails_its_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    def fickle(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        half = weight.shape[1] // 2
        if x.shape[0] < 16:
            return x @ weight.T
        return x[:, :half] @ weight[:, :half].T + x[:, half:] @ weight[:, half:].T

    monkeypatch.setattr(torch.nn.functional, "linear", fickle)
    products = factory(onednn=False)
    product = products.make(randn(64, 300), None, 16)
    assert isinstance(product, InvariantProduct)
    assert 8 in product.heights
    assert max(product.heights) < 16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_units_are_summed_in_float32_and_rounded_once(dtype: torch.dtype, *, with_bias: bool) -> None:
    units, unit, width, out_features = 8, 19, 150, 72
    weight, x = randn(out_features, width).to(dtype), randn(45, width, seed=2).to(dtype)
    bias = randn(out_features, seed=3).to(dtype) if with_bias else None
    tree = ReductionTree(units, TensorParallelGroup(0, 1))
    layer = UnitParallelLinear(factory().make_units(weight, unit, tree), bias, tree)
    whole = layer(x)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    tolerance = 1e-4 if dtype is torch.float32 else 2**-8
    torch.testing.assert_close(whole.double(), expected, atol=tolerance, rtol=tolerance)
    assert whole.dtype == dtype
    for rows in ROWS[:-1]:
        assert torch.equal(layer(x[2 : 2 + rows]), whole[2 : 2 + rows])
    whole.fill_(7.0)
    assert not torch.equal(layer(x), whole)


def test_batches_of_tiles_are_products() -> None:
    left, right = randn(5, 8, 16), randn(5, 16, 64, seed=1)
    for together in (True, False):
        torch.testing.assert_close(BatchedProduct((8,), together=together)(left, right), left @ right)
    assert CPU_TILES.base in factory().batched(16, 64).heights


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gated_row_has_the_same_bits_in_any_place(dtype: torch.dtype) -> None:
    draw = random.Random(4)
    both = randn(120, 300).mul_(6).to(dtype)
    gate, up = both.chunk(2, dim=1)
    whole = invariant_gated(gate, up)
    expected = torch.nn.functional.silu(gate.double()) * up.double()
    torch.testing.assert_close(whole.double(), expected, atol=1e-2, rtol=1e-2)
    for _ in range(60):
        start, columns = draw.randrange(100), draw.randrange(1, 150)
        stop = start + draw.randrange(1, 20)
        assert torch.equal(
            invariant_gated(gate[start:stop, :columns], up[start:stop, :columns]), whole[start:stop, :columns]
        )
