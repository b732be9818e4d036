"""Files in layouts of other software: the refusal names the layout."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.model_folders import save_random_drafter, tensors_of

SHORT = ("--prompt-ids", "5,17,60", "--max-new-tokens", "4")


def rename(folder, names, **added):
    """Replace the beginnings of a folder's names of tensors, and put others in."""
    tensors = {}
    for name, tensor in tensors_of(folder).items():
        old = next((old for old in names if name.startswith(old)), "")
        tensors[names.get(old, "") + name.removeprefix(old)] = tensor
    save_file(tensors | added, folder / "model.safetensors")


def nested(folder):
    """Make a config.json as speculators writes it."""
    config = json.loads((folder / "config.json").read_text())
    outer = {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}
    outer |= {"draft_vocab_size": 40, "transformer_layer_config": config}
    (folder / "config.json").write_text(json.dumps(outer))


@pytest.mark.parametrize(
    "method, names, added, says",
    [
        ("eagle3", {"midlayer.": "layers.0."}, {}, "speculators' EAGLE-3"),
        ("eagle3", {"": "model."}, {}, "EAGLE-3 below `model.`"),
        ("eagle3", {}, {"fc_norm.0.weight": np.ones(60)}, "EAGLE-3.1"),
        ("eagle", {"": "model."}, {}, "EAGLE-1 below `model.`"),
        ("eagle", {"fc.": "fusion_fc.", "layers.0.": "transformer."}, {}, "speculators' EAGLE-1"),
        ("eagle", {"": "module."}, {}, "prefix `module.`"),
    ],
)
def test_a_drafters_layout_is_named(run, saved, tmp_path, method, names, added, says):
    target = saved / "llama" / "target"
    draft = save_random_drafter(tmp_path / "d", method, target)
    rename(draft, names, **added)
    if "speculators' EAGLE-3" in says:
        nested(draft)
    line = run("infer.generate", "--target", target, "--draft", draft, *SHORT).refusal()
    assert f"the layout of {says}" in line.replace("DistributedDataParallel (a ", "")
    assert str(draft) in line and "not read yet" in line


def test_a_nested_config_is_named(run, saved, tmp_path):
    target = saved / "llama" / "target"
    draft = save_random_drafter(tmp_path / "d", "eagle3", target)
    nested(draft)
    line = run("infer.generate", "--target", target, "--draft", draft, *SHORT).refusal()
    assert "nests transformer_layer_config, which is speculators' layout" in line
    assert str(draft) in line


def test_other_kinds_of_drafters_are_named(run, saved, tmp_path):
    target = saved / "llama" / "target"
    draft = save_random_drafter(tmp_path / "d", "eagle", target)
    save_file({"0.0.linear.weight": np.ones((60, 60))}, draft / "model.safetensors")
    line = run("infer.generate", "--target", target, "--draft", draft, *SHORT).refusal()
    assert "Medusa heads" in line
