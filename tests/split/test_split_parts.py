"""A client's folder: a part of a pair drafts, and has the hash of the whole."""

from __future__ import annotations

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from infer.convert import main as convert
from moa_jax import load_drafter, load_target
from moa_jax.config import Eagle3Config, MoaConfig
from moa_jax.decode.draft_vocabulary import FILE, save_vocabulary, vocabulary_beside, vocabulary_of
from moa_jax.files import client_files, model_folder
from moa_jax.pretrained import describe_target, functions_of, load_borrowed, save_drafter
from moa_jax.split.pairing import mismatch, pairing_of
from tests.drafting import untrained
from tests.model_folders import edit_json, edit_tensors, refusal, save_shards, tensors_of
from tests.oracle import random_pair

HF_CONFIG, MODEL = random_pair.random_target("llama", 21, calm=0.2)
KINDS = {
    "n0": ("moa", MoaConfig(**random_pair.draft_sizes(HF_CONFIG, 0))),
    "n3": ("moa", MoaConfig(**random_pair.draft_sizes(HF_CONFIG, 3))),
    "eagle3": ("eagle3", Eagle3Config(2, 44, draft_ids=tuple(range(3, 90, 2)))),
}
THIRD = np.arange(0, 90, 3)
LEFT_OUT = {"n0": "layer_self_attention", "n3": "Ekv2E", "eagle3": "fc.weight"}


def cut(folder, output, *more):
    flags = ["--target", folder / "target", "--draft", folder / "draft", "--output", output]
    convert(list(map(str, ["--for-client", *flags, *more])))


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target") / "target"
    MODEL.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def saved(target_folder, tmp_path_factory):
    """Saves a pair in `whole` and the client's part in `part`, once for each kind."""

    @functools.cache
    def save(kind):
        (method, config), folder = KINDS[kind], tmp_path_factory.mktemp(kind)
        shutil.copytree(target_folder, folder / "whole" / "target")
        target = load_target(target_folder, jnp.float32)
        drafter = untrained(target, method, config)
        save_drafter(folder / "whole" / "draft", method, config, drafter.params, target)
        if kind != "eagle3":
            save_vocabulary(folder / "whole" / "draft" / FILE, vocabulary_of(THIRD, target))
        cut(folder / "whole", folder / "part")
        return folder

    return save


@pytest.fixture
def moa(saved, tmp_path):
    """Returns a copy of one of these folders, to be changed or damaged."""
    return shutil.copytree(saved("n0"), tmp_path / "moa")


def client_pair(folder):
    """Returns the pair as infer.client loads it."""
    target = describe_target(folder / "target")
    return target, load_drafter(folder / "draft", target, dtype=jnp.float32, for_client=True)


def facts(folder):
    """Returns the facts as infer.client and infer.server compute them."""
    return pairing_of(*client_pair(folder))


# ---- the part does what the whole does ----------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_part_holds_what_the_client_reads_and_has_the_hash_of_the_whole(saved, kind):
    folder, weights = saved(kind), []
    for side in ("whole", "part"):
        target, drafter = client_pair(folder / side)
        functions = functions_of(drafter, target.config)
        borrowed = load_borrowed(target, functions.shared_params, jnp.float32)
        weights.append((drafter.params, borrowed))
        assert not set(functions.condense_only) & set(drafter.params)
        assert kind == "eagle3" or (vocabulary_beside(target, drafter).ids_U == THIRD).all()
    jax.tree.map(np.testing.assert_array_equal, *weights)
    layers = {"n3": (2, 3, 4)}.get(kind, ())
    outer = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    held = tensors_of(folder / "part" / "target").keys()
    assert {name for name in held if "layers." not in name} == outer
    assert {int(name.split(".")[2]) for name in held - outer} == set(layers)
    for name, absent in (("target", "model.layers.0"), ("draft", LEFT_OUT[kind])):
        whole, part = (set(tensors_of(folder / side / name)) for side in ("whole", "part"))
        assert part | set(client_files.left_out(folder / "part" / name)) == whole
        assert not any(name.startswith(absent) for name in part)
    target = load_target(folder / "whole" / "target", jnp.float32)
    server = pairing_of(target, load_drafter(folder / "whole" / "draft", target))
    assert facts(folder / "part") == facts(folder / "whole") == server


# ---- another pair is refused --------------------------------------------------------------


TOKENIZER = "part/target/tokenizer.json"
CHANGES = [  # a folder with the tensor that changes, or a file with its new keys; the error
    ("whole/target", "model.layers.0.mlp.up_proj.weight", "the target's files: "),
    ("part/target", "lm_head.weight", "the target's files: "),
    ("whole/draft", "layer_self_attention.mlp.up_proj.weight", "the drafter's files: "),
    (TOKENIZER, {"model": {"vocab": {"other": 0}}}, "the tokenizer: "),
]


@pytest.mark.parametrize("place, change, says", CHANGES)
def test_a_part_of_another_pair_is_noticed(moa, place, change, says):
    if isinstance(change, str):
        edit_tensors(moa / place, **{change: tensors_of(moa / place)[change] + 1})
    else:
        edit_json(moa / place, **change)
    if place == TOKENIZER:
        edit_json(moa / "part" / "draft" / "config.json", target={})
    assert mismatch(facts(moa / "whole"), facts(moa / "part")).startswith(says)


def test_a_part_is_not_accepted_as_a_whole(moa, capsys):
    said = refusal(load_target, moa / "part" / "target")
    assert "only a client's part of a model, without model.layers.0." in said
    target = load_target(moa / "whole" / "target")
    said = refusal(load_drafter, moa / "part" / "draft", target)
    assert "without layer_self_attention." in said and "infer.convert --for-client" in said


@pytest.mark.parametrize("content", ["[]", '{"left_out": {"x": 3}}', "{"])
def test_a_damaged_list_of_what_is_left_out_is_refused(moa, content):
    (moa / "part" / "target" / client_files.FILE).write_text(content)
    said = refusal(facts, moa / "part")
    assert str(moa / "part" / "target" / client_files.FILE) in said


# ---- files --------------------------------------------------------------------------------


def test_the_same_weights_in_other_files_are_the_same(moa, monkeypatch):
    """The files have several dtypes, and so has the part."""
    folder = moa / "whole" / "target"
    tensors = tensors_of(folder)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype("float16")
    save_file(tensors, folder / "model.safetensors")
    before = facts(moa / "whole")
    (folder / "model.safetensors").unlink()
    save_shards(folder, tensors)
    assert mismatch(before, facts(moa / "whole")) == ""
    monkeypatch.setattr(model_folder, "_MAX_FILE_BYTES", 20_000)  # and the part may be split, too
    cut(moa / "whole", moa / "part", "--overwrite")
    assert len(list((moa / "part" / "target").glob("*.safetensors"))) > 1
    dtypes = {str(tensor.dtype) for tensor in tensors_of(moa / "part" / "target").values()}
    assert dtypes == {"float16", "float32"}
    assert mismatch(before, facts(moa / "part")) == ""
