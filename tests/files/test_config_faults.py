"""Values of a config.json that are refused in one line: unsupported, or contradictory."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from infer import convert
from moa_jax.drafters.eagle3 import LAYER_IDS
from moa_jax.drafters.moa.files import SIZES
from moa_jax.pretrained import load_drafter, load_target
from tests.model_folders import edit_json, refusal, save_random_drafter

NAN, WRONG_TYPE = float("nan"), "config.json holds a value of the wrong type ("
N, LSA = "target_layer_inference", "layer_self_attention"
SLIDING = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
YARN = {"rope_type": "yarn", "factor": 4.0}
QWEN2 = {"verifier": {"architectures": ["Qwen2ForCausalLM"]}}


def unsupported(**keys: Any) -> list[tuple[dict[str, Any], str]]:
    """Each of the keys is refused by name, with its value."""
    shown = lambda key, value: f"{key}: {json.dumps(value)} is not supported"
    return [({key: value}, shown(key, value)) for key, value in keys.items()]


def rope(**keys: Any) -> dict[str, Any]:
    return {"rope_parameters": keys}


# Changes of a target's config.json, and a part of the line that refuses each.
OF_A_TARGET: list[tuple[dict[str, Any], str]] = [
    *unsupported(attention_multiplier=0.5, embedding_multiplier=12.0, residual_multiplier=0.22),
    *unsupported(logits_scaling=8.0, logit_scale=0.25, final_logit_softcapping=30.0),
    *unsupported(attn_logit_softcapping=50.0, query_pre_attn_scalar=144, clip_qkv=8.0),
    *unsupported(partial_rotary_factor=0.0, rotary_pct=0.25, rope_interleaved=True),
    *unsupported(sliding_window=16, attention_chunk_size=16, is_causal=False, use_qk_norm=True),
    *unsupported(no_rope_layers=[1, 1, 1, 0, 1], num_local_experts=8, scale_depth=1.4),
    *unsupported(hidden_activation="gelu", hidden_act="gelu"),
    ({"model_type": "mistral"}, "model_type 'mistral' is not supported"),
    ({"model_type": None}, "model_type None is not supported"),
    ({"hidden_size": None}, "hidden_size is missing"),
    ({"quantization_config": {"bits": 4}}, "quantized"),
    (rope(factor=8.0), "factor: 8.0 is not supported"),
    (rope(rope_theta=0), "rope_theta: 0.0 is not supported"),
    (rope(rope_theta=NAN), "rope_theta: nan is not supported"),
    (rope(full_attention={"rope_theta": 1e6}), "full_attention: "),
    (rope(rope_type="linear", factor=2.0, attention_factor=1.2), "attention_factor: 1.2"),
    (rope(rope_type="dynamic"), "rope scaling 'dynamic'"),
    ({"rope_parameters": None, "rope_scaling": YARN}, "rope scaling 'yarn'"),
    (rope(rope_type="llama3", factor=8.0), "low_freq_factor is missing"),
    ({"layer_types": ["full_attention"] * 4 + ["sliding_attention"]}, "sliding-window"),
    (SLIDING, "sliding-window"),
    *(({"rms_norm_eps": value}, "rms_norm_eps: ") for value in (0, -1e-5, NAN, float("inf"))),
    *(
        ({key: "false"}, f'{key}: "false"')
        for key in ("tie_word_embeddings", "attention_bias", "mlp_bias")
    ),
    # counts and types
    ({"num_key_value_heads": 4}, "do not share 4"),
    *(
        ({"num_key_value_heads": wrong}, f"num_kv_heads is {wrong!r}; choose a whole number")
        for wrong in (-2, "2", [2], 2.0)
    ),
    ({"vocab_size": "50"}, "vocab_size is '50'; choose a whole number"),
    ({"num_hidden_layers": 2.5}, "num_layers is 2.5; choose a whole number"),
    ({"num_attention_heads": "8", "head_dim": None}, WRONG_TYPE),
    ({"rope_parameters": None, "rope_scaling": 3}, WRONG_TYPE),
    (rope(rope_type="linear", factor="two"), WRONG_TYPE),
    ({"rms_norm_eps": "small"}, WRONG_TYPE),
    ({"model_type": ["llama"]}, WRONG_TYPE),
    ({"pad_token_id": "0"}, WRONG_TYPE),
    *(({"eos_token_id": value}, WRONG_TYPE) for value in (True, 2.0, "2", {"id": 2}, ["<end>"])),
    # two values of one thing
    ({"rope_theta": 5e5}, "rope_parameters.rope_theta is 10000.0 and rope_theta is 500000.0"),
    (
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        'rope_parameters.rope_type is "default" and rope_scaling.rope_type is "linear"',
    ),
    (
        rope(rope_type="linear", type="llama3", factor=8.0),
        'rope_parameters.rope_type is "linear" and rope_parameters.type is "llama3"',
    ),
    (
        {"text_config": {"rms_norm_eps": 1e-6}},
        "rms_norm_eps is 1e-05 and text_config.rms_norm_eps is 1e-06",
    ),
    ({"layer_types": ["full_attention"]}, "num_hidden_layers is 5 and layer_types is"),
]


@pytest.mark.parametrize("change, says", OF_A_TARGET)
def test_faults_of_a_target(pair, change, says):
    path = pair / "target" / "config.json"
    edit_json(path, **change)
    said = refusal(load_target, pair / "target")
    assert says in said and said.startswith(str(pair / "target"))


def test_faults_of_other_target_files(pair):
    path = pair / "target" / "config.json"
    path.write_text(path.read_text().replace("{", '{"vocab_size": 9, ', 1))
    said = refusal(load_target, pair / "target")
    assert "'vocab_size' is 9 and 101" in said and str(path) in said
    other = pair / "target" / "generation_config.json"
    edit_json(other, eos_token_id=["<end>"])
    path.write_text(path.read_text().replace('"vocab_size": 9, ', "", 1))
    assert refusal(load_target, pair / "target").startswith(f"{other} holds a value of the wrong")


def proposing(tokens: object) -> dict[str, Any]:
    return {"speculators_config": {"proposal_methods": [{"speculative_tokens": tokens}]}}


# Changes of the config.json of an MoA drafter, as the authors write it.
OF_MOA: list[tuple[dict[str, Any], str]] = [
    *unsupported(hidden_act="gelu", logits_scaling=8.0, sliding_window=16),
    ({"vocab_size": 102}, "vocab_size is 102 in its files and 101 in the target"),
    ({"hidden_size": 64}, "hidden_size is 64 in its files and 60 in the target"),
    ({"num_hidden_layers": 6}, "num_hidden_layers is 6 in its files and 5"),
    ({"num_key_value_heads": 1}, "num_key_value_heads is 1 in its files and 2"),
    ({"disable_LSA": True}, "without layer self-attention"),
    ({"cross_attention_intermediate_size": 7}, "is 7 but the tensors have 36"),
    ({"cross_attention_num_key_value_heads": 0}, "is 0 but the tensors have"),
    ({N: 6}, "target_layer_inference is 6, but the target has 5 layers"),
    ({N: "1"}, "target_layer_inference is '1'"),
    ({N: -1}, "target_layer_inference is -1"),
    ({"method": "eagle9"}, "holds a drafter of kind 'eagle9'"),
    ({"method": ["moa"]}, WRONG_TYPE),
    ({"target": "x"}, WRONG_TYPE),
    ({"architectures": 3}, WRONG_TYPE),
    ({"transformer_layer_config": 3}, WRONG_TYPE),
    ({"speculators_config": None}, WRONG_TYPE),
    (proposing("4"), WRONG_TYPE),
    (proposing(-1), "depth is 0; choose a whole number of at least 1"),
    ({"kv_hidden_size": 38}, "kv_hidden_size is 38 in its files and 40"),
    ({"layer_mixing": "sum"}, "layer_mixing is 'sum'; give one of attention, mean"),
    (
        {"layer_mixing": "mean", "disable_LSA": True} | {f"{LSA}_{size}": 1 for size in SIZES},
        "has unexpected 9 tensors (layer_self_attention.",
    ),
    ({"has_self_attention": "no"}, "has_self_attention is 'no'; give true or"),
    ({"hidden_in_memory": True}, "but the tensor Hidden2E.weight is missing"),
    ({"hidden_in_memory": "no"}, "hidden_in_memory is 'no'"),
    ({"layer_mixing": "mean", "disable_LSA": False}, "disable_LSA is false and layer_mixing"),
    ({"rms_norm_eps": 1e-3}, "rms_norm_eps is 0.001 in its files and 1e-05"),
    ({"rope_theta": 5e5, "rope_parameters": None}, "rope_theta is 500000.0 in its files"),
    (
        rope(rope_type="linear", factor=4.0),
        "rope_scaling is {'rope_type': 'linear', 'factor': 4.0}",
    ),
    (
        {"hidden_size": 60, "transformer_layer_config": {"hidden_size": 64}},
        "hidden_size is 60 and transformer_layer_config.hidden_size is 64",
    ),
]


@pytest.mark.parametrize("change, says", OF_MOA)
def test_faults_of_a_mixture_of_attentions(pair, change, says):
    edit_json(pair / "draft" / "config.json", **change)
    said = refusal(load_drafter, pair / "draft", load_target(pair / "target"))
    assert says in said and str(pair / "draft") in said


# Of drafters of one layer: the kind, changes of its config.json, and a part of the line.
OF_ONE_LAYER = [
    *(
        ("eagle3", *case)
        for case in [
            *unsupported(norm_before_residual=True, norm_before_fc=True, fc_norm=True),
            *unsupported(norm_output=True, target_hidden_size=64, num_hidden_layers=2),
            *unsupported(attention_bias=True, logit_scale=0.25),
            ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state: false is"),
            ({"intermediate_size": 99}, "intermediate_size is 99 but the tensors have 32"),
            ({"draft_vocab_size": 39}, "draft_vocab_size is 39"),
            ({LAYER_IDS: ["a", 1, 2]}, "layer_ids is ['a', 1, 2]; give three layers"),
            ({LAYER_IDS: [True, 1, 2]}, "layer_ids is [True, 1, 2]; give three layers"),
            ({LAYER_IDS: "123"}, "layer_ids is '123'; give three layers"),
            ({LAYER_IDS: {"1": 2}}, "layer_ids is {'1': 2}; give three layers"),
            ({LAYER_IDS: [1, 2]}, "tapped_layers [1, 2] of a target of 5 layers; give three"),
            ({LAYER_IDS: [1, 2, 5]}, "tapped_layers [1, 2, 5] of a target of 5 layers; give three"),
        ]
    ),
    *(
        ("eagle", *case)
        for case in [
            *unsupported(norm_before_residual=True, num_hidden_layers=2, draft_vocab_size=40),
            *unsupported(hidden_act="gelu"),
            ({"num_key_value_heads": 3}, "num_key_value_heads is 3 but the tensors have 2"),
            (
                {"method": "eagle", "speculators_model_type": "eagle3"},
                'method is "eagle" and speculators_model_type is "eagle3"',
            ),
            (
                {"speculators_config": QWEN2},
                "is Qwen2ForCausalLM in its files and LlamaForCausalLM in the target",
            ),
        ]
    ),
]


@pytest.mark.parametrize("method, change, says", OF_ONE_LAYER)
def test_faults_of_a_drafter_of_one_layer(saved, tmp_path, method, change, says):
    target = saved / "llama" / "target"
    draft = save_random_drafter(tmp_path / "d", method, target, **change)
    said = refusal(load_drafter, draft, load_target(target))
    assert says in said and str(draft) in said


def test_harmless_keys_pass(pair, tmp_path):
    harmless = {
        "attention_multiplier": 10**-0.5,
        "ffn_dim_multiplier": 1.3,
        "logits_scaling": 1.0,
        "final_logit_softcapping": None,
        "rope_interleaved": False,
        "pretraining_tp": 2,
        "attention_dropout": 0.1,
        "use_cache": False,
        "is_llama_config": True,
        "sliding_window": 4096,
        "use_mrope": False,
        "some_key_of_tomorrow": {"a": [1]},
        "_name_or_path": "some/model",
    }
    edit_json(pair / "target" / "config.json", **harmless)
    target = load_target(pair / "target")
    harmless["layer_types"] = ["full_attention"] * 5
    draft = save_random_drafter(tmp_path / "d", "eagle3", pair / "target", **harmless)
    assert load_drafter(draft, target).method == "eagle3"


def test_values_that_a_gguf_file_rounds_are_the_same(pair, tmp_path):
    edit_json(pair / "draft" / "config.json", rms_norm_eps=float(np.float32(1e-5)))
    flags = ["--target", pair / "target", "--draft", pair / "draft", "--target-layer-inference", 0]
    convert.main([str(each) for each in [*flags, "--output", tmp_path / "new"]])
    assert (tmp_path / "new" / "config.json").exists()
