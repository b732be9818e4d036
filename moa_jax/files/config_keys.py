"""Keys of a config.json that change what a model computes, and the values that are computed here.

Most keys are harmless, and transformers writes dozens of them, so only keys of this list are
refused. They are those that other families or other software give to models of the same tensors.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping
from typing import Any

from moa_jax.errors import InputError

Values = Mapping[str, tuple[Any, ...]]  # patterns of keys; null is neutral for each

_SILU = ("silu", "swish")
NEUTRAL: Values = {
    "hidden_act": _SILU,
    "hidden_activation": _SILU,
    "activation_function": _SILU,
    "mlp_hidden_act": _SILU,
    # scales: Granite, Cohere, Falcon-H1, MiniCPM, Grok
    "*_multiplier": (1,),
    "*_multiplier_scale": (1,),
    "use_mup": (False,),
    "*logit*_scal*": (1,),
    "*softcap*": (0,),
    "*soft_cap*": (0,),
    "*logit_cap*": (0,),
    "scale_emb": (1,),
    "emb*_scale": (1,),
    "residual_scale": (1,),
    "width_scale": (1,),
    "scale_depth": (),
    "dim_model_base": (),
    "clip_qkv": (0,),
    # positions: GLM, StableLM, SmolLM3, Llama 4, Qwen 1
    "partial_rotary_factor": (1,),
    "rotary_pct": (1,),
    "rotary_percent": (1,),
    "rope_ratio": (1,),
    "rope_interleave*": (False,),
    "rope_local_base_freq": (),
    "use_rope": (True,),
    "no_rope_layers": ([],),
    "alibi": (False,),
    "use_alibi": (False,),
    "position_embedding_type": ("rope", "rotary"),
    "use_dynamic_ntk": (False,),
    "use_logn_attn": (False,),
    "attn_temperature_tuning": (False,),
    "llama_4_scaling": (),
    # which positions see which, and how layers are joined
    "attention_chunk_size": (0,),
    "is_causal": (True,),
    "use_bidirectional_attention": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "parallel_attn": (False,),
    "parallel_residual": (False,),
    "use_parallel_residual": (False,),
    "num_kv_shared_layers": (0,),
    "post_norm": (False,),
    "use_post_norm": (False,),
    "sandwich_norm": (False,),
    "norm_type": ("rms", "rmsnorm", "rms_norm", "RMSNorm"),
    "zero_centered_gamma": (False,),
    "add_unit_offset": (False,),
    "rms_norm_scale_offset": (0,),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "n_routed_experts": (0, 1),
}


HARMLESS = ("ffn_dim_multiplier",)  # fits a pattern above; intermediate_size has its result

# The same of a drafter's layer over embedding and feature: speculators, vLLM and NVIDIA's files.
LAYER_NEUTRAL: Values = {
    "norm_before_residual": (False,),
    "norm_before_fc": (False,),
    "fc_norm": (False,),
    "norm_output": (False,),
    "layernorms": (False,),
    "skip_prenorm": (True,),
    "skip_output_norm": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "use_aux_hidden_state": (True,),
    "num_aux_hidden_states": (3,),
    "parallel_drafting": (False,),
    "parallel_draft_step": (1,),
    "ptd_token_id": (),
    "pard_token": (),
    "feature_shift": (0,),
}


def refuse_keys(config: Mapping[str, Any], where: str, neutral: Values = NEUTRAL) -> None:
    """Raise InputError, naming `where`, for the first key with a value that is not computed here.

    The first pattern that fits a key gives its neutral values.
    """
    for key, value in config.items():
        values = next((v for pattern, v in neutral.items() if fnmatch.fnmatch(key, pattern)), None)
        is_neutral = key in HARMLESS or values is None or value is None or value in values
        if not is_neutral:
            instead = " or ".join(map(json.dumps, values))
            computed = f"only {instead} is computed" if values else "the key is not computed"
            raise InputError(
                f"{where}: {key}: {shown(value)} is not supported; {computed}, so use another model"
            )


def flag(config: Mapping[str, Any], key: str, where: str) -> bool:
    """A truth value, false where it is missing; raises InputError for other values."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise InputError(f"{where}: {key}: {shown(value)} is not a boolean; write true or false")
    return bool(value)


def refuse_contradictions(config: Mapping[str, Any], where: str) -> None:
    """Raise InputError for a nested config that contradicts the keys beside it."""
    for name in ("text_config", "llm_config", "transformer_layer_config"):
        for key, value in (config.get(name) or {}).items():
            beside = config.get(key)
            if key in _READ and None not in (value, beside) and value != beside:
                raise contradiction(where, key, beside, f"{name}.{key}", value)


def contradiction(where: str, key: str, value: Any, other: str, another: Any) -> InputError:
    """The error for two keys that say different things of one model."""
    return InputError(
        f"{where}: {key} is {shown(value)} and {other} is {shown(another)}; leave the one that "
        "these weights were trained with"
    )


_READ = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
    *("rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "hidden_act"),
    *("tie_word_embeddings", "attention_bias", "mlp_bias"),
)


def shown(value: Any) -> str:
    """A value as it stands in a JSON file, cut where it is long."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
