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
YARN = {"rope_type": "yarn", "factor": 4.0}
QWEN2 = {"verifier": {"architectures": ["Qwen2ForCausalLM"]}}


def unsupported(**keys: Any) -> list[tuple[dict[str, Any], str]]:
    """Returns configs with one unsupported key each; the error names the key and its value."""
    shown = lambda key, value: f"{key}: {json.dumps(value)} is not supported"
    return [({key: value}, shown(key, value)) for key, value in keys.items()]


def rope(**keys: Any) -> dict[str, Any]:
    return {"rope_parameters": keys}


# Of each kind of model: changes of its config.json, and a part of the line that refuses each.
FAULTS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "target": [
        *unsupported(attention_multiplier=0.5, embedding_multiplier=12.0, logits_scaling=8.0),
        *unsupported(final_logit_softcapping=30.0, query_pre_attn_scalar=144, rotary_pct=0.25),
        *unsupported(sliding_window=16, is_causal=False, use_qk_norm=True, num_local_experts=8),
        ({"model_type": "mistral"}, "model_type 'mistral' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        (rope(rope_theta=NAN), "rope_theta: nan is not supported"),
        ({"rope_parameters": None, "rope_scaling": YARN}, "rope scaling 'yarn'"),
        ({"layer_types": ["full_attention"] * 4 + ["sliding_attention"]}, "sliding-window"),
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
        *unsupported(norm_before_fc=True, target_hidden_size=64, num_hidden_layers=2),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state: false is"),
        ({LAYER_IDS: ["a", 1, 2]}, "layer_ids is ['a', 1, 2]; give three layers"),
        ({LAYER_IDS: [1, 2, 5]}, "tapped_layers [1, 2, 5] of a target of 5 layers; give three"),
    ],
    "eagle": [
        *unsupported(norm_before_residual=True, draft_vocab_size=40),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3 but the tensors have 2"),
        ({"method": "eagle", "speculators_model_type": "eagle3"}, 'method is "eagle" and spec'),
        ({"speculators_config": QWEN2}, "is Qwen2ForCausalLM in its files and LlamaForCausalLM in"),
    ],
}
CASES = [(kind, *case) for kind, cases in FAULTS.items() for case in cases]


@pytest.mark.parametrize("kind, change, says", CASES)
def test_faults_of_a_config_are_one_line(pair, tmp_path, kind, change, says):
    target = folder = pair / "target"
    if kind == "target":
        edit_json(folder / "config.json", **change)
        said = refusal(load_target, target)
    elif kind == "moa":
        folder = pair / "draft"
        edit_json(folder / "config.json", **change)
        said = refusal(load_drafter, folder, load_target(target))
    else:
        folder = save_random_drafter(tmp_path / "d", kind, target, **change)
        said = refusal(load_drafter, folder, load_target(target))
    assert says in said and str(folder) in said


def test_harmless_keys_pass(pair, tmp_path):
    harmless = {
        "attention_multiplier": 10**-0.5,
        "logits_scaling": 1.0,
        "final_logit_softcapping": None,
        "rope_interleaved": False,
        "pretraining_tp": 2,
        "use_cache": False,
        "sliding_window": 4096,
        "some_key_of_tomorrow": {"a": [1]},
    }
    edit_json(pair / "target" / "config.json", **harmless)
    target = load_target(pair / "target")
    harmless["layer_types"] = ["full_attention"] * 5
    draft = save_random_drafter(tmp_path / "d", "eagle3", pair / "target", **harmless)
    assert load_drafter(draft, target).method == "eagle3"
