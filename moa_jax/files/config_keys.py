"""Keys of a config.json that change a model's computation, and their supported values.

Of a whole model only the keys listed here are refused, since transformers writes dozens of harmless
keys. Other model families and other software use the listed keys for models with the same tensors.
Of a one-layer drafter all keys but the listed ones are refused: each trainer of drafters adds keys
of its own, and a drafter that is computed wrongly only drafts badly.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable, Mapping
from typing import Any

from moa_jax.errors import InputError

Values = Mapping[str, tuple[Any, ...]]  # key patterns; null is always neutral


def _keys(values: tuple[Any, ...], patterns: str) -> Values:
    return dict.fromkeys(patterns.split(), values)


NEUTRAL: Values = {
    **_keys(("silu", "swish"), "hidden_act hidden_activation activation_function mlp_hidden_act"),
    # scales: Granite, Cohere, Falcon-H1, MiniCPM, Grok
    **_keys((1,), "*_multiplier *_multiplier_scale *logit*_scal* scale_emb emb*_scale"),
    **_keys((1,), "residual_scale width_scale"),
    **_keys((0,), "*softcap* *soft_cap* *logit_cap* clip_qkv"),
    **_keys((), "scale_depth dim_model_base"),
    **_keys((False,), "use_mup"),
    # positions: GLM, StableLM, SmolLM3, Llama 4, Qwen 1
    **_keys((1,), "partial_rotary_factor rotary_pct rotary_percent rope_ratio"),
    **_keys((False,), "rope_interleave* alibi use_alibi use_dynamic_ntk use_logn_attn"),
    **_keys((), "rope_local_base_freq llama_4_scaling"),
    **_keys((True,), "use_rope"),
    **_keys(([],), "no_rope_layers"),
    **_keys(("rope", "rotary"), "position_embedding_type"),
    # masks, residual connections and norms
    **_keys((0,), "attention_chunk_size num_kv_shared_layers rms_norm_scale_offset"),
    **_keys((True,), "is_causal"),
    **_keys((False,), "attn_temperature_tuning use_bidirectional_attention is_encoder_decoder"),
    **_keys((False,), "add_cross_attention parallel_attn parallel_residual use_parallel_residual"),
    **_keys((False,), "post_norm use_post_norm sandwich_norm zero_centered_gamma add_unit_offset"),
    **_keys(("rms", "rmsnorm", "rms_norm", "RMSNorm"), "norm_type"),
    **_keys((0, 1), "num_experts num_local_experts n_routed_experts"),
}
HARMLESS = ("ffn_dim_multiplier",)  # matches a pattern above; intermediate_size includes its effect

# Keys of one-layer drafters over embedding and feature: speculators, vLLM and NVIDIA's files.
LAYER_NEUTRAL: Values = {
    **_keys((False,), "norm_before_residual norm_before_fc fc_norm norm_output layernorms"),
    **_keys((False,), "use_mtp_layernorm parallel_drafting"),
    **_keys((True,), "skip_prenorm skip_output_norm use_input_layernorm_in_first_layer"),
    **_keys((True,), "use_last_layernorm use_aux_hidden_state next_layer_regular"),
    **_keys((3,), "num_aux_hidden_states"),
    **_keys((1,), "parallel_draft_step"),
    **_keys((), "ptd_token_id pard_token"),
    **_keys((0,), "feature_shift"),
}

# Keys that do not change the logits: of transformers' configs, and of trainers of drafters. Names
# with a leading underscore are those of transformers itself.
_BOOKKEEPING = """
    _* architectures auto_map dtype torch_dtype transformers_version id2label label2id problem_type
    name_or_path return_dict output_hidden_states output_attentions torchscript use_bfloat16
    tf_legacy_loss pruned_heads chunk_size_feed_forward is_decoder cross_attention_hidden_size
    tie_encoder_decoder finetuning_task tokenizer_class prefix task_specific_params bos_token_id
    eos_token_id pad_token_id sep_token_id decoder_start_token_id max_length min_length do_sample
    early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    bad_words_ids num_return_sequences output_scores return_dict_in_generate forced_bos_token_id
    forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens pretraining_tp use_cache attention_dropout initializer_range
    has_no_defaults_at_init is_composition speculators_* embed_requires_grad target_model_type
    parallel_draft_heads_num_layers decoder_sparse_step bias method target shifted_mask
    num_speculative_tokens num_lookahead_tokens inference_type base_model_*
""".split()


def refuse_keys(config: Mapping[str, Any], where: str, neutral: Values = NEUTRAL) -> None:
    """Raise InputError, naming `where`, for the first key with an unsupported value.

    The first pattern that matches a key gives its neutral values.
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


def refuse_unknown(config: Mapping[str, Any], where: str, known: Iterable[str]) -> None:
    """Raise InputError, naming `where`, for the first key that no list holds, unless it is null.

    `known` has the keys that the caller reads.
    """
    patterns = [*_BOOKKEEPING, *_READ, *_READ_ALSO, *NEUTRAL, *HARMLESS, *known]
    for key, value in config.items():
        if value is not None and not any(fnmatch.fnmatch(key, each) for each in patterns):
            raise InputError(
                f"{where}: {key}: {shown(value)} is not a supported key and may change the "
                "computation; remove the key if it does not"
            )


def flag(config: Mapping[str, Any], key: str, where: str) -> bool:
    """The boolean value of a key, False if missing; raises InputError for other types."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise InputError(f"{where}: {key}: {shown(value)} is not a boolean; write true or false")
    return bool(value)


def check_sections(config: Mapping[str, Any], where: str) -> None:
    """Raise InputError for a section of a drafter's config.json that is no object."""
    for key in ("target", "eagle_config", "speculators_config", "transformer_layer_config"):
        value = config.get(key)
        if value is not None and not isinstance(value, dict):
            raise InputError(f"{where}: {key}: {shown(value)} is not an object; write {{...}}")


def refuse_contradictions(config: Mapping[str, Any], where: str) -> None:
    """Raise InputError for a nested config that contradicts the keys beside it."""
    for name in ("text_config", "llm_config", "transformer_layer_config"):
        for key, value in (config.get(name) or {}).items():
            beside = config.get(key)
            if key in _READ and None not in (value, beside) and value != beside:
                raise contradiction(where, key, beside, f"{name}.{key}", value)


def contradiction(where: str, key: str, value: Any, other: str, another: Any) -> InputError:
    """The error for two keys that contradict each other."""
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
_READ_ALSO = (  # by `hf_config` and by `layer_files`
    *("model_type", "layer_types", "sliding_window", "use_sliding_window", "max_window_layers"),
    *("original_max_position_embeddings", "quantization_config", "compression_config"),
    *("attention_scale", "attn_scale", "softmax_scale", "query_pre_attn_scalar", "rotary_dim"),
    *("*qk_norm", "qk_layernorm", "draft_vocab_size", "eagle_config"),
)


def shown(value: Any) -> str:
    """A value as JSON, cut to 60 characters."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
