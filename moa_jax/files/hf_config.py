"""Reads and writes the Hugging Face `config.json` of a target.

transformers 4 writes `rope_theta` and `rope_scaling`, transformers 5 one block `rope_parameters`.
Both spellings are read; the older one is written, which both versions read.
"""

from __future__ import annotations

from typing import Any

from moa_jax.config import BlockConfig, RopeScaling, TargetConfig
from moa_jax.errors import InputError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def target_config_from_hf(config: dict[str, Any], where: str = "config.json") -> TargetConfig:
    """Read a target's config; raises InputError, naming `where`, for models that cannot be run."""
    family = config.get("model_type")
    if family not in ARCHITECTURES:
        raise InputError(
            f"{where}: model_type {family!r} is not supported: use a llama, qwen2 or qwen3 model"
        )
    _refuse_variants(config, where)
    heads = need(config, "num_attention_heads", where)
    width = need(config, "hidden_size", where)
    attention_bias = family != "qwen2" and bool(config.get("attention_bias"))
    rope_theta, rope_scaling = _rope_from_hf(config, where)
    block = BlockConfig(
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or width // heads,
        intermediate_size=need(config, "intermediate_size", where),
        rms_norm_eps=float(need(config, "rms_norm_eps", where)),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        qkv_bias=attention_bias or family == "qwen2",
        out_bias=attention_bias,
        mlp_bias=family == "llama" and bool(config.get("mlp_bias")),
        qk_norm=family == "qwen3",
    )
    return TargetConfig(
        family=family,
        vocab_size=need(config, "vocab_size", where),
        num_layers=need(config, "num_hidden_layers", where),
        block=block,
        tie_word_embeddings=bool(config.get("tie_word_embeddings")),
        max_position_embeddings=need(config, "max_position_embeddings", where),
    )


def target_config_to_hf(cfg: TargetConfig) -> dict[str, Any]:
    """Write a target's config; raises InputError where its family cannot express it."""
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
            f"a {cfg.family} config cannot say these biases and norms: "
            "choose the ones of that family"
        )
    return config


def need(config: dict[str, Any], key: str, where: str) -> Any:
    """A value that must be there; raises InputError naming `where` and the key."""
    if config.get(key) is None:
        raise InputError(f"{where}: {key} is missing: use the config.json that came with the model")
    return config[key]


def _refuse_variants(config: dict[str, Any], where: str) -> None:
    act = config.get("hidden_act", "silu")
    if act != "silu":
        raise InputError(f"{where}: hidden_act {act!r} is not supported: use a model with silu")
    if config.get("quantization_config"):
        raise InputError(
            f"{where}: quantised weights are not read: use the unquantised model, and --weights to "
            "quantise it as it is loaded"
        )
    layers = need(config, "num_hidden_layers", where)
    kinds = config.get("layer_types")
    if kinds is None:
        windowed = config.get("use_sliding_window") and config.get("sliding_window")
        sliding = bool(windowed) and config.get("max_window_layers", 0) < layers
    else:
        sliding = any(kind != "full_attention" for kind in kinds)
    if sliding:
        raise InputError(
            f"{where}: sliding-window attention is not supported: "
            "set use_sliding_window to false if the context stays within the window"
        )


def _rope_from_hf(config: dict[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """Rotary base and scaling in either spelling; a missing base is 10000."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if (rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise InputError(f"{where}: partial rotary embeddings are not supported: use another model")
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", float(need(rope, "factor", where)))
    if kind != "llama3":
        raise InputError(
            f"{where}: rope scaling {kind!r} is not supported: use a model with llama3 or "
            "linear scaling, or without any"
        )
    key = "original_max_position_embeddings"
    original = {key: config.get(key), **rope}
    return theta, RopeScaling(
        "llama3",
        factor=float(need(rope, "factor", where)),
        low_freq_factor=float(need(rope, "low_freq_factor", where)),
        high_freq_factor=float(need(rope, "high_freq_factor", where)),
        original_max_position_embeddings=int(need(original, key, where)),
    )


def _rope_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    if scaling.rope_type == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position_embeddings,
    }
