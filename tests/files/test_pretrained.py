"""Targets as folders: files written by transformers are read, and written back bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import save_file

from infer import info
from infer.cli.flags.pair import DEMO
from infer.info import ROOT
from moa_jax import load_drafter, load_target, pretrained
from moa_jax.files import client_files, model_folder
from moa_jax.model import llama
from moa_jax.model.quantize import quantize_params
from moa_jax.pretrained import SpecialIds, describe_target, save_target, stored_dtype
from tests.compare import assert_close
from tests.model.test_target import run
from tests.model_folders import assert_same_tensors, edit_json, refusal, tensors_of
from tests.oracle import random_pair

TARGETS = [
    *((family, {}) for family in random_pair.FAMILIES),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("qwen2", {"tie_word_embeddings": False}),
    ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
]
ids = lambda value: value if isinstance(value, str) else "-".join(value) or "plain"


def assert_same_trees(one, two) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, two)


# ---- targets ------------------------------------------------------------------------------


@pytest.mark.parametrize("family, flags", TARGETS, ids=ids)
def test_targets_survive_the_way_here_and_back(family, flags, tmp_path):
    _, model = random_pair.random_target(family, 3, **flags)
    model.save_pretrained(tmp_path / "theirs")
    listed = load_target(tmp_path / "theirs", jnp.float32)
    stacked = load_target(tmp_path / "theirs", jnp.float32, layers="stacked")
    assert len(listed.params["layers"]) == listed.config.num_layers
    assert_same_trees(
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *listed.params["layers"]),
        stacked.params["layers"],
    )
    for name, found in (("a", listed), ("b", stacked)):
        save_target(tmp_path / name, found.config, found.params, dtype="float32")
        assert_same_tensors(tmp_path / "theirs", tmp_path / name)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.float32)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(back(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_float_dtype_is_read_into_the_requested_one(pair, stored, dtype):
    tensors = {k: v.astype(stored) for k, v in tensors_of(pair / "target").items()}
    save_file(tensors, pair / "target" / "model.safetensors")
    target = load_target(pair / "target", dtype)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(target.params)} == {dtype}
    expected = tensors["lm_head.weight"].astype(dtype).T
    np.testing.assert_array_equal(target.params["lm_head"], expected)
    assert stored_dtype(pair / "target") == {"float64": "float32"}.get(stored, stored)


# ---- eight bits ---------------------------------------------------------------------------


@pytest.mark.slow
def test_weights_are_quantized_as_they_are_loaded(pair):
    """A target loaded in int8 equals the quantized arrays; the same holds for drafters."""
    target, quantized = (load_target(pair / "target", weights=w) for w in (None, "int8"))
    expected = quantize_params(target.params, "int8")
    assert_same_trees(quantized.params, expected)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(expected)} == {"int8", "float32"}
    drafter = load_drafter(pair / "draft", target)
    found = load_drafter(pair / "draft", quantized, weights="int8")
    assert_same_trees(found.params, quantize_params(drafter.params, "int8"))
    borrow = lambda params: {"embed": params["embed"], "last": params["layers"][-1]}
    shared = pretrained.load_borrowed(describe_target(pair / "target"), borrow, weights="int8")
    assert_same_trees(shared, borrow(expected))


def test_formats_are_refused_where_there_are_none(pair, tmp_path):
    folder = pair / "target"
    assert "this device is cpu; choose int8" in refusal(load_target, folder, weights="fp8")
    said = refusal(load_drafter, pair / "draft", describe_target(folder), weights="fp8")
    assert "fp8 weights need" in said
    said = refusal(load_target, folder, jnp.float16, weights="int8")
    assert "no room for the scales" in said
    quantized = load_target(folder, weights="int8")
    said = refusal(save_target, tmp_path / "new", quantized.config, quantized.params)
    assert "load them without `weights`" in said
    for capability, found in (("8.6", ["int8"]), ("8.9", ["int8", "fp8"]), ("gfx942", ["int8"])):
        assert pretrained.formats_of(SimpleNamespace(compute_capability=capability)) == found
    assert pretrained.formats_of(SimpleNamespace()) == ["int8"]


VISION = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
VISION |= dict(image_size=16, patch_size=8)
# Model types of wrappers and of their vision towers.
WHOLE = dict.fromkeys(("mistral", "ministral3"), ("mistral3", "pixtral"))
WHOLE["gemma3_text"] = ("gemma3", "siglip_vision_model")


@pytest.mark.parametrize("family", WHOLE)
def test_the_text_model_beside_a_vision_tower_is_read(family, tmp_path):
    """Names are those of published files, then those of transformers 5 in memory.

    The head of `ministral3` is tied by the outer key alone.
    """
    text, model = random_pair.random_target(family, 3)
    wrapper, tower = WHOLE[family]
    keys = {"text_config": text.to_dict(), "vision_config": VISION | {"model_type": tower}}
    keys["tie_word_embeddings"] = family != "mistral"
    config = transformers.AutoConfig.for_model(wrapper, **keys)
    whole = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    whole.model.language_model.load_state_dict(model.model.state_dict())
    if family == "mistral":
        whole.lm_head.load_state_dict(model.lm_head.state_dict())
    whole.eval().save_pretrained(tmp_path)
    tokens = torch.arange(3, 23)[None]
    expected = whole(tokens).logits.detach()
    target = load_target(tmp_path, "float32")
    hidden_BTD = run(target, jnp.asarray(tokens.numpy())).hidden_BTD
    assert_close(llama.unembed(target.params, hidden_BTD), expected.numpy(), "logits")
    assert "vision_config: only the text model is read" in target.notices[0]
    pretrained._check_verifier({"target": {"architectures": config.architectures}}, target)
    other = ("language_model.model", "model.language_model")
    tensors = {name.replace(*other): x for name, x in tensors_of(tmp_path).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same_trees(load_target(tmp_path, "float32").params, target.params)
    line = info._model_line(info._model(tmp_path))
    assert f"hidden_size {text.hidden_size}" in line and "vision_config not read" in line


# ---- files --------------------------------------------------------------------------------


def test_several_files_with_an_index_are_read_and_written(saved, tmp_path, monkeypatch):
    source = saved / "qwen2" / "target"
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="60KB")
    monkeypatch.setattr(model_folder, "_MAX_FILE_BYTES", 60_000)
    whole, split = load_target(source), load_target(tmp_path / "theirs")
    assert_same_trees(whole.params, split.params)
    save_target(tmp_path / "ours", split.config, split.params, dtype="float32")
    assert len(list((tmp_path / "ours").glob("model-*-of-*.safetensors"))) > 1
    assert_same_tensors(tmp_path / "theirs", tmp_path / "ours")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert torch.equal(back.model.embed_tokens.weight, model.model.embed_tokens.weight)


@pytest.mark.parametrize("written", [SpecialIds((7,), None), SpecialIds((7, 8), 0), SpecialIds()])
def test_special_ids_survive(pair, tmp_path, written):
    target = load_target(pair / "target")
    save_target(tmp_path / "new", target.config, target.params, generation=written)
    assert load_target(tmp_path / "new").generation == written
    assert stored_dtype(tmp_path / "new") == "bfloat16"
    edit_json(pair / "target" / "generation_config.json", eos_token_id=[9, 10])
    edit_json(pair / "target" / "config.json", eos_token_id=3, pad_token_id=0)
    assert load_target(pair / "target").generation == SpecialIds((9, 10), 0)


STORED = (  # of all bytes (answer folders keep these), of samples (the wire carries these)
    "0e8b27b4efab978bcc0823b954224fca4facaa6eb7e7b8e8845df29a345bd917",
    "09e5146ca51f81805e9f959616003445dabac166fa0988a4042972bd89bfc9ac",
)


def test_the_bundled_drafter_keeps_its_hashes():
    folder = DEMO / "draft"
    assert (model_folder.folder_hash(folder), client_files.model_hash(folder)) == STORED


# This program runs in its own process, and measures its memory.
PEAK = """
import re, sys
import jax.numpy as jnp
from moa_jax.files import tensor_reader
from moa_jax.pretrained import load_target
def anonymous():  # bytes of this process that are not pages of a mapped file
    status = open("/proc/self/status").read()
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", status)[1])
read, seen = tensor_reader.TensorReader.read, []
def watched(self, name):
    tensor = read(self, name)
    seen.append(anonymous())
    return tensor
jnp.zeros(1).block_until_ready()  # starts the backend
tensor_reader.TensorReader.read = watched
before = anonymous()
target = load_target(sys.argv[1], "float32", layers="stacked")
seen.append(anonymous())
print(max(seen) - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_the_host_never_holds_a_model_twice(tmp_path):
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    _, whole = random_pair.random_target("llama", 0, vocab_size=4096, **sizes, **heads)
    whole.save_pretrained(tmp_path)
    model = (tmp_path / "model.safetensors").stat().st_size
    command = [sys.executable, "-c", PEAK, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    assert 0.8 * model < int(done.stdout) < 1.5 * model
