"""Reads and writes the Hugging Face `config.json` of a target.

transformers 4 writes `rope_theta` and `rope_scaling`; transformers 5 writes `rope_parameters`, for
Gemma 3 one per kind of layer. All forms are read. The older form is written, since both versions
read it. Of a model with towers besides its text model, the `text_config` is read.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from moa_jax.config import BlockConfig, ExpertsConfig, RopeScaling, TargetConfig
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
from moa_jax.files.families import ARCHITECTURES, FAMILIES, TEXT_OF_WRAPPER
from moa_jax.files.registry import check_pairing, mispaired
from moa_jax.model.layers import inverse_frequencies

GEMMA3, SLIDING, FULL = "gemma3_text", "sliding_attention", "full_attention"
WINDOWED = tuple(family for family in FAMILIES if family not in ("llama", "qwen3_moe"))
_HAVE_WINDOWS = ("mistral", "ministral", "ministral3")  # in every layer without `layer_types`


def target_config_from_hf(config: dict[str, Any], where: str = "config.json") -> TargetConfig:
    """Read a target's config; raises InputError, naming `where`, for unsupported models."""
    config = _text_config(config)
    family = config.get("model_type")
    if family not in ARCHITECTURES:
        raise InputError(
            f"{where}: model_type {family!r} is not supported; use one of "
            f"{', '.join(ARCHITECTURES)}"
        )
    config = {**FAMILIES[family].defaults, **config}
    heads = need(config, "num_attention_heads", where)
    width = need(config, "hidden_size", where)
    head_dim = _or(config, "head_dim", width // heads if heads else 0)
    _refuse_variants(config, where, family, head_dim)
    attention_bias = family != "qwen2" and flag(config, "attention_bias", where)
    rope_theta, rope_scaling = _rope_from_hf(config, where)
    is_gemma = family == GEMMA3
    block = BlockConfig(
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=_or(config, "num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate_size=need(config, "intermediate_size", where),
        rms_norm_eps=_positive(need(config, "rms_norm_eps", where), "rms_norm_eps", where),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        qkv_bias=attention_bias or family == "qwen2",
        out_bias=attention_bias,
        mlp_bias=family == "llama" and flag(config, "mlp_bias", where),
        qk_norm=family in ("qwen3", "qwen3_moe", GEMMA3),
        hidden_act="gelu_pytorch_tanh" if is_gemma else "silu",
        gemma_norms=is_gemma,
        query_pre_attn_scalar=_count(config, "query_pre_attn_scalar", where) if is_gemma else None,
        local_rope_theta=_local_theta(config, where) if is_gemma else None,
        experts=_experts_from_hf(config, where) if family == "qwen3_moe" else None,
    )
    positions = _positions(config, where, rope_scaling)
    return TargetConfig(
        family=family,
        vocab_size=need(config, "vocab_size", where),
        num_layers=need(config, "num_hidden_layers", where),
        block=block,
        tie_word_embeddings=flag(config, "tie_word_embeddings", where),
        max_position_embeddings=positions,
        sliding_windows=_windows(config, where, family, positions),
        embed_scale=width**0.5 if is_gemma else 1.0,
    )


def target_config_to_hf(cfg: TargetConfig) -> dict[str, Any]:
    """Write a target's config; raises InputError if its family cannot express the config."""
    block, scaling = cfg.block, cfg.block.rope_scaling
    positions = cfg.max_position_embeddings
    if scaling is not None and scaling.rope_type == "dynamic":
        positions = scaling.original_max_position_embeddings
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
        "hidden_act": block.hidden_act,
        "max_position_embeddings": positions,
        "rms_norm_eps": block.rms_norm_eps,
        "rope_theta": block.rope_theta,
        "rope_scaling": rope_to_hf(block.rope_scaling),
        "tie_word_embeddings": cfg.tie_word_embeddings,
        **_windows_to_hf(cfg),
    }
    if cfg.family in ("llama", "qwen3", "qwen3_moe", GEMMA3):
        config["attention_bias"] = block.qkv_bias
    if cfg.family == "llama":
        config["mlp_bias"] = block.mlp_bias
    if cfg.family == GEMMA3:
        config["hidden_activation"] = block.hidden_act
        config["query_pre_attn_scalar"] = block.query_pre_attn_scalar
        config["rope_local_base_freq"] = block.local_rope_theta
    if block.experts:
        config |= dataclasses.asdict(block.experts)
        config |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    if target_config_from_hf(config) != cfg:
        raise InputError(
            f"a {cfg.family} config cannot say these biases, norms, windows and scalings; "
            "choose the ones of that family"
        )
    return config


def towers_of(config: dict[str, Any]) -> list[str]:
    """The parts of a model besides its text model, which are not read, by their keys."""
    if config.get("model_type") not in TEXT_OF_WRAPPER:
        return []
    return [key for key in ("vision_config", "audio_config") if config.get(key)]


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the text model, and Gemma's rotary settings as flat keys.

    References: transformers ties a wrapper's head by the outer key, which defaults to true; its
    AutoConfig reads a Mistral with `layer_types` as a Ministral.
    """
    family, text = TEXT_OF_WRAPPER.get(config.get("model_type")), config.get("text_config")
    if family is not None and text is not None:
        # A head in the files that differs from the embedding is used in any case.
        tied = _or(config, "tie_word_embeddings", True) or text.get("tie_word_embeddings")
        config = {"model_type": family, **text, "tie_word_embeddings": tied}
    elif config.get("model_type") == "mistral" and config.get("layer_types") is not None:
        config = config | {"model_type": "ministral"}
    rope = config.get("rope_parameters") or {}
    if not rope.keys() & {SLIDING, FULL}:
        return config
    local = dict(rope.get(SLIDING) or {})
    kind = local.get("rope_type", "default")
    flat = {"rope_parameters": rope.get(FULL), "rope_local_base_freq": local.get("rope_theta")}
    return config | flat | ({} if kind == "default" else {"rope_local_scaling": kind})


def _experts_from_hf(config: dict[str, Any], where: str) -> ExpertsConfig:
    """The experts that every layer has; raises InputError if some layers have none."""
    for key, every in (("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        if _or(config, key, every) != every:
            raise InputError(
                f"{where}: {key}: {shown(config[key])} is not supported: layers without experts "
                "among layers with experts are not computed; use another model"
            )
    sizes = ("num_experts_per_tok", "moe_intermediate_size")
    return ExpertsConfig(
        num_experts=_or(config, "num_local_experts", config.get("num_experts")),
        norm_topk_prob=flag(config, "norm_topk_prob", where),
        **{key: need(config, key, where) for key in sizes},
    )


def need(config: dict[str, Any], key: str, where: str) -> Any:
    """A required value; raises InputError, naming `where` and the key, if it is missing."""
    if config.get(key) is None:
        raise InputError(f"{where}: {key} is missing; use the config.json that came with the model")
    return config[key]


def _positive(value: Any, key: str, where: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < float("inf"):
        raise InputError(f"{where}: {key}: {value!r} is not supported; give a positive number")
    return float(value)


def _or(config: dict[str, Any], key: str, default: Any) -> Any:
    """A value, or a default if the value is missing or null; 0 is kept and refused later."""
    value = config.get(key)
    return default if value is None else value


def _count(config: dict[str, Any], key: str, where: str) -> int:
    """A whole number of at least 1."""
    value = need(config, key, where)
    if type(value) is not int or value < 1:
        raise InputError(
            f"{where}: {key}: {shown(value)} is not supported; give a whole number of at least 1"
        )
    return value


def _local_theta(config: dict[str, Any], where: str) -> float:
    key = "rope_local_base_freq"
    return _positive(_or(config, key, 10_000.0), key, where)


def _positions(config: dict[str, Any], where: str, scaling: RopeScaling | None) -> int:
    """The positions of a model: with YaRN and dynamic scaling, at least `factor` original lengths.

    References: vLLM derives the same; Qwen's files state the original length with either form.
    """
    stated = need(config, "max_position_embeddings", where)
    if scaling is None or scaling.rope_type not in ("yarn", "dynamic"):
        return stated
    return max(stated, int(scaling.factor * scaling.original_max_position_embeddings))


def _refuse_variants(config: dict[str, Any], where: str, family: str, head_dim: int) -> None:
    """Raise InputError for keys with unsupported values and for keys that contradict each other."""
    scale = (head_dim**-0.5,) if head_dim else ()
    is_gemma = family == GEMMA3
    own: Values = {
        "attention_multiplier": scale,
        "attention_scale": scale,
        "attn_scale": scale,
        "softmax_scale": scale,
        "query_pre_attn_scalar": (config.get("query_pre_attn_scalar") if is_gemma else head_dim,),
        "rotary_dim": (head_dim,),
        "*qk_norm": (family in ("qwen3", "qwen3_moe", GEMMA3),),
        "qk_layernorm": (family in ("qwen3", "qwen3_moe", GEMMA3),),
        "mlp_bias": (True, False) if family == "llama" else (False,),
    }
    if family in _HAVE_WINDOWS:
        own = {**own, "attention_bias": (False,)}
    if is_gemma:
        gelu = ("gelu_pytorch_tanh",)
        own = {**own, "hidden_act": gelu, "hidden_activation": gelu, "rope_local_scaling": ()}
        own = {**own, "rope_local_base_freq": (config.get("rope_local_base_freq"),)}
    experts = ("num_experts", "num_local_experts") if family == "qwen3_moe" else ()
    own = {**own, **{key: (config.get(key),) for key in experts}}
    refuse_keys(config, where, {**own, **NEUTRAL, **own})  # own patterns first
    refuse_contradictions(config, where)
    for key in ("quantization_config", "compression_config"):
        if config.get(key):
            raise InputError(
                f"{where}: {key}: quantized weights are not read; use the unquantized model, and "
                "--weights to quantize it as it is loaded"
            )


def _windows(config: dict[str, Any], where: str, family: str, positions: int) -> tuple[int, ...]:
    """The window of each layer, 0 for full attention; () if no layer has one within all positions.

    References: transformers' config classes, by which a model without `layer_types` has windows in
    all layers (Mistral, Ministral), in 5 of 6 (Gemma 3), or from `max_window_layers` on (Qwen).
    """
    layers = need(config, "num_hidden_layers", where)
    kinds, window = config.get("layer_types"), config.get("sliding_window")
    asked, short = config.get("use_sliding_window"), False
    if family == "llama" and asked is None and kinds is None:  # no key of Llama's
        short = bool(window) and window < positions
    if family.startswith("qwen") and not asked:
        window = None
    if kinds is not None and len(kinds) != layers:
        raise contradiction(where, "num_hidden_layers", layers, "layer_types", kinds)
    given, kinds = kinds, _kinds(config, family, window) if kinds is None else list(kinds)
    unknown = any(kind not in (SLIDING, FULL) for kind in kinds)
    if family in ("mistral", "ministral3") and given is not None and window:
        unknown = FULL in kinds  # transformers then gives every layer a window
    if short or (family not in WINDOWED and asked and window):
        key = "sliding_window" if short else "use_sliding_window"
        raise InputError(
            f"{where}: {key}: {shown(config[key])} is not supported: sliding-window attention is "
            f"not computed for {family}; use full attention if the context stays within the window"
        )
    if SLIDING in kinds and family in WINDOWED:
        _count(config, "sliding_window", where)
    if unknown or (SLIDING in kinds and (family not in WINDOWED or window is None)):
        raise InputError(
            f"{where}: layer_types: {shown(given)} is not supported: sliding-window attention is "
            f"computed for {', '.join(WINDOWED)}, with "
            "sliding_window set; use such a config.json"
        )
    if SLIDING not in kinds:
        return ()
    if window >= positions and family != GEMMA3:
        return ()  # in Gemma 3 a window also selects the rotary base
    return tuple(window if kind == SLIDING else 0 for kind in kinds)


def _kinds(config: dict[str, Any], family: str, window: int | None) -> list[str]:
    """`layer_types` of a config without them."""
    layers, full = config["num_hidden_layers"], lambda i: True
    if family == GEMMA3:
        pattern = config.get("sliding_window_pattern") or 6
        full = lambda i: (i + 1) % pattern == 0
    elif family in _HAVE_WINDOWS:
        full = lambda i: window is None
    elif family.startswith("qwen"):
        full = lambda i: window is None or i < config.get("max_window_layers", 28)
    return [FULL if full(i) else SLIDING for i in range(layers)]


def _windows_to_hf(cfg: TargetConfig) -> dict[str, Any]:
    """The keys of windows, with `layer_types` for families that have them."""
    window = max(cfg.sliding_windows, default=0) or None
    if cfg.family in ("mistral", "ministral3"):
        return {"sliding_window": window}
    if window is None and cfg.family not in ("ministral", GEMMA3):
        return {}
    kinds = [SLIDING if each else FULL for each in cfg.windows_of_last(cfg.num_layers)]
    asked = {"use_sliding_window": True} if cfg.family.startswith("qwen") else {}
    return {"sliding_window": window, "layer_types": kinds, **asked}


def check_same_block(config: dict[str, Any], target: TargetConfig, where: str) -> None:
    """Raise InputError if the config of a drafter with the target's layers contradicts the target.

    Missing keys default to the target's values.
    """
    block, config = target.block, _text_config(config)
    _refuse_variants(config, where, target.family, block.head_dim)
    if not target.sliding_windows and target.family != GEMMA3:
        layers, positions = {"num_hidden_layers": target.num_layers}, target.max_position_embeddings
        if _windows({**layers, **config}, where, target.family, positions):
            raise mispaired("sliding_window", shown(config.get("sliding_window")), "none")
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
        positions = {"max_position_embeddings": target.max_position_embeddings}
        _, scaling = _rope_from_hf({**positions, **config}, where)
        tables = (
            inverse_frequencies(block.head_dim, block.rope_theta, each)
            * (1.0 if each is None else each.attention_factor)
            for each in (scaling, block.rope_scaling)
        )
        if not np.allclose(*tables, rtol=1e-4, atol=0):
            shown_scalings = (rope_to_hf(each) or "none" for each in (scaling, block.rope_scaling))
            raise mispaired("rope_scaling", *shown_scalings)


_ORIGINAL = "original_max_position_embeddings"
_SCALING_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": (
        *("factor", "beta_fast", "beta_slow", "truncate", "attention_factor"),
        *("llama_4_scaling_beta", _ORIGINAL),
    ),
}
SCALINGS = tuple(kind for kind in _SCALING_KEYS if kind != "default")
# Read, or repeated from the keys outside; written as `attention_factor`.
_ALSO_YARN = ("mscale", "mscale_all_dim", "max_position_embeddings")
_YARN_NUMBERS = ("beta_fast", "beta_slow", "attention_factor")
_YARN_NUMBERS_OR_0 = ("mscale", "mscale_all_dim", "llama_4_scaling_beta")


def _rope_from_hf(config: dict[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """Rotary base and scaling in either form; the base defaults to that of the family."""
    rope = _rope_keys(config, where)
    usual = 1_000_000.0 if config.get("model_type") == GEMMA3 else 10_000.0
    theta = _positive(rope.pop("rope_theta", usual), "rope_theta", where)
    kind = rope.pop("rope_type", "default")
    if kind not in _SCALING_KEYS:
        raise InputError(
            f"{where}: rope scaling {kind!r} is not supported; use a model with "
            f"{', '.join(SCALINGS)} scaling, or without any"
        )
    known = (*_SCALING_KEYS[kind], _ORIGINAL, "mrope_section")
    known += _ALSO_YARN if kind == "yarn" else ()
    for key, value in rope.items():
        if key not in known and value != 1:  # a factor of 1 is neutral
            raise InputError(
                f"{where}: {key}: {shown(value)} is not supported for rope scaling {kind!r}; use "
                "the config.json that came with the model"
            )
    if kind == "default":
        return theta, None
    factor = _positive(need(rope, "factor", where), "factor", where)
    if kind == "linear":
        return theta, RopeScaling("linear", factor)
    if kind == "llama3":
        keys = _SCALING_KEYS["llama3"][:3]
        factors = {key: _positive(need(rope, key, where), key, where) for key in keys}
        length = {_ORIGINAL: _count(rope, _ORIGINAL, where)}
        return theta, RopeScaling("llama3", **factors, **length)
    positions = need(config, "max_position_embeddings", where)
    if kind == "dynamic":
        if rope.get(_ORIGINAL, positions) != positions:
            keys = (_ORIGINAL, rope[_ORIGINAL], "max_position_embeddings", positions)
            raise contradiction(where, *keys)
        return theta, RopeScaling("dynamic", factor, **{_ORIGINAL: positions})
    is_given = lambda key: key in rope and (rope[key] != 0 or key in _YARN_NUMBERS)
    names = filter(is_given, (*_YARN_NUMBERS, *_YARN_NUMBERS_OR_0))
    given = {key: _positive(rope[key], key, where) for key in names}
    mscales = [given.pop(key, 0.0) for key in _ALSO_YARN[:2]]
    given.setdefault("attention_factor", yarn_attention_factor(factor, *mscales))
    given["truncate"] = flag({"truncate": rope.get("truncate", True)}, "truncate", where)
    given[_ORIGINAL] = _count({_ORIGINAL: positions} | rope, _ORIGINAL, where)
    return theta, RopeScaling("yarn", factor, **given)


def yarn_attention_factor(factor: float, mscale: float = 0.0, mscale_all_dim: float = 0.0) -> float:
    """The factor of YaRN's queries and keys; References: YaRN (2309.00071), DeepSeek's mscales."""
    of = lambda mscale: 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
    return of(mscale) / of(mscale_all_dim) if mscale and mscale_all_dim else of(1.0)


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


def rope_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """The value of `rope_scaling`."""
    if scaling is None:
        return None
    keys = _SCALING_KEYS[scaling.rope_type]
    found = {key: getattr(scaling, key) for key in ("rope_type", *keys)}
    return {key: value for key, value in found.items() if value or key == "truncate"}
