"""Reads and writes the Hugging Face `config.json` of a target.

transformers 4 writes `rope_theta` and `rope_scaling`; transformers 5 writes `rope_parameters`.
Both forms are read. The older form is written, since both versions read it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from moa_jax.config import BlockConfig, RopeScaling, TargetConfig
from moa_jax.errors import InputError
from moa_jax.files.config_keys import (
    NEUTRAL,
    Values,
    contradiction,
    flag,
    refuse_contradictions,
    refuse_keys,
    shown,
)
from moa_jax.files.registry import check_pairing, mispaired
from moa_jax.model.layers import inverse_frequencies

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def target_config_from_hf(config: dict[str, Any], where: str = "config.json") -> TargetConfig:
    """Read a target's config; raises InputError, naming `where`, for unsupported models."""
    family = config.get("model_type")
    if family not in ARCHITECTURES:
        raise InputError(
            f"{where}: model_type {family!r} is not supported; use a llama, qwen2 or qwen3 model"
        )
    heads = need(config, "num_attention_heads", where)
    width = need(config, "hidden_size", where)
    head_dim = _or(config, "head_dim", width // heads if heads else 0)
    _refuse_variants(config, where, family, head_dim)
    attention_bias = family != "qwen2" and flag(config, "attention_bias", where)
    rope_theta, rope_scaling = _rope_from_hf(config, where)
    block = BlockConfig(
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=_or(config, "num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate_size=need(config, "intermediate_size", where),
        rms_norm_eps=_positive(float(need(config, "rms_norm_eps", where)), "rms_norm_eps", where),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        qkv_bias=attention_bias or family == "qwen2",
        out_bias=attention_bias,
        mlp_bias=family == "llama" and flag(config, "mlp_bias", where),
        qk_norm=family == "qwen3",
    )
    return TargetConfig(
        family=family,
        vocab_size=need(config, "vocab_size", where),
        num_layers=need(config, "num_hidden_layers", where),
        block=block,
        tie_word_embeddings=flag(config, "tie_word_embeddings", where),
        max_position_embeddings=need(config, "max_position_embeddings", where),
    )


def target_config_to_hf(cfg: TargetConfig) -> dict[str, Any]:
    """Write a target's config; raises InputError if its family cannot express the config."""
    block = cfg.block
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[cfg.family]],
        "model_type": cfg.family,
        "vocab_size": cfg.vocab_size,
        "hidden_size": block.hidden_size,
        "intermediate_size": block.intermediate_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": block.num_heads,
        "num_key_value_heads": block.num_kv_heads,
        "head_dim": block.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": cfg.max_position_embeddings,
        "rms_norm_eps": block.rms_norm_eps,
        "rope_theta": block.rope_theta,
        "rope_scaling": _rope_to_hf(block.rope_scaling),
        "tie_word_embeddings": cfg.tie_word_embeddings,
    }
    if cfg.family != "qwen2":
        config["attention_bias"] = block.qkv_bias
    if cfg.family == "llama":
        config["mlp_bias"] = block.mlp_bias
    if target_config_from_hf(config) != cfg:
        raise InputError(
            f"a {cfg.family} config cannot say these biases and norms; "
            "choose the ones of that family"
        )
    return config


def need(config: dict[str, Any], key: str, where: str) -> Any:
    """A required value; raises InputError, naming `where` and the key, if it is missing."""
    if config.get(key) is None:
        raise InputError(f"{where}: {key} is missing; use the config.json that came with the model")
    return config[key]


def _positive(value: float, key: str, where: str) -> float:
    if not 0 < value < float("inf"):
        raise InputError(f"{where}: {key}: {value} is not supported; give a positive number")
    return value


def _or(config: dict[str, Any], key: str, default: Any) -> Any:
    """A value, or a default if the value is missing or null; 0 is kept and refused later."""
    value = config.get(key)
    return default if value is None else value


def _refuse_variants(config: dict[str, Any], where: str, family: str, head_dim: int) -> None:
    """Raise InputError for keys with unsupported values and for keys that contradict each other."""
    scale = (head_dim**-0.5,) if head_dim else ()
    own: Values = {
        "attention_multiplier": scale,
        "attention_scale": scale,
        "attn_scale": scale,
        "softmax_scale": scale,
        "query_pre_attn_scalar": (head_dim,),
        "rotary_dim": (head_dim,),
        "*qk_norm": (family == "qwen3",),
        "qk_layernorm": (family == "qwen3",),
        "mlp_bias": (True, False) if family == "llama" else (False,),
    }
    refuse_keys(config, where, {**own, **NEUTRAL})
    refuse_contradictions(config, where)
    for key in ("quantization_config", "compression_config"):
        if config.get(key):
            raise InputError(
                f"{where}: {key}: quantized weights are not read; use the unquantized model, and "
                "--weights to quantize it as it is loaded"
            )
    if (windowed := _windowed(config, where, family)) is not None:
        raise InputError(
            f"{where}: {windowed}: {shown(config[windowed])} is not supported: sliding-window "
            "attention is not computed; use full attention if the context stays within the window"
        )


