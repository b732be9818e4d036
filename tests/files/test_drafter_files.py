"""MoA as folders: three layouts of config.json, one set of tensors, and one target each."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest

from infer.convert import main
from moa_jax.config import MoaConfig
from moa_jax.pretrained import describe_target, load_drafter, load_target, save_drafter
from tests.conftest import golden_cases
from tests.model_folders import assert_same_tensors, edit_json, edit_tensors, refusal
from tests.oracle import random_pair

LAYOUTS = ("ours", "authors", "vllm")
FIELDS = {field.name for field in dataclasses.fields(MoaConfig)}
N = "target_layer_inference"
SLIM = {"self_attention_num_key_value_heads": 2, "cross_attention_num_key_value_heads": 2}


@pytest.fixture
def ours(pair):
    """Returns the llama pair with a config.json in our layout; its drafter reuses two layers."""
    target = load_target(pair / "target")
    write_tokenizer(pair / "target", "a", "b")
    drafter = load_drafter(pair / "draft", target, target_layer_inference=2)
    save_drafter(pair / "draft", "moa", drafter.config, drafter.params, target, depth=4)
    return pair


def write_tokenizer(folder, *tokens):
    vocab = {token: index for index, token in enumerate(tokens)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))


def config_json(folder):
    return json.loads((folder / "config.json").read_text())


# ---- there and back -----------------------------------------------------------------------


def assert_every_layout_keeps(source, drafter, target, output):
    stated = {N: drafter.config.target_layer_inference}
    for layout, more in (("ours", {}), ("authors", stated)):
        new = output / layout
        save_drafter(new, "moa", drafter.config, drafter.params, target, layout=layout)
        assert_same_tensors(source, new)
        again = load_drafter(new, target, **more)
        assert again.config == drafter.config and not again.notices


@pytest.mark.parametrize("folder", golden_cases("moa_", "draft/model.safetensors"))
def test_recorded_draft_is_read_and_written_bit_for_bit(folder, tmp_path):
    sizes = json.loads((folder / "moa.json").read_text())["train_args"]
    target = load_target(folder / "target")
    stated = {"target_layer_inference": sizes[N]} if sizes.get(N) else {}
    drafter = load_drafter(folder / "draft", target, **stated)
    assert drafter.method == "moa" and bool(drafter.notices) == (not stated)
    assert drafter.config == MoaConfig(**{k: v for k, v in sizes.items() if k in FIELDS})
    assert_every_layout_keeps(folder / "draft", drafter, target, tmp_path)


@pytest.mark.parametrize("family", random_pair.FAMILIES)
def test_drafters_of_every_family_survive_every_layout(saved, tmp_path, family):
    target = load_target(saved / family / "target")
    drafter = load_drafter(saved / family / "draft", target, target_layer_inference=2)
    assert_every_layout_keeps(saved / family / "draft", drafter, target, tmp_path)


def test_our_config_has_fields_that_the_authors_config_lacks(ours):
    config = config_json(ours / "draft")
    assert config["architectures"] == ["MOASpec"] and config["method"] == "moa"
    assert config[N] == 2 and FIELDS <= set(config)
    assert config["num_speculative_tokens"] == 3 and "speculators_config" not in config
    names = {"name_or_path": "target", "architectures": ["LlamaForCausalLM"]}
    assert config["target"].items() >= {"vocab_size": 101, **names}.items()
    size, _, digest = config["target"]["vocabulary"].partition(":")
    assert size == "2" and len(digest) == 64
    target = load_target(ours / "target")
    drafter = load_drafter(ours / "draft", target)
    assert drafter.depth == 4 and drafter.config.target_layer_inference == 2
    said = refusal(load_drafter, ours / "draft", target, target_layer_inference=1)
    assert "1 differs from 2, with which the drafter was trained" in said
    block = {"proposal_methods": [{"speculative_tokens": 5}], "verifier": names}
    early = {key: config[key] for key in FIELDS} | {"architectures": ["MOASpec"]}
    early |= {"speculators_model_type": "moa", "speculators_config": block}
    early |= {"transformer_layer_config": config_json(ours / "target")}
    (ours / "draft" / "config.json").write_text(json.dumps(early))
    again = load_drafter(ours / "draft", target)
    assert again.depth == 6 and again.config == drafter.config and not again.notices


# ---- bad input ----------------------------------------------------------------------------


def test_another_target_or_vocabulary_is_refused(ours):
    path, stated = ours / "draft" / "config.json", config_json(ours / "draft")["target"]
    said = lambda: refusal(load_drafter, ours / "draft", load_target(ours / "target"))
    edit_json(path, target=stated | {"head_dim": "other"})
    assert "belongs to another target: head_dim is 'other' in its files" in said()
    edit_json(path, target=stated)
    write_tokenizer(ours / "target", "b", "a")
    assert "the vocabulary (ids:sha256) is 2:" in said()
    write_tokenizer(ours / "target", "a", "b", "c")  # adds a token
    load_drafter(ours / "draft", load_target(ours / "target"))
    write_tokenizer(ours / "draft", "a", "c")
    assert "the token of id 1 is 'c' in its files and 'b' in the target" in said()


def test_wrong_widths_are_refused(pair):
    for shape, says in (((60, 48), "memory width"), ((64, 40), "hidden_size is 64")):
        edit_tensors(pair / "draft", **{"Ekv2E.weight": np.ones(shape)})
        assert says in refusal(load_drafter, pair / "draft", load_target(pair / "target"))


def test_the_kind_is_inferred_from_tensors_if_the_config_lacks_it(pair):
    target = load_target(pair / "target")
    edit_json(pair / "draft" / "config.json", architectures=["Walrus"])
    assert load_drafter(pair / "draft", target).method == "moa"
    edit_tensors(pair / "draft", drop="attention")
    said = refusal(load_drafter, pair / "draft", target)
    assert "holds no drafter that we recognise; choose a drafter of the kinds moa, " in said


# ---- the program --------------------------------------------------------------------------


STATED = ("--target-layer-inference", "0")


def convert(*arguments, **flags):
    main([*arguments, *(str(x) for k, v in flags.items() for x in (f"--{k}", v))])


def slim_pair(pair):
    """Returns a pair that the vLLM fork can run: SA and CA have equal key-value heads."""
    cfg = load_drafter(pair / "draft", load_target(pair / "target")).config
    sizes, (config, _) = dataclasses.asdict(cfg) | SLIM, random_pair.random_target("llama", 0)
    weights = random_pair.random_drafter(config, sizes, 5)
    edit_tensors(pair / "draft", drop="", **{k: v.numpy() for k, v in weights.items()})
    return {"target": pair / "target", "draft": pair / "draft"}


def test_layouts_convert_into_each_other(pair, tmp_path):
    source = slim_pair(pair)
    target = describe_target(pair / "target")
    for one in LAYOUTS:
        convert(*STATED, **source, to=one, output=tmp_path / one)
        stated = () if one == "ours" else STATED
        for other in LAYOUTS:
            new = tmp_path / f"{one}-{other}"
            convert(*stated, target=pair / "target", draft=tmp_path / one, to=other, output=new)
            assert_same_tensors(pair / "draft", new)
            direct = config_json(tmp_path / other) if (tmp_path / other).exists() else None
            assert direct is None or config_json(new) == direct
            assert load_drafter(new, target, dtype="float32").config.target_layer_inference == 0


def test_the_forks_config_has_what_it_reads(pair, tmp_path):
    convert(**slim_pair(pair), to="vllm", output=tmp_path / "fork")
    config = config_json(tmp_path / "fork")
    assert (config["model_type"], config["architectures"]) == ("moa_spec", ["MOASpecModel"])
    assert config["kv_hidden_size"] == 40 and config["disable_LSA"] is False
    assert not {N, "num_hidden_layers", "num_key_value_heads", "intermediate_size"} & set(config)
    assert FIELDS - {N} <= set(config)


def test_drafters_that_the_fork_cannot_run_are_not_written_for_it(saved, tmp_path):
    faults = {"llama": "different key-value heads", "llama31": "scaled rotary embeddings"}
    for family, says in (faults | {"qwen3": "biases, norms"}).items():
        source = {name: saved / family / name for name in ("target", "draft")}
        assert says in refusal(convert, **source, to="vllm", output=tmp_path / "new")
        said = refusal(convert, **source, to="speculators", output=tmp_path / "new")
        assert "library has no drafters of kind moa; choose another layout" in said
        assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_assumed_n_is_not_written_down(pair, tmp_path, layout, capsys):
    flags = slim_pair(pair) | dict(to=layout, output=tmp_path / "new")
    if layout == "ours":
        said = refusal(convert, **flags)
        assert f"do not state {N}" in said and "--target-layer-inference" in said
        assert not (tmp_path / "new").exists()
    else:
        convert(**flags)
        assert N in capsys.readouterr().err


# ---- real pairs ---------------------------------------------------------------------------


@pytest.mark.hub
def test_the_authors_drafter_fits_llama_3_8b():
    target = describe_target("meta-llama/Meta-Llama-3-8B-Instruct")
    drafter = load_drafter("huawei-noah/MOASpec-Llama-3-8B-Instruct", target, dtype="bfloat16")
    assert drafter.config == MoaConfig(4, 6144, 4, 6144, 8, 3072)
    assert target.generation.eos_ids == (128001, 128009)
    assert round(sum(leaf.size for leaf in jax.tree.leaves(drafter.params)) / 1e6, 1) == 264.3


LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
PUBLIC = {  # drafters of other trainers by their target and kind; yuhuili's files are pickles
    "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3": (LLAMA, "eagle3"),
    "RedHatAI/Qwen3-8B-speculator.eagle3": ("Qwen/Qwen3-8B", "eagle3"),
    "RedHatAI/Qwen3-32B-speculator.eagle3": ("Qwen/Qwen3-32B", "eagle3"),
    "thoughtworks/Llama-3.2-3B-Instruct-Eagle3": ("meta-llama/Llama-3.2-3B-Instruct", "eagle3"),
    "thoughtworks/Qwen2.5-7B-Instruct-Eagle3": ("Qwen/Qwen2.5-7B-Instruct", "eagle3"),
    "thoughtworks/Qwen3-8B-Eagle3": ("Qwen/Qwen3-8B", "eagle3"),
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": (LLAMA, "eagle3"),
    "yuhuili/EAGLE-LLaMA3.1-Instruct-8B": (LLAMA, "eagle"),
}


@pytest.mark.hub
@pytest.mark.parametrize("draft", PUBLIC)
def test_public_drafters_are_read(draft):
    name, method = PUBLIC[draft]
    assert load_drafter(draft, describe_target(name), dtype="bfloat16").method == method
