"""Products in every mode, dtype and number of rows against float64, and the choice between modes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tiny_checkpoints import write_tiny_checkpoint

from launch.cli.parse import UsageError
from launch.options import EngineOptions
from launch.rank import compute_choice
from launch.rank.compute_choice import agreed_compute
from runtime.checkpoint import open_checkpoint
from runtime.model_config import ModelConfig
from tp.product_measure import bfloat16_pays, faster_mode, measure_products, onednn_supports
from tp.products import PackedProduct, PlainProduct, ProductFactory, ProductMode

CPU = torch.device("cpu")
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
PLAIN, ONEDNN = ProductMode.PLAIN, ProductMode.ONEDNN


def _skip_without_onednn(dtype: torch.dtype) -> None:
    if not onednn_supports(dtype):
        pytest.skip(f"this CPU or build of torch has no oneDNN products in {dtype}")


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("mode", ProductMode)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_are_right_for_any_number_of_rows(
    dtype: torch.dtype, mode: ProductMode, *, shared: bool, with_bias: bool
) -> None:
    if mode is ONEDNN:
        _skip_without_onednn(dtype)
    torch.manual_seed(0)
    for out_features, in_features in ((48, 32), (33, 70), (1, 5)):
        weight = torch.randn(out_features, in_features).div_(in_features**0.5).to(dtype)
        bias = torch.randn(out_features).to(dtype) if with_bias else None
        product = ProductFactory(mode).make(weight.clone(), bias, shared=shared)
        for rows in (0, 1, 2, 3, 4, 5, 8, 17, 64, 65, 130):
            x = torch.randn(rows, in_features).to(dtype)
            kept = x.clone()
            got = product(x)
            expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
            assert got.shape == (rows, out_features)
            assert got.dtype == dtype
            assert got.is_contiguous()
            torch.testing.assert_close(got.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
            assert torch.equal(x, kept)
            # Callers add to results in place: they must be fresh.
            again = product(x)
            got.fill_(7.0)
            torch.testing.assert_close(again.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


def test_a_weight_that_others_read_stays_as_it_is() -> None:
    _skip_without_onednn(torch.bfloat16)
    weight = torch.randn(8, 4).to(torch.bfloat16)
    factory = ProductFactory(ONEDNN)
    assert isinstance(factory.make(weight), PackedProduct)
    assert not isinstance(factory.make(weight, shared=True), PackedProduct)
    assert isinstance(factory.make(torch.empty(0, 4)), PlainProduct)
    assert isinstance(factory.make(torch.empty(8, 4, device="meta")), PlainProduct)


def test_every_mode_is_measured_where_it_exists() -> None:
    seconds = measure_products(96, 64, (torch.float32, torch.bfloat16))
    expected = {(dtype, mode) for dtype, mode in itertools.product(TOLERANCES, ProductMode)}
    expected -= {(dtype, ONEDNN) for dtype in TOLERANCES if not onednn_supports(dtype)}
    assert seconds.keys() == expected
    assert all(0 < one < 1 for one in seconds.values())


@pytest.mark.parametrize(("plain", "onednn", "chosen"), [(2.0, 1.0, ONEDNN), (1.0, 1.2, ONEDNN), (1.0, 1.3, PLAIN)])
def test_noise_does_not_decide(plain: float, onednn: float, chosen: ProductMode) -> None:
    dtype = torch.float32
    assert faster_mode({(dtype, PLAIN): plain, (dtype, ONEDNN): onednn}, dtype) is chosen
    assert faster_mode({(dtype, PLAIN): plain}, dtype) is PLAIN
    times = {(torch.bfloat16, PLAIN): onednn, (torch.float32, PLAIN): plain}
    assert bfloat16_pays(times) is (chosen is ONEDNN)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return open_checkpoint(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama")).config


def _measured(monkeypatch: pytest.MonkeyPatch, seconds: dict[tuple[torch.dtype, ProductMode], float]) -> None:
    monkeypatch.setattr(compute_choice, "measure_products", lambda *_: seconds)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)


def _options(**fields: Any) -> EngineOptions:
    return EngineOptions(model=Path("m"), **fields)


def test_auto_takes_the_dtype_of_the_checkpoint_unless_it_is_slow_here(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = msgspec.structs.replace(config, dtype="bfloat16")
    fast = {(torch.float32, PLAIN): 3.0, (torch.float32, ONEDNN): 2.0, (torch.bfloat16, PLAIN): 4.0}
    slow = fast | {(torch.bfloat16, PLAIN): 9.0}
    _measured(monkeypatch, fast | {(torch.bfloat16, ONEDNN): 1.0})
    choice = agreed_compute(_options(), narrow, CPU, 0)
    assert (choice.dtype, choice.products) == (torch.bfloat16, ONEDNN)
    assert choice.why == (
        "measured 1e+03 ms in bfloat16, 2e+03 in float32, onednn products, oneDNN's being 4 times as fast as plain ones"
    )
    _measured(monkeypatch, slow)
    choice = agreed_compute(_options(), narrow, CPU, 0)
    assert (choice.dtype, choice.products) == (torch.float32, ONEDNN)
    assert agreed_compute(_options(dtype="bfloat16"), narrow, CPU, 0).dtype is torch.bfloat16
    assert agreed_compute(_options(), config, CPU, 0).dtype is torch.float32


def test_products_as_asked_for(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    _measured(monkeypatch, {(torch.float32, PLAIN): 1.0, (torch.float32, ONEDNN): 3.0})
    assert agreed_compute(_options(), config, CPU, 0).products is PLAIN
    assert agreed_compute(_options(products="plain"), config, CPU, 0).products is PLAIN
    monkeypatch.setattr(compute_choice, "onednn_supports", lambda _: True)
    assert agreed_compute(_options(products="onednn"), config, CPU, 0).products is ONEDNN
    monkeypatch.setattr(compute_choice, "onednn_supports", lambda _: False)
    with pytest.raises(UsageError, match=r"--products onednn: torch.float32 on cpu has no oneDNN products here"):
        agreed_compute(_options(products="onednn"), config, CPU, 0)
    assert agreed_compute(_options(), config, torch.device("meta"), 0).products is PLAIN
