"""Files of other software: duplicate tensors are compared, unsupported layouts are named."""

from __future__ import annotations

import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from moa_jax.files import client_files
from moa_jax.pretrained import load_drafter, load_target, save_drafter, save_for_client
from tests import model_folders
from tests.model_folders import edit_tensors, refusal, save_random_drafter, tensors_of, written_by

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def test_a_head_that_differs_is_read_as_transformers_reads_it(saved, tmp_path, caplog):
    tied = shutil.copytree(saved / "qwen2" / "target", tmp_path / "tied")
    embedding = tensors_of(tied)[EMBEDDING]
    edit_tensors(tied, **{HEAD: embedding.astype(ml_dtypes.bfloat16)})
    assert "lm_head" not in load_target(tied).params and not caplog.text
    edit_tensors(tied, **{HEAD: -embedding})
    head_DV = load_target(tied, "float32").params["lm_head"]
    np.testing.assert_array_equal(head_DV, -embedding.T)
    assert HEAD in caplog.text and EMBEDDING in caplog.text
    target = load_target(saved / "qwen2" / "target")
    assert "lm_head" in load_drafter(tied, target, method="independent").params
    model_folders.edit_json(tied / "config.json", tie_word_embeddings=False)
    caplog.clear()
    np.testing.assert_array_equal(load_target(tied, "float32").params["lm_head"], head_DV)
    assert not caplog.text


def test_tensors_that_two_files_hold_are_compared(pair):
    target, zeros = pair / "target", np.zeros(60, np.float32)
    model_folders.save_shards(target, tensors_of(target))
    load_target(target)
    file_of = model_folders.save_shards(target, tensors_of(target) | {NORM: zeros})
    line = refusal(load_target, target)
    assert NORM in line and str(target / file_of[NORM]) in line
    assert str(target / "model.safetensors") in line
    (target / "model.safetensors").unlink()
    other = next(file for file in file_of.values() if file != file_of[NORM])
    held = {name: x for name, x in tensors_of(target).items() if file_of[name] == other}
    save_file(held | {NORM: zeros + 1}, target / other)
    line = refusal(load_target, target)
    assert NORM in line and file_of[NORM] in line and other in line


def test_a_table_of_frequencies_is_compared(pair):
    target, table = pair / "target", "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(target, **{table: (1e4 ** -(np.arange(0, 10, 2) / 10)).astype(np.float16)})
    load_target(target)
    edit_tensors(target, **{table: 5e5 ** -(np.arange(0, 10, 2) / 10)})
    line = refusal(load_target, target)
    assert table in line and "rope_theta 10000 in config.json" in line


# ---- drafters -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method, name, theirs", [("eagle", HEAD, HEAD), ("eagle3", "embed_tokens.weight", EMBEDDING)]
)
def test_a_copy_in_a_drafters_files_is_the_targets(saved, tmp_path, method, name, theirs):
    folder = saved / "llama" / "target"
    draft = save_random_drafter(tmp_path / "d", method, folder)
    target, copy = load_target(folder), tensors_of(folder)[theirs]
    edit_tensors(draft, **{name: copy.astype(np.float16)})
    load_drafter(draft, target)
    edit_tensors(draft, **{name: copy[::-1].copy()})
    line = refusal(load_drafter, draft, target)
    assert f"{name} differs from the target's {theirs}" in line
    assert str(draft / "model.safetensors") in line and str(folder) in line


def test_a_mask_is_compared_with_the_map(saved, tmp_path):
    target = saved / "llama" / "target"
    draft = save_random_drafter(tmp_path / "d", "eagle3", target)
    edit_tensors(draft, t2d=np.roll(tensors_of(draft)["t2d"], 1))
    line = refusal(load_drafter, draft, load_target(target))
    assert "t2d marks 40 tokens" in line and "d2t" in line


WRITERS = [("eagle3", writer) for writer in ("speculators", "nvidia", "nemo", "specjax")]


@pytest.mark.parametrize("method, writer", [*WRITERS, ("eagle", "nemo")])
def test_a_layout_of_other_software_is_read(saved, tmp_path, method, writer):
    """The drafter is that of official files, is written as one, and may be cut for a client."""
    target = load_target(saved / "llama" / "target")
    draft = save_random_drafter(tmp_path / "d", method, target.folder)
    copy = {"embed_tokens.weight": tensors_of(target.folder)[EMBEDDING]}
    if method == "eagle":  # some repeat the head, too
        copy[HEAD] = tensors_of(target.folder)[HEAD]
    edit_tensors(draft, **copy)
    official, found = load_drafter(draft, target), load_drafter(written_by(draft, writer), target)
    assert (found.method, found.config) == (official.method, official.config)
    save_drafter(tmp_path / "ours", method, found.config, found.params, target)
    for again in (found, load_drafter(tmp_path / "ours", target)):
        jax.tree.map(np.testing.assert_array_equal, again.params, official.params)
    save_for_client(tmp_path / "part", target, found)
    part = load_drafter(tmp_path / "part" / "draft", target, for_client=True)
    expected = {name: official.params[name] for name in part.params}
    jax.tree.map(np.testing.assert_array_equal, part.params, expected)
    assert client_files.model_hash(part.folder) == client_files.model_hash(draft)


def test_a_layout_that_is_not_read_is_named(saved, tmp_path):
    target = load_target(saved / "llama" / "target")
    draft = save_random_drafter(tmp_path / "d", "eagle", target.folder)
    tensors = tensors_of(draft)
    prefixed = {f"module.{name}": tensor for name, tensor in tensors.items()}
    twice = tensors | {"model.fc.weight": tensors["fc.weight"]}
    for stored, says in (
        (prefixed, "DistributedDataParallel (a prefix"),
        (twice, "fc.weight and model.fc.weight are one tensor under two names"),
    ):
        save_file(stored, draft / "model.safetensors")
        line = refusal(load_drafter, draft, target)
        assert says in line and str(draft) in line
