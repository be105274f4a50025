"""The compiled kernels of invariant mode: the bits of the definition, in any shape, height and number of threads."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from launch.rank.invariant_start import invariant_products, prepare_kernels
from runtime.kernel_attention import KernelAttention, invariant_attention
from runtime.kv_cache import PagedKVCache, Span
from runtime.messages import InvariantFacts
from runtime.tiled_attention import KEY_BLOCK, AttentionShapes, tiled_visible
from tp.compiled_library import BuildError
from tp.group import TensorParallelGroup
from tp.invariant_kernels import InvariantKernels, PackedWeight, build_kernels
from tp.invariant_products import InvariantProduct, InvariantProductFactory, InvariantUnits
from tp.kernel_products import KernelProduct, KernelUnits
from tp.product_measure import onednn_supports
from tp.reduction_tree import ReductionTree

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module", params=["AVX512", "AVX2"])
def kernels(request: pytest.FixtureRequest) -> InvariantKernels:
    """The kernels of this machine, and those that it would have with shorter registers."""
    own = torch.backends.cpu.get_cpu_capability()
    if own not in {request.param, "AVX512"}:
        pytest.skip(f"this processor has {own}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: request.param)
        try:
            return InvariantKernels(build_kernels(os.environ))
        except BuildError as error:
            pytest.skip(f"the library of kernels {error}")


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def factory(kernels: InvariantKernels | None) -> InvariantProductFactory:
    return InvariantProductFactory(CPU, onednn=onednn_supports(torch.float32), kernels=kernels)


def randn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def chains(x: torch.Tensor, weight: torch.Tensor, chunk: int) -> torch.Tensor:
    """Returns x Wᵀ, each element a chain of fused multiply-adds over each chunk, the chunks added in order."""
    left, right = x.numpy().astype(np.longdouble), weight.numpy().astype(np.longdouble)
    total: np.ndarray | None = None
    for start in range(0, x.shape[1], chunk):
        part = np.zeros((x.shape[0], weight.shape[0]), np.float32)
        for k in range(start, min(start + chunk, x.shape[1])):
            part = (left[:, k, None] * right[None, :, k] + part).astype(np.float32)
        total = part if total is None else total + part
    return torch.from_numpy(total)


@pytest.mark.parametrize("seed", range(6))
def test_a_product_is_chains_of_fused_additions(kernels: InvariantKernels, threads: None, seed: int) -> None:
    draw = random.Random(seed)
    out, features, rows = draw.randrange(1, 140), draw.randrange(1, 90), draw.choice((1, 2, 5, 12, 13, 30))
    chunk = draw.choice((features, draw.randrange(1, features + 1)))
    weight, x = randn(out, features, seed=seed), randn(rows, features + 3, seed=seed + 50)[:, 3:]
    packed, ends = PackedWeight(weight, kernels.width), torch.tensor([-1], dtype=torch.int32)
    expected = chains(x, weight, chunk)
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found = kernels.product(x, packed, adds=ends, subtrees=1, chunk=chunk)
        assert torch.equal(found[0], expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "features", "unit"), [(96, 40, 24), (200, 576, 64), (70, 1100, 33), (5, 64, 5)])
def test_columns_have_the_bits_of_the_definition(
    kernels: InvariantKernels, dtype: torch.dtype, out: int, features: int, unit: int
) -> None:
    weight, bias, x = (t.to(dtype) for t in (randn(out, features), randn(out, seed=3), randn(40, features, seed=2)))
    plain, compiled = (factory(each).make(weight, bias, unit) for each in (None, kernels))
    assert isinstance(plain, InvariantProduct)
    assert isinstance(compiled, KernelProduct)
    expected = plain(x)
    assert torch.equal(compiled(x), expected)
    for rows in (1, 2, 3, 7, 8, 33):
        found = compiled(x[4 : 4 + rows])
        assert found.dtype == dtype
        assert found.is_contiguous()
        assert torch.equal(found, expected[4 : 4 + rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "units", "unit", "features"), [(1, 8, 19, 150), (3, 8, 64, 512), (2, 3, 192, 576)])
def test_units_have_the_bits_of_the_definition(
    kernels: InvariantKernels, dtype: torch.dtype, size: int, units: int, unit: int, features: int
) -> None:
    for rank in range(size):
        group = TensorParallelGroup(0, 1)
        group.rank, group.size = rank, size
        tree = ReductionTree(units, group)
        own = range(tree.run.start * unit, min(tree.run.stop * unit, features))
        weight, x = (t.to(dtype) for t in (randn(90, len(own)), randn(21, len(own), seed=2)))
        plain, compiled = (factory(each).make_units(weight, unit, tree) for each in (None, kernels))
        assert isinstance(plain, InvariantUnits)
        assert isinstance(compiled, KernelUnits)
        expected = plain(x)
        for rows in (1, 2, 9, 21):
            assert torch.equal(compiled(x[:rows]), expected[:, :rows])


def test_kernels_with_other_bits_are_not_used(kernels: InvariantKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    product = InvariantKernels.product

    def off(self: InvariantKernels, x: torch.Tensor, weight: PackedWeight, **rest: object) -> torch.Tensor:
        found = product(self, x, weight, **rest)  # type: ignore[arg-type]
        found[:, -1, -1] = found[:, -1, -1].nextafter(torch.tensor(torch.inf))
        return found

    monkeypatch.setattr(InvariantKernels, "product", off)
    products, tree = factory(kernels), ReductionTree(4, TensorParallelGroup(0, 1))
    assert isinstance(products.make(randn(96, 40), None, 24), InvariantProduct)
    assert isinstance(products.make_units(randn(40, 96), 24, tree), InvariantUnits)
    assert not products.all_compiled


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "group", "kv_heads"), [(64, 3, 3), (128, 2, 2), (16, 4, 1), (48, 7, 1)])
def test_attention_has_the_bits_of_the_definition(
    kernels: InvariantKernels, threads: None, dtype: torch.dtype, head_dim: int, group: int, kv_heads: int
) -> None:
    products = factory(kernels)
    attention = invariant_attention(products, head_dim=head_dim, group=group, kv_heads=kv_heads, dtype=dtype)
    assert isinstance(attention, KernelAttention)
    shapes = AttentionShapes(group, products.batched(head_dim, KEY_BLOCK))
    draw = random.Random(head_dim)
    cache = PagedKVCache(2, kv_heads, head_dim, num_blocks=400, block_tokens=4, dtype=dtype, device=CPU)
    for layer in range(2):
        keys, values = (randn(1600, kv_heads, head_dim, seed=seed + layer).to(dtype) for seed in (3, 5))
        cache.write(layer, torch.arange(1600), keys, values)
    for number in range(4):
        spans = random_spans(draw, 1600)
        rows = sum(span.length for span in spans)
        queries = randn(rows, kv_heads * group + kv_heads, head_dim, seed=number).to(dtype)[:, : kv_heads * group]
        window = draw.choice((None, 1, 70, 130))
        expected = tiled_visible(spans, window, shapes, CPU).attend(queries, cache, 1)
        for count in (1, 3):
            torch.set_num_threads(count)
            found = attention.visible(spans, window).attend(queries, cache, 1)
            assert found.dtype == dtype
            assert torch.equal(found, expected)


def random_spans(draw: random.Random, slots: int) -> list[Span]:
    """Returns sequences of random lengths and contexts, whose slots lie in runs of random lengths."""
    runs: list[tuple[int, int]] = []
    at = 0
    while at < slots:
        length = min(draw.choice((4, 8, 60)), slots - at)
        runs.append((at, length))
        at += length
    draw.shuffle(runs)
    spans: list[Span] = []
    start = 0
    for index in range(draw.choice((1, 4))):
        length, context = draw.choice((1, 1, 3, 90)), draw.choice((0, 1, 63, 64, 200))
        left, own = length + context, []
        while left > 0:
            slot, count = runs.pop()
            own.append((slot, min(count, left)))
            left -= count
        spans.append(Span(index, start, length, context, tuple(own)))
        start += length
    return spans


def test_without_a_compiler_a_run_goes_on_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    environ = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    facts = InvariantFacts(
        kernel="torch",
        tile_rows=8,
        attention_units=3,
        mlp_units=8,
        vocabulary_blocks=64,
        key_block=64,
        processor="AVX2",
        torch="2",
    )
    prepare_kernels(environ)
    with caplog.at_level(logging.WARNING):
        assert invariant_products(facts, CPU, 1, environ).kernels is None
        assert caplog.messages == []
        assert invariant_products(facts, CPU, 0, environ).kernels is None
    (message,) = caplog.messages
    assert "for the same bits: its library of kernels needs a C compiler" in message
