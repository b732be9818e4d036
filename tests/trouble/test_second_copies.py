"""A tensor or a value that is stored twice: copies are compared before one is left unread."""

from __future__ import annotations

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.model_folders import edit_json, edit_tensors, tensors_of
from tests.trouble.drafters import save_random_drafter

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SHORT = ("--prompt-ids", "5,17,60", "--max-new-tokens", "4")


@pytest.fixture
def tied(saved, tmp_path):
    """A tied target, to be changed."""
    return shutil.copytree(saved / "qwen2" / "target", tmp_path / "tied")


def embedding_of(folder):
    return tensors_of(folder)[EMBEDDING]


def decoded(run, folder, *flags):
    done = run("infer.generate", "--target", folder, *SHORT, "--mode", "plain", "--json", *flags)
    assert done.code == 0, done
    return json.loads(done.out)["results"][0]["token_ids"]


def test_a_head_that_differs_is_read_as_transformers_reads_it(run, tied, tmp_path, caplog):
    edit_tensors(tied, **{HEAD: -embedding_of(tied)})
    found = decoded(run, tied)
    assert HEAD in caplog.text and EMBEDDING in caplog.text
    caplog.clear()
    assert run("infer.convert", "--target", tied, "--output", tmp_path / "new").code == 0
    assert HEAD in tensors_of(tmp_path / "new")
    edit_json(tied / "config.json", tie_word_embeddings=False)
    caplog.clear()
    assert decoded(run, tied) == found and not caplog.text


def test_a_head_that_is_the_embedding_is_passed_over(run, tied, tmp_path, caplog):
    edit_tensors(tied, **{HEAD: embedding_of(tied).astype(ml_dtypes.bfloat16)})
    assert run("infer.convert", "--target", tied, "--output", tmp_path / "new").code == 0
    assert not caplog.text and HEAD not in tensors_of(tmp_path / "new")


def test_a_small_model_has_the_head_of_its_files(run, saved, tied, tmp_path):
    edit_tensors(tied, **{HEAD: -embedding_of(tied)})
    pair = ["--target", saved / "qwen2" / "target", "--draft", tied, "--method", "independent"]
    assert run("infer.convert", *pair, "--output", tmp_path / "new").code == 0
    assert HEAD in tensors_of(tmp_path / "new")


# ---- files ----------------------------------------------------------------------------------


def beside(folder, **changes):
    """Write the tensors of a folder once more, as two shards with an index."""
    tensors = tensors_of(folder) | changes
    names = sorted(tensors)
    file_of = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        file_of |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    return file_of


def test_shards_beside_one_file_are_compared(run, pair, tmp_path):
    target, norm = pair / "target", "model.norm.weight"
    beside(target)
    assert run("infer.convert", "--target", target, "--output", tmp_path / "new").code == 0
    file_of = beside(target, **{norm: np.zeros(60, np.float32)})
    line = run("infer.generate", "--target", target, *SHORT).refusal()
    assert norm in line and str(target / file_of[norm]) in line
    assert str(target / "model.safetensors") in line


def test_one_name_in_two_shards_is_compared(run, pair):
    target, norm = pair / "target", "model.norm.weight"
    file_of = beside(target)
    (target / "model.safetensors").unlink()
    other = next(file for file in file_of.values() if file != file_of[norm])
    held = {name: x for name, x in tensors_of(target).items() if file_of[name] == other}
    save_file(held | {norm: np.zeros(60, np.float32)}, target / other)
    line = run("infer.generate", "--target", target, *SHORT).refusal()
    assert norm in line and file_of[norm] in line and other in line


def test_an_adapter_beside_the_weights_is_named(run, pair):
    (pair / "target" / "adapter_config.json").write_text("{}")
    line = run("infer.generate", "--target", pair / "target", *SHORT).refusal()
    assert "adapter_config.json: an adapter is not read; merge it" in line


# ---- drafters -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_an_embedding_in_a_drafters_files_is_the_targets(run, saved, tmp_path, method):
    target = saved / "llama" / "target"
    draft = save_random_drafter(tmp_path / "d", method, target)
    pair = ("--target", target, "--draft", draft)
    edit_tensors(draft, **{"embed_tokens.weight": embedding_of(target).astype(np.float16)})
    assert run("infer.convert", *pair, "--output", tmp_path / "new").code == 0
    edit_tensors(draft, **{"embed_tokens.weight": embedding_of(target)[::-1].copy()})
    line = run("infer.generate", *pair, *SHORT).refusal()
    assert "embed_tokens.weight differs from the target's model.embed_tokens.weight" in line
    assert str(draft / "model.safetensors") in line and str(target) in line


def test_a_head_in_a_drafters_files_is_the_targets(run, saved, tmp_path):
    target = saved / "llama" / "target"
    draft = save_random_drafter(tmp_path / "d", "eagle", target)
    pair = ("--target", target, "--draft", draft)
    edit_tensors(draft, **{HEAD: tensors_of(target)[HEAD]})
    assert run("infer.convert", *pair, "--output", tmp_path / "new").code == 0
    edit_tensors(draft, **{HEAD: 2 * tensors_of(target)[HEAD]})
    line = run("infer.generate", *pair, *SHORT).refusal()
    assert "lm_head.weight differs from the target's lm_head.weight" in line


