"""What a model is: its sizes, rotary embedding, biases and attention windows, read from its ``config.json``.

Needs no torch, so that the command line can judge a model before any rank starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec

from tp.partition import VOCABULARY_BLOCKS, mlp_units

Architecture = Literal["llama", "mistral", "qwen2", "qwen3"]
SUPPORTED_ARCHITECTURES: tuple[Architecture, ...] = get_args(Architecture)
RopeType = Literal["default", "linear", "llama3", "yarn"]
_ROPE_TYPES: tuple[str, ...] = get_args(RopeType)
# What each family assumes where config.json says nothing; heads of KV default to the query heads in llama.
_DEFAULT_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
_MISTRAL_WINDOW = 4096
_QWEN_WINDOW = 4096
_QWEN_MAX_WINDOW_LAYERS = 28
_QWEN3_HEAD_DIM = 128


class ModelConfigError(ValueError):
    """A model's configuration is not one this runtime can run."""


class RopeConfig(msgspec.Struct, frozen=True):
    """Rotary position embedding; fields that ``rope_type`` does not use keep their defaults.

    ``frequency_divisors`` (one per pair of dimensions) come with some GGUF files, which hold a scaling as its result.
    """

    theta: float = 10_000.0
    rope_type: RopeType = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    frequency_divisors: tuple[float, ...] = ()


MAX_LAYERS = 10_000
"""Far beyond any model. A damaged file may say millions, which would take minutes to refuse by its tensors."""