def _windowed(config: dict[str, Any], where: str, family: str) -> str | None:
    """The key that gives a layer a sliding window; None without one."""
    layers = need(config, "num_hidden_layers", where)
    kinds, window = config.get("layer_types"), config.get("sliding_window")
    asked = config.get("use_sliding_window")
    if kinds is not None:
        if any(kind != "full_attention" for kind in kinds):
            return "layer_types"
        if len(kinds) != layers:
            raise contradiction(where, "num_hidden_layers", layers, "layer_types", kinds)
        return None
    if asked:
        some = window and config.get("max_window_layers", 0) < layers
        return "use_sliding_window" if some else None
    # Qwen has windows only if `use_sliding_window` is true; Llama has no such key.
    short = window and window < config.get("max_position_embeddings", window + 1)
    return "sliding_window" if family == "llama" and asked is None and short else None


def check_same_block(config: dict[str, Any], target: TargetConfig, where: str) -> None:
    """Raise InputError if the config of a drafter with the target's layers contradicts the target.

    Missing keys default to the target's values.
    """
    block = target.block
    _refuse_variants(
        {"num_hidden_layers": target.num_layers, **config}, where, target.family, block.head_dim
    )
    biases = {"attention_bias": block.out_bias, "mlp_bias": block.mlp_bias}
    check_pairing({key: config.get(key) for key in biases}, biases)
    rope = _rope_keys(config, where)
    for key, value, of_target in (
        ("rms_norm_eps", config.get("rms_norm_eps"), block.rms_norm_eps),
        ("rope_theta", rope.get("rope_theta"), block.rope_theta),
    ):  # GGUF files hold float32
        if value is not None and not math.isclose(value, of_target, rel_tol=1e-4):
            raise mispaired(key, value, of_target)
    if "rope_scaling" in config or "rope_parameters" in config:
        _, scaling = _rope_from_hf(config, where)
        tables = (
            inverse_frequencies(block.head_dim, block.rope_theta, each)
            for each in (scaling, block.rope_scaling)
        )
        if not np.allclose(*tables, rtol=1e-4, atol=0):
            shown_scalings = (_rope_to_hf(each) or "none" for each in (scaling, block.rope_scaling))
            raise mispaired("rope_scaling", *shown_scalings)


_SCALING_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_ORIGINAL = "original_max_position_embeddings"


def _rope_from_hf(config: dict[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """Rotary base and scaling in either form; the base defaults to 10000."""
    rope = _rope_keys(config, where)
    theta = _positive(float(rope.pop("rope_theta", 10000.0)), "rope_theta", where)
    kind = rope.pop("rope_type", "default")
    if kind not in _SCALING_KEYS:
        raise InputError(
            f"{where}: rope scaling {kind!r} is not supported; use a model with llama3 or "
            "linear scaling, or without any"
        )
    known = (*_SCALING_KEYS[kind], _ORIGINAL, "mrope_section")
    for key, value in rope.items():
        if key not in known and value != 1:  # a factor of 1 is neutral
            raise InputError(
                f"{where}: {key}: {shown(value)} is not supported for rope scaling {kind!r}; use "
                "the config.json that came with the model"
            )
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", float(need(rope, "factor", where)))
    factors = {key: float(need(rope, key, where)) for key in _SCALING_KEYS["llama3"]}
    return theta, RopeScaling("llama3", **factors, **{_ORIGINAL: int(need(rope, _ORIGINAL, where))})


def _rope_keys(config: dict[str, Any], where: str) -> dict[str, Any]:
    """The rotary settings of all forms, by one name each; raises InputError for conflicts."""
    blocks = {
        "rope_parameters.": config.get("rope_parameters") or {},
        "rope_scaling.": config.get("rope_scaling") or {},
        "": {key: config.get(key) for key in ("rope_theta", _ORIGINAL)},
    }
    found: dict[str, Any] = {}
    names: dict[str, str] = {}
    for block, keys in blocks.items():
        for key, value in keys.items():
            meant = "rope_type" if key == "type" else key
            if value is None:
                continue
            if meant in found and found[meant] != value:
                raise contradiction(where, names[meant], found[meant], block + key, value)
            found.setdefault(meant, value)
            names.setdefault(meant, block + key)
    return found


def _rope_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None or scaling.rope_type == "llama3":
        return scaling and dataclasses.asdict(scaling)
    return {"rope_type": scaling.rope_type, "factor": scaling.factor}
