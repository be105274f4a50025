"""Weights in a memory file: the next process finds the bits that were read, or nothing; nobody can change them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoints import write_tiny_checkpoint, write_tiny_gguf

from launch.rank import weights_kept
from launch.rank.compute_choice import ComputeChoice
from launch.rank.weights_kept import kept_weights
from runtime import kept_weights as module
from runtime.checkpoint import Checkpoint, open_checkpoint
from runtime.kept_weights import KeptWeights
from runtime.model import DecoderStage
from runtime.weights import WeightPart, WeightReader
from tp.group import TensorParallelGroup
from tp.products import ProductMode

CPU = torch.device("cpu")
PAGE = os.sysconf("SC_PAGE_SIZE")
DTYPES = (torch.float32, torch.bfloat16)
PLAIN = ComputeChoice(torch.float32, ProductMode.PLAIN, "")
PACKED = ComputeChoice(torch.bfloat16, ProductMode.ONEDNN, "")


def memory_file() -> int:
    return os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


@pytest.fixture
def file() -> Iterator[int]:
    opened = memory_file()
    yield opened
    os.close(opened)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture(scope="module")
def quantised(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Rows of a multiple of 32, as the quantisation wants them.
    wide = write_tiny_checkpoint(
        tmp_path_factory.mktemp("wide"), "llama", hidden_size=96, intermediate_size=160, num_attention_heads=6
    )
    return write_tiny_gguf(wide / "model.gguf", wide, GGMLQuantizationType.Q8_0)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    raw = [tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return one.dtype is other.dtype and one.shape == other.shape and torch.equal(*raw)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 40), min_size=1, max_size=3)), max_size=12),
    st.integers(1, 4 * PAGE),
    st.integers(0, 1 << 30),
)
def test_the_next_process_finds_every_bit(shapes: list[tuple[torch.dtype, list[int]]], segment: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    given_ = [torch.randn(shape, generator=generator).to(dtype) for dtype, shape in shapes]
    opened = memory_file()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SEGMENT_BYTES", segment)
        first = KeptWeights(opened)
        kept = [first.keep(str(index), tensor) for index, tensor in enumerate(given_)]
        # Within the first process too, complete or not.
        again = [first.find(str(index)) for index in range(len(given_))]
        first.complete()
    found = [KeptWeights(opened).find(str(index)) for index in range(len(given_))]
    for tensor, *copies in zip(given_, kept, found, again, strict=True):
        if tensor.numel() == 0:
            assert copies == [tensor, None, None]
            continue
        for copy in copies:
            assert copy is not None
            assert same_bits(copy, tensor)
            assert copy.data_ptr() % PAGE == 0
    assert KeptWeights(opened).find("other") is None
    os.close(opened)


def test_what_a_killed_process_left_is_not_used(file: int) -> None:
    pid = os.fork()
    if pid == 0:
        half = KeptWeights(file)
        half.keep("a", torch.ones(3 * PAGE))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert os.fstat(file).st_size > 3 * PAGE
    after = KeptWeights(file)
    assert not after.is_complete
    assert after.find("a") is None
    after.keep("a", torch.zeros(2))
    after.complete()
    found = KeptWeights(file).find("a")
    assert found is not None
    assert found.tolist() == [0.0, 0.0]


def test_a_write_reaches_nobody(file: int) -> None:
    first = KeptWeights(file)
    mine = first.keep("a", torch.ones(8))
    first.complete()
    theirs = KeptWeights(file).find("a")
    assert theirs is not None
    mine[0], theirs[1] = 5.0, 6.0
    assert theirs.tolist() == [1, 6, 1, 1, 1, 1, 1, 1]
    third = KeptWeights(file).find("a")
    assert third is not None
    assert third.tolist() == [1.0] * 8
    for change in (lambda: os.pwrite(file, b"x", 0), lambda: os.ftruncate(file, 0)):
        with pytest.raises(PermissionError):
            change()


def test_nothing_is_added_to_what_is_complete(file: int) -> None:
    KeptWeights(file).complete()
    kept, tensor = KeptWeights(file), torch.ones(2)
    assert kept.is_complete
    assert kept.keep("a", tensor) is tensor
    assert kept.find("a") is None
    kept.complete()


class CountingReader(WeightReader):
    """Counts the elements that it reads from files."""

    count = 0

    def read(self, name: str, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        tensor = super().read(name, rows, columns)
        self.count += tensor.numel()
        return tensor


def weights(path: Path, dtype: torch.dtype, kept: KeptWeights | None, rank: int, size: int) -> tuple[list[int], int]:
    """Returns sums over the bits of all weights of a rank of one stage, and how many elements were read from files."""
    checkpoint = open_checkpoint(path)
    reader = CountingReader(checkpoint, kept)
    loaded = []
    load = reader.load

    def noted(*args: object, **options: object) -> torch.Tensor:
        loaded.append(load(*args, **options))  # type: ignore[arg-type] # passed on as they came
        return loaded[-1]

    reader.load = noted  # type: ignore[method-assign] # only here
    layers = range(checkpoint.config.num_layers)
    group = mock.Mock(spec=TensorParallelGroup, rank=rank, size=size)
    DecoderStage(checkpoint.config, reader, layers, group, dtype=dtype, device=CPU)
    return [hash(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()) for tensor in loaded], reader.count


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2), (2, 3)])
def test_a_stage_is_loaded_with_the_same_bits(
    folder: Path, quantised: Path, dtype: torch.dtype, rank: int, size: int
) -> None:
    for path in (folder, quantised):
        fresh, read = weights(path, dtype, None, rank, size)
        opened = memory_file()
        first = KeptWeights(opened)
        assert weights(path, dtype, first, rank, size) == (fresh, read)
        first.complete()
        assert weights(path, dtype, KeptWeights(opened), rank, size) == (fresh, 0)
        os.close(opened)


def test_slices_and_dtypes_do_not_mix(folder: Path, file: int) -> None:
    kept, checkpoint = KeptWeights(file), open_checkpoint(folder)
    name = "model.layers.0.mlp.up_proj.weight"
    parts = [
        WeightPart(name),
        WeightPart(name, range(3)),
        WeightPart(name, range(1, 3)),
        WeightPart(name, None, range(3)),
        WeightPart(name.replace("up", "gate")),
    ]
    asked = [([part], dtype) for part in parts for dtype in DTYPES] + [([parts[1], parts[2]], torch.float32)]
    for _ in range(2):
        for several, dtype in asked:
            weight = WeightReader(checkpoint, kept).load(several, dtype=dtype, device=CPU)
            assert same_bits(weight, WeightReader(checkpoint).load(several, dtype=dtype, device=CPU))


def policy(file: int | None, checkpoint: Checkpoint, compute: ComputeChoice, *, invariant: bool = False) -> bool:
    return kept_weights(file, checkpoint, compute, CPU, invariant=invariant) is not None


def test_what_is_kept_where_it_takes_memory_on_top(
    folder: Path, quantised: Path, file: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    safetensors, gguf = open_checkpoint(folder), open_checkpoint(quantised)
    monkeypatch.setattr(weights_kept, "available_memory_bytes", lambda: 1 << 40)
    assert not policy(None, gguf, PLAIN)
    assert policy(file, safetensors, PLAIN)
    assert not policy(file, safetensors, PACKED), "the system keeps the file"
    assert not policy(file, safetensors, PLAIN, invariant=True)
    assert policy(file, gguf, PACKED)
    assert policy(file, gguf, PLAIN, invariant=True)
    assert caplog.messages == []
    monkeypatch.setattr(weights_kept, "available_memory_bytes", lambda: 1 << 20)
    assert policy(file, gguf, PLAIN)
    assert not policy(file, gguf, PACKED)
    (message,) = caplog.messages
    assert message.startswith("weights are not kept for recoveries")
    assert "the node has 1 MiB free, of which at most 25 % are taken" in message
    KeptWeights(file).complete()
    assert policy(file, gguf, PACKED), "the memory is spent already"
