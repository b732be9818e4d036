"""A tensor or a value that is stored twice: copies are compared before one is left unread."""

from __future__ import annotations

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from infer.cli.flags.pair import DEMO
from tests.gguf_files import Q, write_gguf
from tests.model_folders import edit_json, edit_tensors, save_random_drafter, tensors_of

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


def test_an_embedding_is_compared_with_a_quantized_one(run, tmp_path):
    """Its copy is quantized in the target, so it is compared with a tolerance."""
    embedding = embedding_of(DEMO / "target")
    draft = save_random_drafter(tmp_path / "d", "eagle", DEMO / "target")
    target = write_gguf(tmp_path / "x.gguf", DEMO / "target", Q.Q8_0)
    pair = ("--target", target, "--draft", draft)
    edit_tensors(draft, **{"embed_tokens.weight": embedding})
    assert run("infer.convert", *pair, "--output", tmp_path / "new").code == 0
    edit_tensors(draft, **{"embed_tokens.weight": embedding[::-1].copy()})
    line = run("infer.convert", *pair, "--output", tmp_path / "other").refusal()
    assert "embed_tokens.weight differs from the target's" in line


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


def test_a_table_of_frequencies_is_compared(run, pair, tmp_path):
    target, table = pair / "target", "model.layers.0.self_attn.rotary_emb.inv_freq"
    true = (1e4 ** -(np.arange(0, 10, 2) / 10)).astype(np.float16)
    edit_tensors(target, **{table: true})
    assert run("infer.convert", "--target", target, "--output", tmp_path / "new").code == 0
    edit_tensors(target, **{table: 5e5 ** -(np.arange(0, 10, 2) / 10)})
    line = run("infer.generate", "--target", target, *SHORT).refusal()
    assert table in line and "rope_theta 10000 in config.json" in line