class ModelConfig(msgspec.Struct, frozen=True):
    """A decoder of one of the supported families; the same on every rank.

    ``windows`` has one entry a layer: how many positions, its own included, a token sees; None is all of them.
    ``dtype`` is what the checkpoint was saved in, None when it does not say.
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    dtype: str | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ModelConfigError(f"{name} {getattr(self, name)} must be at least 1")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ModelConfigError(f"head_dim {self.head_dim} must be even and at least 2")
        if self.num_heads % self.num_kv_heads:
            raise ModelConfigError(
                f"num_attention_heads {self.num_heads} is no multiple of num_key_value_heads {self.num_kv_heads}"
            )


def layer_count(given: int) -> int:
    """Returns how many layers a checkpoint says that its model has, before anything is made for each of them.

    Raises:
        ModelConfigError: It is not in 1..``MAX_LAYERS``: the file is damaged.
    """
    if not 1 <= given <= MAX_LAYERS:
        raise ModelConfigError(f"num_layers {given} must be at least 1 and at most {MAX_LAYERS}")
    return given


def check_parallel(config: ModelConfig, tp_size: int, pp_size: int) -> None:
    """Returns when the model can be cut over ``tp_size`` ranks a stage and ``pp_size`` stages.

    Raises:
        ModelConfigError: It cannot; the message names the largest size that works.
    """
    limits = {
        "attention heads": config.num_heads,
        "MLP units": mlp_units(config.intermediate_size),
        "vocabulary blocks": VOCABULARY_BLOCKS,
    }
    scarce = min(limits, key=lambda name: limits[name])
    if not 1 <= tp_size <= limits[scarce]:
        raise ModelConfigError(
            f"tp_size {tp_size} is not in 1..{limits[scarce]}: the model has {limits[scarce]} {scarce}"
        )
    if not 1 <= pp_size <= config.num_layers:
        raise ModelConfigError(
            f"pp_size {pp_size} is not in 1..{config.num_layers}: the model has {config.num_layers} layers"
        )


def read_model_config(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """Returns the configuration in a Hugging Face folder.

    Args:
        raw: What ``config.json`` holds, in the form of transformers 4 or 5.
        generation: What ``generation_config.json`` holds; empty when there is none.

    Raises:
        ModelConfigError: The architecture or one of its options is not supported, or a field is missing or wrong.
    """
    architecture = _architecture(raw)
    _refuse_unsupported(raw)
    num_layers = layer_count(_integer(raw, "num_hidden_layers"))
    num_heads = _integer(raw, "num_attention_heads")
    hidden_size = _integer(raw, "hidden_size")
    default_head_dim = _QWEN3_HEAD_DIM if architecture == "qwen3" else hidden_size // max(num_heads, 1)
    attention_bias = bool(raw.get("attention_bias", False)) and architecture in {"llama", "qwen3"}
    return ModelConfig(
        architecture=architecture,
        vocab_size=_integer(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_integer(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_integer(raw, "num_key_value_heads", _DEFAULT_KV_HEADS.get(architecture, num_heads)),
        head_dim=_integer(raw, "head_dim", default_head_dim),
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        rope=_rope(raw),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or architecture == "qwen2",
        output_bias=attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)) and architecture == "llama",
        qk_norm=architecture == "qwen3",
        windows=_windows(raw, architecture, num_layers),
        max_position_embeddings=_integer(raw, "max_position_embeddings"),
        eos_token_ids=_eos_token_ids(raw, generation),
        dtype=raw.get("dtype") or raw.get("torch_dtype"),
    )


def _architecture(raw: Mapping[str, Any]) -> Architecture:
    model_type = raw.get("model_type")
    for name in SUPPORTED_ARCHITECTURES:
        if model_type == name:
            return name
    raise ModelConfigError(
        f"architecture {model_type!r} is not supported; supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
    )


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelConfigError(f"hidden_act {raw['hidden_act']!r} is not supported; supported is 'silu'")
    if raw.get("quantization_config"):
        raise ModelConfigError("quantization_config is not supported; use unquantised weights or a GGUF file")
    if not isinstance(raw.get("rope_scaling") or raw.get("rope_parameters") or {}, dict):
        raise ModelConfigError("rope_scaling and rope_parameters must be objects")


def _rope(raw: Mapping[str, Any]) -> RopeConfig:
    # transformers 5 writes rope_parameters, with theta inside; before it was rope_scaling beside rope_theta.
    given = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    if any(isinstance(value, dict) for value in given.values()):
        raise ModelConfigError(f"rope parameters by layer type ({', '.join(given)}) are not supported")
    rope_type = given.get("rope_type") or given.get("type") or "default"
    if rope_type not in _ROPE_TYPES:
        raise ModelConfigError(f"rope_type {rope_type!r} is not supported; supported are {', '.join(_ROPE_TYPES)}")
    partial = given.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1.0):
        raise ModelConfigError(f"partial_rotary_factor {partial} is not supported; supported is 1.0")
    trained = raw.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
    fields = {name: given[name] for name in RopeConfig.__struct_fields__ if given.get(name) is not None}
    fields |= {
        "rope_type": rope_type,
        "theta": given.get("rope_theta") or raw.get("rope_theta") or RopeConfig().theta,
        "original_max_position_embeddings": trained or _integer(raw, "max_position_embeddings"),
    }
    if rope_type == "yarn" and "factor" not in fields:
        fields["factor"] = _integer(raw, "max_position_embeddings") / fields["original_max_position_embeddings"]
    needed = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
    for name in needed.get(rope_type, ()):
        if name not in fields:
            raise ModelConfigError(f"rope parameters of type {rope_type!r} lack {name}")
    try:
        return msgspec.convert(fields, RopeConfig)
    except msgspec.ValidationError as error:
        raise ModelConfigError(f"rope parameters of type {rope_type!r}: {error}") from error


def _windows(raw: Mapping[str, Any], architecture: Architecture, num_layers: int) -> tuple[int | None, ...]:
    if architecture == "llama":
        return (None,) * num_layers
    if architecture == "mistral":
        window = raw.get("sliding_window", _MISTRAL_WINDOW)
        return (None if window is None else _integer(raw, "sliding_window", _MISTRAL_WINDOW),) * num_layers
    if not raw.get("use_sliding_window", False) or raw.get("sliding_window", _QWEN_WINDOW) is None:
        return (None,) * num_layers
    window = _integer(raw, "sliding_window", _QWEN_WINDOW)
    kinds = raw.get("layer_types")
    if kinds is None:
        full = _integer(raw, "max_window_layers", _QWEN_MAX_WINDOW_LAYERS)
        return tuple(window if layer >= full else None for layer in range(num_layers))
    allowed = {"full_attention": None, "sliding_attention": window}
    if len(kinds) != num_layers or not set(kinds) <= set(allowed):
        raise ModelConfigError(f"layer_types must name one of {', '.join(allowed)} for each of {num_layers} layers")
    return tuple(allowed[kind] for kind in kinds)


def _eos_token_ids(*sources: Mapping[str, Any]) -> tuple[int, ...]:
    found: set[int] = set()
    for source in sources:
        ids = source.get("eos_token_id")
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    if not all(isinstance(token_id, int) for token_id in found):
        raise ModelConfigError(f"eos_token_id must be an id or a list of ids, not {sorted(map(str, found))}")
    return tuple(sorted(found))


def _integer(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = raw.get(name)
    if value is None:
        value = default
    if value is None:
        raise ModelConfigError(f"{name} is missing")
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelConfigError(f"{name} must be an integer, not {value!r}")
    return value


def _number(raw: Mapping[str, Any], name: str, default: float) -> float:
    value = raw.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ModelConfigError(f"{name} must be a number, not {value!r}")
    return float(value)