def test_a_mask_is_compared_with_the_map(run, saved, tmp_path):
    target = saved / "llama" / "target"
    draft = save_random_drafter(tmp_path / "d", "eagle3", target)
    mask = tensors_of(draft)["t2d"]
    edit_tensors(draft, t2d=np.roll(mask, 1))
    line = run("infer.generate", "--target", target, "--draft", draft, *SHORT).refusal()
    assert "t2d marks 40 tokens" in line and "d2t" in line


def test_layers_that_borrow_say_what_they_leave_unread(run, saved, tmp_path):
    target = saved / "llama" / "target"
    pair = ["--target", target, "--draft", target, "--method", "independent-borrowed"]
    done = run("infer.convert", *pair, "--output", tmp_path / "new", "--json")
    assert EMBEDDING in json.loads(done.out)["notices"][0]


# ---- values ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, says",
    [
        ({"rope_theta": 5e5}, "rope_parameters.rope_theta is 10000.0 and rope_theta is 500000.0"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            'rope_parameters.rope_type is "default" and rope_scaling.rope_type is "linear"',
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "type": "llama3", "factor": 8.0}},
            'rope_parameters.rope_type is "linear" and rope_parameters.type is "llama3"',
        ),
        (
            {"text_config": {"rms_norm_eps": 1e-6}},
            "rms_norm_eps is 1e-05 and text_config.rms_norm_eps is 1e-06",
        ),
        ({"layer_types": ["full_attention"]}, "num_hidden_layers is 5 and layer_types is"),
    ],
)
def test_two_values_of_one_thing_are_named(run, pair, change, says):
    edit_json(pair / "target" / "config.json", **change)
    line = run("infer.generate", "--target", pair / "target", *SHORT).refusal()
    assert says in line


def test_a_key_with_two_values_is_named(run, pair):
    path = pair / "target" / "config.json"
    path.write_text(path.read_text().replace("{", '{"vocab_size": 9, ', 1))
    line = run("infer.generate", "--target", pair / "target", *SHORT).refusal()
    assert "'vocab_size' is 9 and 101" in line and str(path) in line


def test_a_table_of_frequencies_is_compared(run, pair, tmp_path):
    target, table = pair / "target", "model.layers.0.self_attn.rotary_emb.inv_freq"
    true = (1e4 ** -(np.arange(0, 10, 2) / 10)).astype(np.float16)
    edit_tensors(target, **{table: true})
    assert run("infer.convert", "--target", target, "--output", tmp_path / "new").code == 0
    edit_tensors(target, **{table: 5e5 ** -(np.arange(0, 10, 2) / 10)})
    line = run("infer.generate", "--target", target, *SHORT).refusal()
    assert table in line and "rope_theta 10000 in config.json" in line


@pytest.mark.parametrize(
    "method, change, says",
    [
        ("eagle", {"num_key_value_heads": 3}, "num_key_value_heads is 3 but the tensors have 2"),
        ("eagle3", {"intermediate_size": 99}, "intermediate_size is 99 but the tensors have 32"),
        ("eagle3", {"draft_vocab_size": 39}, "draft_vocab_size is 39"),
        (
            "eagle",
            {"method": "eagle", "speculators_model_type": "eagle3"},
            'method is "eagle" and speculators_model_type is "eagle3"',
        ),
        (
            "eagle",
            {"speculators_config": {"verifier": {"architectures": ["Qwen2ForCausalLM"]}}},
            "is Qwen2ForCausalLM in its files and LlamaForCausalLM in the target",
        ),
    ],
)
def test_a_drafters_config_is_compared_with_its_tensors(run, saved, tmp_path, method, change, says):
    target = saved / "llama" / "target"
    draft = save_random_drafter(tmp_path / "d", method, target, **change)
    line = run("infer.generate", "--target", target, "--draft", draft, *SHORT).refusal()
    assert says in line


def test_values_that_a_gguf_file_rounds_are_the_same(run, pair, tmp_path):
    edit_json(pair / "draft" / "config.json", rms_norm_eps=float(np.float32(1e-5)))
    models = ("--target", pair / "target", "--draft", pair / "draft")
    stated = ("--target-layer-inference", "0", "--output", tmp_path / "new")
    assert run("infer.convert", *models, *stated).code == 0


@pytest.mark.parametrize(
    "change, says",
    [
        ({"kv_hidden_size": 38}, "kv_hidden_size is 38 in its files and 40"),
        ({"layer_mixing": "mean", "disable_LSA": False}, "disable_LSA is false and layer_mixing"),
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps is 0.001 in its files and 1e-05"),
        ({"rope_theta": 5e5, "rope_parameters": None}, "rope_theta is 500000.0 in its files"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 4.0}},
            "rope_scaling is {'rope_type': 'linear', 'factor': 4.0} in its files",
        ),
        (
            {"hidden_size": 60, "transformer_layer_config": {"hidden_size": 64}},
            "hidden_size is 60 and transformer_layer_config.hidden_size is 64",
        ),
    ],
)
def test_a_drafter_of_the_targets_layers_has_the_targets_values(run, pair, change, says):
    edit_json(pair / "draft" / "config.json", **change)
    models = ("--target", pair / "target", "--draft", pair / "draft")
    assert says in run("infer.generate", *models, *SHORT).refusal()
