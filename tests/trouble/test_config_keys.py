"""Keys of a config.json that change the mathematics and are not computed are refused by name."""

from __future__ import annotations

import json

import pytest

from tests.model_folders import edit_json
from tests.trouble.drafters import save_random_drafter

SHORT = ("--prompt-ids", "5,17,60", "--max-new-tokens", "4")


def refused(key, value):
    return f"{key}: {json.dumps(value)} is not supported"


@pytest.mark.parametrize(
    "key, value",
    [
        ("attention_multiplier", 0.5),
        ("embedding_multiplier", 12.0),
        ("residual_multiplier", 0.22),
        ("logits_scaling", 8.0),
        ("logit_scale", 0.25),
        ("final_logit_softcapping", 30.0),
        ("attn_logit_softcapping", 50.0),
        ("query_pre_attn_scalar", 144),
        ("clip_qkv", 8.0),
        ("partial_rotary_factor", 0.0),
        ("rotary_pct", 0.25),
        ("rope_interleaved", True),
        ("sliding_window", 16),
        ("attention_chunk_size", 16),
        ("is_causal", False),
        ("use_qk_norm", True),
        ("no_rope_layers", [1, 1, 1, 0, 1]),
        ("num_local_experts", 8),
        ("scale_depth", 1.4),
        ("hidden_activation", "gelu"),
    ],
)
def test_keys_of_a_target(run, pair, key, value):
    edit_json(pair / "target" / "config.json", **{key: value})
    line = run("infer.generate", "--target", pair / "target", *SHORT).refusal()
    assert refused(key, value) in line and "config.json" in line


@pytest.mark.parametrize(
    "rope, says",
    [
        ({"factor": 8.0}, "factor: 8.0 is not supported"),
        ({"rope_theta": 0}, "rope_theta: 0.0 is not supported"),
        ({"rope_theta": float("nan")}, "rope_theta: nan is not supported"),
        ({"full_attention": {"rope_theta": 1e6}}, "full_attention: "),
        ({"rope_type": "linear", "factor": 2.0, "attention_factor": 1.2}, "attention_factor: 1.2"),
    ],
)
def test_keys_of_rotary_embeddings(run, pair, rope, says):
    edit_json(pair / "target" / "config.json", rope_parameters=rope)
    assert says in run("infer.generate", "--target", pair / "target", *SHORT).refusal()


@pytest.mark.parametrize("value", [0, -1e-5, float("nan"), float("inf")])
def test_an_epsilon_is_a_positive_number(run, pair, value):
    edit_json(pair / "target" / "config.json", rms_norm_eps=value)
    line = run("infer.generate", "--target", pair / "target", *SHORT).refusal()
    assert "rms_norm_eps: " in line and "give a positive number" in line


@pytest.mark.parametrize("key", ["tie_word_embeddings", "attention_bias", "mlp_bias"])
def test_truth_values_are_no_words(run, pair, key):
    edit_json(pair / "target" / "config.json", **{key: "false"})
    line = run("infer.generate", "--target", pair / "target", *SHORT).refusal()
    assert f'{key}: "false"' in line


def test_harmless_keys_pass(run, pair, tmp_path):
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
    target = ("--target", pair / "target")
    assert run("infer.convert", *target, "--output", tmp_path / "new").code == 0
    harmless["layer_types"] = ["full_attention"] * 5
    draft = save_random_drafter(tmp_path / "d", "eagle3", pair / "target", **harmless)
    drafter = (*target, "--draft", draft)
    assert run("infer.convert", *drafter, "--output", tmp_path / "ours").code == 0


@pytest.mark.parametrize(
    "method, key, value",
    [
        ("eagle3", "norm_before_residual", True),
        ("eagle3", "norm_before_fc", True),
        ("eagle3", "fc_norm", True),
        ("eagle3", "norm_output", True),
        ("eagle3", "target_hidden_size", 64),
        ("eagle3", "num_hidden_layers", 2),
        ("eagle3", "attention_bias", True),
        ("eagle3", "logit_scale", 0.25),
        ("eagle3", "use_aux_hidden_state", False),
        ("eagle", "norm_before_residual", True),
        ("eagle", "num_hidden_layers", 2),
        ("eagle", "draft_vocab_size", 40),
        ("eagle", "hidden_act", "gelu"),
    ],
)
def test_keys_of_a_drafter_of_one_layer(run, saved, tmp_path, method, key, value):
    target = saved / "llama" / "target"
    change = {key: value}
    if key == "use_aux_hidden_state":
        change = {"eagle_config": change}
    draft = save_random_drafter(tmp_path / "d", method, target, **change)
    line = run("infer.generate", "--target", target, "--draft", draft, *SHORT).refusal()
    assert refused(key, value) in line and str(draft) in line


@pytest.mark.parametrize(
    "key, value", [("hidden_act", "gelu"), ("logits_scaling", 8.0), ("sliding_window", 16)]
)
def test_keys_of_a_mixture_of_attentions(run, pair, key, value):
    edit_json(pair / "draft" / "config.json", **{key: value})
    models = ("--target", pair / "target", "--draft", pair / "draft")
    assert refused(key, value) in run("infer.generate", *models, *SHORT).refusal()
