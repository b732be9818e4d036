"""Values of a config.json that are unsupported or contradictory are refused in one line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moa_jax.drafters.eagle3 import LAYER_IDS
from moa_jax.pretrained import load_drafter, load_target
from tests.model_folders import edit_json, refusal, save_random_drafter

NAN, WRONG_TYPE = float("nan"), "config.json holds a value of the wrong type ("
N = "target_layer_inference"
LONGROPE = {"rope_type": "longrope", "factor": 4.0}
GEMMA = {"model_type": "gemma3_text", "hidden_act": None, "head_dim": 10}
MISTRAL = {"model_type": "mistral", "sliding_window": 8}
QWEN2 = {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1}
BOTH = ["full_attention"] * 4 + ["sliding_attention"]
NESTED = {"transformer_layer_config": {}}
OF_QWEN2 = {"verifier": {"architectures": ["Qwen2ForCausalLM"]}}


def unsupported(**keys: Any) -> list[tuple[dict[str, Any], str]]:
    """Returns configs with one unsupported key each; the error names the key and its value."""
    return [({k: v}, f"{k}: {json.dumps(v)} is not supported") for k, v in keys.items()]


def rope(**keys: Any) -> dict[str, Any]:
    return {"rope_parameters": keys}


def yarn(**keys: Any) -> dict[str, Any]:
    return rope(**{"rope_type": "yarn", "factor": 2.0, **keys})


def quantized(method: str, **keys: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, **keys}}


def eight_bits(layout: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"} | weights}
    return quantized("compressed-tensors", format=layout, config_groups={"group_0": group})


def experts(**keys: Any) -> dict[str, Any]:
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    return {"model_type": "qwen3_moe", **sizes, **keys}


# Of each kind of model: changes of its config.json, and a part of the line that refuses each.
FAULTS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "target": [
        *unsupported(attention_multiplier=0.5, embedding_multiplier=12.0, logits_scaling=8.0),
        *unsupported(final_logit_softcapping=30.0, query_pre_attn_scalar=144, rotary_pct=0.25),
        *unsupported(sliding_window=16, is_causal=False, use_qk_norm=True, num_local_experts=8),
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported; use one of llama, qwen2"),
        ({"quantization_config": {"bits": 4}}, 'quantization_config: {"bits": 4} is not read; use'),
        *[(quantized(method), f'"{method}" is not read') for method in ("gptq", "awq", "mxfp4")],
        (eight_bits(num_bits=4), "quantization_config: W4A16 (pack-quantized) is not read"),
        (eight_bits("nvfp4-pack-quantized"), "W8A16 (nvfp4-pack-quantized) is not read"),
        (eight_bits(symmetric=False), "with zero points is not read"),
        (eight_bits(actorder="group"), "with inputs in another order (actorder) is not read"),
        (eight_bits(strategy="group", group_size=0), "group_size: 0 does not say which weights"),
        (eight_bits(strategy="block", block_structure="1x1"), 'block_structure: "1x1" does not'),
        (experts(decoder_sparse_step=2), "decoder_sparse_step: 2 is not supported: layers without"),
        (experts(use_sliding_window=True, sliding_window=8), "is not computed for qwen3_moe"),
        (experts(num_experts_per_tok=9), "num_experts_per_tok is 9 of 8 experts"),
        (rope(rope_theta=NAN), "rope_theta: nan is not supported"),
        ({"rope_parameters": None, "rope_scaling": LONGROPE}, "rope scaling 'longrope'"),
        (rope(rope_type="yarn"), "factor is missing"),
        (yarn(factor=-2.0), "factor: -2.0 is not supported; give a positive"),
        (yarn(mscale_all_dim="1"), "mscale_all_dim: '1' is not supported; give a positive number"),
        (yarn(attention_factor=0), "attention_factor: 0 is not supported; give a positive number"),
        (yarn(truncate="no"), 'truncate: "no" is not a boolean'),
        (yarn(original_max_position_embeddings=8e3), "embeddings: 8000.0 is not supported; give a"),
        (rope(rope_type="dynamic", factor=2.0, alpha=9.0), "alpha: 9.0 is not supported for rope"),
        ({"layer_types": BOTH}, "sliding-window"),
        (MISTRAL | {"layer_types": BOTH, "model_type": "ministral3"}, "sliding-window"),
        (QWEN2 | {"sliding_window": 0}, "sliding_window: 0 is not supported; give a whole"),
        (QWEN2 | {"layer_types": BOTH}, "sliding_window is missing; use the config.json"),
        (MISTRAL | {"sliding_window": "8"}, 'sliding_window: "8" is not supported; give a whole'),
        (MISTRAL | {"attention_bias": True}, "attention_bias: true is not supported"),
        (GEMMA | {"hidden_activation": "silu"}, 'hidden_activation: "silu" is not supported'),
        (GEMMA | {"query_pre_attn_scalar": 1.5}, "query_pre_attn_scalar: 1.5 is not supported"),
        (GEMMA | {"sliding_window": None}, "sliding_window is missing; use the config.json"),
        (GEMMA | rope(sliding_attention={"rope_type": "yarn"}), 'rope_local_scaling: "yarn"'),
        ({"model_type": "gemma3", "text_config": GEMMA | {"head_dim": 9}}, "head size 9 is odd"),
        ({"model_type": "mistral3", "text_config": {"model_type": "x"}}, "'x' is not supported"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: "),
        ({"tie_word_embeddings": "false"}, 'tie_word_embeddings: "false"'),
        ({"num_key_value_heads": 4}, "do not share 4"),
        ({"num_key_value_heads": -2}, "num_kv_heads is -2; choose a whole number"),
        ({"vocab_size": "50"}, "vocab_size is '50'; choose a whole number"),
        ({"eos_token_id": ["<end>"]}, WRONG_TYPE),
        # two values of one setting
        ({"rope_theta": 5e5}, "rope_parameters.rope_theta is 10000.0 and rope_theta is 500000.0"),
        ({"layer_types": ["full_attention"]}, "num_hidden_layers is 5 and layer_types is"),
    ],
    "moa": [
        *unsupported(hidden_act="gelu", sliding_window=16),
        ({"vocab_size": 102}, "vocab_size is 102 in its files and 101 in the target"),
        ({"cross_attention_intermediate_size": 7}, "is 7 but the tensors have 36"),
        ({N: 6}, "target_layer_inference is 6, but the target has 5 layers"),
        ({"method": "eagle9"}, "holds a drafter of kind 'eagle9'"),
        ({"layer_mixing": "sum"}, "layer_mixing is 'sum'; give one of attention, mean"),
        ({"rope_theta": 5e5, "rope_parameters": None}, "rope_theta is 500000.0 in its files"),
    ],
    "eagle3": [
        *unsupported(target_hidden_size=64, num_hidden_layers=2, num_aux_hidden_states=4),
        *unsupported(parallel_drafting=True, sliding_window=16),
        ({"model_type": "gemma3_text", "hidden_act": None}, "a layer of Gemma is not read"),
        ({"some_key_of_tomorrow": {"a": [1]}}, 'some_key_of_tomorrow: {"a": [1]} is not a support'),
        ({"eagle_config": {"new_norm": True}}, "eagle_config: new_norm: true is not a supported"),
        ({"eagle_config": {"fc_norm": True}}, "fc_norm is false and eagle_config.fc_norm is true"),
        ({"eagle_config": ["fc_norm"]}, 'eagle_config: ["fc_norm"] is not an object; write {...}'),
        ({"norm_output": "yes"}, 'norm_output: "yes" is not'),
        ({"norm_before_fc": True}, "lacks 1 tensor (input_norm.weight)"),
        ({LAYER_IDS: [1, 2, 4, 4]}, "fc.weight reads 3 streams of the target, not 4; list the"),
        (NESTED | {"speculators_version": "1.0"}, 'speculators_version: "1.0" is not read; use'),
        (NESTED | {"norm_before_residual": None}, "norm_before_residual is missing: speculators"),
        ({"transformer_layer_config": {"head_dim": 8}}, "head_dim is 10 and transformer_layer_"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state: false is"),
        ({LAYER_IDS: ["a", 1, 2]}, "layer_ids is ['a', 1, 2]; give layers of"),
        ({LAYER_IDS: [1, 2, 5]}, "tapped_layers [1, 2, 5] of a target of 5 layers; give layers"),
    ],
    "eagle": [
        *unsupported(norm_before_residual=True, draft_vocab_size=40),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3 but the tensors have 2"),
        ({"method": "eagle", "speculators_model_type": "eagle3"}, 'method is "eagle" and spec'),
        ({"speculators_config": OF_QWEN2}, "is Qwen2ForCausalLM in its files and LlamaForCausal"),
    ],
}
CASES = [(kind, *case) for kind, cases in FAULTS.items() for case in cases]


@pytest.mark.parametrize("kind, change, says", CASES)
def test_faults_of_a_config_are_one_line(pair, tmp_path, kind, change, says):
    target, folder = pair / "target", pair / ("target" if kind == "target" else "draft")
    if kind.startswith("eagle"):
        folder = save_random_drafter(tmp_path / "d", kind, target, **change)
    else:
        edit_json(folder / "config.json", **change)
    loaded = () if kind == "target" else (load_target(target),)
    said = refusal(load_drafter if loaded else load_target, folder, *loaded)
    assert says in said and str(folder) in said


def test_harmless_keys_pass(pair, tmp_path):
    harmless = dict.fromkeys(("rope_interleaved", "use_cache"), False)
    harmless |= {"attention_multiplier": 10**-0.5, "logits_scaling": 1.0, "sliding_window": 4096}
    harmless |= {"final_logit_softcapping": None, "pretraining_tp": 2}
    noted = {"dual_chunk_attention_config": {"original_max_position_embeddings": 99}}
    edit_json(pair / "target" / "config.json", **harmless | noted, key_of_tomorrow={"a": [1]})
    target = load_target(pair / "target")
    assert "is not computed, as in transformers: beyond 99 tokens" in target.notices[0]
    harmless["layer_types"] = ["full_attention"] * 5
    harmless |= {"bias": False, "_name_or_path": "x", "top_k": 50, "key_of_tomorrow": None}
    draft = save_random_drafter(tmp_path / "d", "eagle3", pair / "target", **harmless)
    assert load_drafter(draft, target).method == "eagle3"
