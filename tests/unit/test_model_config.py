"""config.json of the four families, in old and new forms, and the sizes a model can be cut into."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.model_config import ModelConfig, ModelConfigError, RopeConfig, check_parallel, read_model_config

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 72,
    "intermediate_size": 150,
    "num_hidden_layers": 4,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
}


def read(generation: dict[str, Any] | None = None, **fields: Any) -> ModelConfig:
    return read_model_config({**BASE, **fields}, generation or {})


def test_llama_defaults() -> None:
    config = read()
    assert (config.head_dim, config.rms_norm_eps, config.tie_word_embeddings) == (8, 1e-6, False)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm) == (False, False, False, False)
    assert config.windows == (None,) * 4
    assert config.rope == RopeConfig(original_max_position_embeddings=2048)
    assert config.eos_token_ids == ()


def test_biases_and_norms_follow_the_family() -> None:
    biased: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}
    llama, mistral, qwen2, qwen3 = (read(model_type=name, **biased) for name in ("llama", "mistral", "qwen2", "qwen3"))
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias, llama.qk_norm) == (True, True, True, False)
    assert (mistral.qkv_bias, mistral.output_bias, mistral.mlp_bias, mistral.qk_norm) == (False, False, False, False)
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.mlp_bias, qwen2.qk_norm) == (True, False, False, False)
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.mlp_bias, qwen3.qk_norm) == (True, True, False, True)
    assert qwen3.head_dim == 128


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"model_type": "mistral"}, (4096,) * 4),
        ({"model_type": "mistral", "sliding_window": None}, (None,) * 4),
        ({"model_type": "mistral", "sliding_window": 16}, (16,) * 4),
        ({"model_type": "llama", "sliding_window": 16}, (None,) * 4),
        ({"model_type": "qwen2", "sliding_window": 16}, (None,) * 4),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3},
            (None, None, None, 16),
        ),
        (
            {
                "model_type": "qwen3",
                "use_sliding_window": True,
                "sliding_window": 16,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            (None, 16, None, 16),
        ),
    ],
)
def test_windows(fields: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert read(**fields).windows == windows


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    ],
)
def test_old_and_new_forms_of_rope_are_one(fields: dict[str, Any]) -> None:
    assert read(**fields).rope == RopeConfig(
        theta=5e5,
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=512,
    )


def test_yarn_takes_its_factor_from_the_lengths_when_it_has_none() -> None:
    rope = read(rope_scaling={"type": "yarn", "factor": None, "original_max_position_embeddings": 512}).rope
    assert (rope.rope_type, rope.factor, rope.beta_fast, rope.attention_factor) == ("yarn", 4.0, 32.0, None)


def test_eos_ids_come_from_both_files() -> None:
    assert read({"eos_token_id": [7, 2]}, eos_token_id=2).eos_token_ids == (2, 7)
    assert read({"eos_token_id": 9}, eos_token_id=None).eos_token_ids == (9,)


@pytest.mark.parametrize(
    ("fields", "dtype"), [({"dtype": "bfloat16"}, "bfloat16"), ({"torch_dtype": "float16"}, "float16")]
)
def test_dtype_in_old_and_new_form(fields: dict[str, Any], dtype: str) -> None:
    assert read(**fields).dtype == dtype


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gpt2"}, "architecture 'gpt2' is not supported; supported are llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "architecture None is not supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "72"}, "hidden_size must be an integer, not '72'"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps must be a number"),
        ({"num_key_value_heads": 2}, "num_attention_heads 9 is no multiple of num_key_value_heads 2"),
        ({"num_key_value_heads": 0}, "num_kv_heads 0 must be at least 1"),
        ({"num_attention_heads": 0}, "must be at least 1"),
        ({"head_dim": 7}, "head_dim 7 must be even"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is not supported"),
        ({"rope_scaling": "linear"}, "rope_scaling and rope_parameters must be objects"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, r"by layer type \(full_attention\)"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "of type 'linear' lack factor"),
        ({"rope_scaling": {"type": "linear", "factor": "big"}}, "rope parameters of type 'linear'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["full_attention"]}, "layer_types must"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be an id"),
    ],
)
def test_what_cannot_run_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        read(**fields)


def test_the_largest_sizes_are_named() -> None:
    config = read()
    for tp_size in range(1, 10):
        check_parallel(config, tp_size, 4)
    with pytest.raises(ModelConfigError, match=r"tp_size 10 is not in 1\.\.9: the model has 9 attention heads"):
        check_parallel(config, 10, 1)
    with pytest.raises(ModelConfigError, match=r"pp_size 5 is not in 1\.\.4: the model has 4 layers"):
        check_parallel(config, 1, 5)
    with pytest.raises(ModelConfigError, match=r"tp_size 0 is not in 1\.\.9"):
        check_parallel(config, 0, 1)
    with pytest.raises(ModelConfigError, match=r"1\.\.3: the model has 3 MLP units"):
        check_parallel(read(intermediate_size=3), 4, 1)
    with pytest.raises(ModelConfigError, match=r"tp_size 65 is not in 1\.\.64"):
        check_parallel(read(num_attention_heads=72, num_key_value_heads=72, head_dim=8, intermediate_size=4096), 65, 1)
