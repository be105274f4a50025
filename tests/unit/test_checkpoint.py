"""Checkpoints: every fault is one line before any weight is read, and a slice is what the whole tensor has there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_checkpoints import EOS_TOKEN_ID, FAMILIES, write_tiny_checkpoint, write_tiny_gguf

from runtime.checkpoint import open_checkpoint
from runtime.checkpoint_layout import CheckpointError, required_tensors
from runtime.gguf_checkpoint import GgufCheckpoint
from runtime.model_config import RopeConfig
from runtime.rope import inverse_frequencies
from runtime.weights import WeightReader, resolve_dtype

ROOT = Path(__file__).resolve().parents[2]
QUERY = "model.layers.1.self_attn.q_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    made = {family: write_tiny_checkpoint(root / family, family, seed=3) for family in FAMILIES}
    made["sharded"] = write_tiny_checkpoint(root / "sharded", "llama", seed=3, max_shard_size="60KB")
    wide: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    made["blocks"] = write_tiny_checkpoint(root / "blocks", "llama", seed=4, **wide)
    write_tiny_gguf(made["blocks"] / "model.gguf", made["blocks"], GGMLQuantizationType.F32)
    return made


@pytest.fixture
def broken(folders: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(folders[name], tmp_path / name))

    return copy


def test_single_file_and_shards_hold_the_same(folders: dict[str, Path]) -> None:
    assert len(list(folders["sharded"].glob("*.safetensors"))) > 2
    single, sharded = (open_checkpoint(folders[name]) for name in ("llama", "sharded"))
    assert single.config == sharded.config
    for name in required_tensors(single.config):
        assert torch.equal(WeightReader(single).read(name), WeightReader(sharded).read(name))


@pytest.mark.parametrize("family", FAMILIES)
def test_slices_of_safetensors(folders: dict[str, Path], family: str) -> None:
    checkpoint = open_checkpoint(folders[family])
    reader, whole = WeightReader(checkpoint), load_file(folders[family] / "model.safetensors")
    assert checkpoint.config.eos_token_ids == (EOS_TOKEN_ID,)
    for name in required_tensors(checkpoint.config):
        assert torch.equal(reader.read(name), whole[name])
    assert torch.equal(reader.read(QUERY, range(5, 19)), whole[QUERY][5:19])
    assert torch.equal(reader.read(DOWN, None, range(7, 40)), whole[DOWN][:, 7:40])
    assert torch.equal(reader.read("model.norm.weight", range(2, 5)), whole["model.norm.weight"][2:5])
    assert reader.read("model.embed_tokens.weight", range(9, 9)).shape == (0, checkpoint.config.hidden_size)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_gguf_holds_the_tensors_of_the_folder_it_was_made_of(
    folders: dict[str, Path], tmp_path: Path, family: str
) -> None:
    write_tiny_gguf(tmp_path / "model.gguf", folders[family], GGMLQuantizationType.F32)
    source, made = open_checkpoint(folders[family]), open_checkpoint(tmp_path)
    assert isinstance(made, GgufCheckpoint)
    for field in ("vocab_size", "num_kv_heads", "head_dim", "tie_word_embeddings", "qkv_bias", "qk_norm"):
        assert getattr(made.config, field) == getattr(source.config, field)
    assert made.config.eos_token_ids == (EOS_TOKEN_ID,)
    reader, expected = WeightReader(made), WeightReader(source)
    for name, shape in required_tensors(source.config).items():
        assert torch.equal(reader.read(name), expected.read(name)), name
        rows = range(1, shape[0] - 1)
        assert torch.equal(reader.read(name, rows), expected.read(name, rows)), name
        if len(shape) == 2:
            columns = range(3, shape[1] - 2)
            assert torch.equal(reader.read(name, rows, columns), expected.read(name, rows, columns)), name


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "F16", "BF16"])
def test_quantised_slices_are_those_of_the_whole_tensor(folders: dict[str, Path], tmp_path: Path, kind: str) -> None:
    file = write_tiny_gguf(tmp_path / "model.gguf", folders["blocks"], GGMLQuantizationType[kind])
    checkpoint = open_checkpoint(file)
    reader, source = WeightReader(checkpoint), WeightReader(open_checkpoint(folders["blocks"]))
    original = source.read(DOWN).numpy()
    expected = dequantize(quantize(original, GGMLQuantizationType[kind]), GGMLQuantizationType[kind])
    np.testing.assert_array_equal(reader.read(DOWN).numpy(), expected)
    np.testing.assert_array_equal(reader.read(DOWN, range(3, 30), range(37, 101)).numpy(), expected[3:30, 37:101])
    whole = reader.read(QUERY)
    assert (whole - source.read(QUERY)).abs().max() < 0.1
    assert torch.equal(reader.read(QUERY, range(11, 50)), whole[11:50])


def test_torch_stays_out_until_weights_are_read(folders: dict[str, Path], tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "model.gguf", folders["qwen2"], GGMLQuantizationType.F16)
    script = (
        "import sys; from pathlib import Path; from runtime.checkpoint import open_checkpoint\n"
        "for path in sys.argv[1:]: open_checkpoint(Path(path))\n"
        "sys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", script, str(folders["sharded"]), str(tmp_path)]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def test_config_takes_its_dtype_from_the_tensors_when_it_has_none(broken: Callable[[str], Path]) -> None:
    folder = broken("qwen3")
    _edit(folder / "config.json", dtype=None, torch_dtype=None)
    assert open_checkpoint(folder).config.dtype == "float32"
    halves = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(halves, folder / "model.safetensors")
    config = open_checkpoint(folder).config
    assert config.dtype == "bfloat16"
    assert resolve_dtype("auto", config) is torch.bfloat16
    assert resolve_dtype("float32", config) is torch.float32
    with pytest.raises(ValueError, match="dtype 'int8' is not one of auto, float32, bfloat16"):
        resolve_dtype("int8", config)


def _edit(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def _refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        open_checkpoint(path)
    message = str(refused.value)
    assert "\n" not in message
    return message


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    assert "nothing does not exist" in _refusal(tmp_path / "nothing")
    assert "is not a model folder" in _refusal(tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"x")
    assert "is not a model: expected a folder or a .gguf file" in _refusal(tmp_path / "weights.bin")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    assert "has 2 GGUF files; name one of them: a.gguf" in _refusal(tmp_path)
    assert "is not a GGUF file" in _refusal(tmp_path / "a.gguf")


def test_faults_of_a_folder(broken: Callable[[str], Path]) -> None:
    folder = broken("qwen3")
    file = folder / "model.safetensors"
    _edit(folder / "config.json", model_type="gpt2")
    assert "architecture 'gpt2' is not supported; supported are llama, mistral" in _refusal(folder)
    _edit(folder / "config.json", model_type="qwen3", intermediate_size=95)
    assert "tensor model.layers.0.mlp.gate_proj.weight has shape (96, 64), the conf" in _refusal(folder)
    _edit(folder / "config.json", intermediate_size=96, num_hidden_layers=2)
    assert "tensor model.layers.2." in _refusal(folder)
    _edit(folder / "config.json", num_hidden_layers=3)
    open_checkpoint(folder)
    tensors = load_file(file)
    save_file({name: tensor for name, tensor in tensors.items() if name != DOWN}, file)
    assert f"tensor {DOWN} of the qwen3 model is missing" in _refusal(folder)
    save_file(tensors | {DOWN: tensors[DOWN].to(torch.int8)}, file)
    assert f"tensor {DOWN} has dtype I8" in _refusal(folder)
    file.write_bytes(file.read_bytes()[:-100])
    assert "model.safetensors is not a whole safetensors file" in _refusal(folder)
    (folder / "config.json").write_text("{")
    assert "config.json is not valid" in _refusal(folder)
    (folder / "config.json").unlink()
    assert "config.json does not exist" in _refusal(folder)


def test_faults_of_an_index(broken: Callable[[str], Path]) -> None:
    folder = broken("sharded")
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    other = next(file for file in weight_map.values() if file != weight_map[DOWN])
    _edit(index, weight_map=weight_map | {DOWN: other})
    assert f"{other}: tensor {DOWN} is missing, although" in _refusal(folder)
    _edit(index, weight_map=weight_map)
    (folder / other).unlink()
    assert f"{other} does not exist" in _refusal(folder)
    index.write_text("{}")
    assert "has no weight_map" in _refusal(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[: len(data) // 2], "is not a whole GGUF file"),
        (lambda data: data[:-40000], "ends beyond the file"),
        (lambda data: data[:300], "is not a whole GGUF file"),
        (lambda data: data[:6], "is not a whole GGUF file"),
        (lambda data: data[:4] + b"\0\0\0\3" + data[8:], "version 50331648 is not one of"),
        (lambda data: data.replace(b"general.architecture", b"general.arch1tecture"), "architecture None is not"),
        (
            lambda data: data.replace(b"llama.block_count", b"llama.block_c0unt"),
            "metadata llama.block_count is missing",
        ),
        (lambda data: data.replace(b"blk.1.attn_q.weight", b"blk.1.attn_z.weight"), f"tensor {QUERY} of the llama"),
        (
            lambda data: re.sub(
                rb"(llama\.block_count.{4}).{4}", lambda found: found[1] + b"\0\0\0\1", data, flags=re.DOTALL
            ),
            "num_layers 16777216 must be at least 1 and at most 10000",
        ),
        (
            lambda data: data.replace(b"blk.1.attn_q.weight", b"blk.1.attn\nq.weight"),
            r"the tensor name 'blk.1.attn\nq.weight' cannot be printed",
        ),
    ],
)
def test_faults_of_a_gguf_file(
    folders: dict[str, Path], tmp_path: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    file = write_tiny_gguf(tmp_path / "model.gguf", folders["blocks"], GGMLQuantizationType.Q8_0)
    file.write_bytes(change(file.read_bytes()))
    assert message in _refusal(file)


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_a_gguf_header_with_wrong_bytes_is_refused_or_read(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    file = tmp_path_factory.getbasetemp() / "mutated.gguf"
    original = (folders["blocks"] / "model.gguf").read_bytes()
    header_bytes = original.index(b"output_norm.weight") + 60
    mutated = bytearray(original)
    for _ in range(data.draw(st.integers(1, 3))):
        mutated[data.draw(st.integers(0, header_bytes))] = data.draw(st.integers(0, 255))
    file.write_bytes(mutated)
    refusal, config = "", None
    try:
        config = open_checkpoint(file).config
    except CheckpointError as error:
        refusal = str(error)
    if config is None:
        assert str(file) in refusal
        assert "\n" not in refusal
    else:
        assert min(config.num_layers, config.num_heads, config.num_kv_heads, config.vocab_size) > 0
        assert config.num_heads % config.num_kv_heads == 0


def _yarn(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(128)


def _linear(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_type(RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(2.0)


def _divisors(writer: GGUFWriter) -> None:
    llama3 = RopeConfig(rope_type="llama3", factor=8.0, original_max_position_embeddings=32)
    plain, scaled = (inverse_frequencies(rope, 16)[0] for rope in (RopeConfig(), llama3))
    writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy())


@pytest.mark.parametrize(
    ("add", "rope"),
    [
        (_linear, RopeConfig(rope_type="linear", factor=2.0)),
        (_yarn, RopeConfig(rope_type="yarn", factor=4.0, original_max_position_embeddings=128)),
        (_divisors, RopeConfig(rope_type="llama3", factor=8.0, original_max_position_embeddings=32)),
    ],
)
def test_rope_scaling_of_a_gguf_file(
    folders: dict[str, Path], tmp_path: Path, add: Callable[[GGUFWriter], None], rope: RopeConfig
) -> None:
    file = write_tiny_gguf(tmp_path / "model.gguf", folders["blocks"], GGMLQuantizationType.F32, add)
    got, expected = (inverse_frequencies(one, 16) for one in (open_checkpoint(file).config.rope, rope))
    torch.testing.assert_close(got[0], expected[0], rtol=1e-6, atol=0)
    assert got[1] == pytest.approx(expected[1])


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (lambda writer: writer.add_expert_count(8), "llama.expert_count 8 is not supported"),
        (lambda writer: writer.add_sliding_window(128), "llama.attention.sliding_window 128 is not supported"),
        (lambda writer: writer.add_uint16("split.count", 3), "the file is one of several parts"),
        (lambda writer: writer.add_rope_dimension_count(8), "rope.dimension_count 8 is not supported"),
        (lambda writer: writer.add_rope_scaling_type(RopeScalingType.LONGROPE), "rope.scaling.type 'longrope' is not"),
        (lambda writer: writer.add_tensor("blk.0.attn_gate.weight", np.zeros(4, np.float32)), "is not part of a llama"),
    ],
)
def test_models_in_gguf_that_cannot_run_are_named(
    folders: dict[str, Path], tmp_path: Path, add: Callable[[GGUFWriter], None], message: str
) -> None:
    assert message in _refusal(write_tiny_gguf(tmp_path / "m.gguf", folders["blocks"], GGMLQuantizationType.F32, add))
