"""Absent, damaged or partly written folders raise an error of one line, and lose no data."""

from __future__ import annotations

import json
from unittest.mock import Mock

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import SafetensorError

from moa_jax.files import model_folder, pickles
from moa_jax.pretrained import describe_target, load_drafter, load_target, save_target
from tests.model_folders import edit_tensors, refusal

KEY = "model.layers.1.self_attn.k_proj.weight"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


# ---- hub ids ------------------------------------------------------------------------------


def test_a_hub_id_that_cannot_be_reached(monkeypatch):
    absent = Mock(side_effect=LocalEntryNotFoundError("no network\nat all"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", absent)
    said = refusal(load_target, "someone/some-model")
    assert said.startswith("someone/some-model is neither a folder nor reachable as a hub id")


def test_hub_ids_are_fetched_without_what_is_not_read(pair, monkeypatch):
    asked = []

    def fetch(name, allow_patterns, ignore_patterns):
        assert ignore_patterns == "consolidated*"
        asked.append(allow_patterns)
        return str(pair / "target")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert load_target("owner/model").folder == pair / "target"
    assert describe_target("owner/model").params is None
    assert "*.safetensors" in asked[0] and "*.safetensors" not in asked[1]
    assert not any("bin" in pattern or pattern == "*" for pattern in asked[0])


def test_hub_ids_of_pickles_name_the_converter(pair, monkeypatch):
    (pair / "draft" / WEIGHTS).unlink()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pair / "draft")
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda _: ["pytorch_model.bin"])
    monkeypatch.setattr(pickles, "has_torch", lambda: False)
    said = refusal(load_drafter, "some/pickles", load_target(pair / "target"))
    assert said.startswith("some/pickles holds pytorch_model.bin but no safetensors")
    assert "hf download some/pickles --local-dir FOLDER" in said
    assert "python -m infer.peers.unpickle FOLDER NEW_FOLDER" in said


# ---- damaged folders ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("config.json", None, "config.json is missing"),
        ("config.json", "{", "config.json is not valid JSON"),
        ("config.json", "[]", "config.json holds no JSON object"),
        (WEIGHTS, -1, "model.safetensors is cut short"),
        (WEIGHTS, 0, "model.safetensors is cut short"),
        (WEIGHTS, None, "holds no model.safetensors"),
    ],
)
def test_damaged_files_are_refused_in_one_line(pair, name, content, says):
    path = pair / "target" / name
    if content is None:
        path.unlink()
    elif isinstance(content, int):
        path.write_bytes(path.read_bytes()[:content])
    else:
        path.write_text(content)
    assert says in refusal(load_target, pair / "target")


def test_an_index_that_cannot_be_followed_is_refused(pair):
    (pair / "target" / WEIGHTS).unlink()
    for weight_map, says in (
        ({"model.norm.weight": "model-1.safetensors"}, "model-1.safetensors is missing though"),
        ({"model.norm.weight": 1}, "index.json: weight_map does not map tensors to files"),
    ):
        (pair / "target" / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        assert says in refusal(load_target, pair / "target")


@pytest.mark.parametrize(
    "drop, changes, says",
    [
        ("layers.0.mlp.up_proj", {}, "lacks 1 tensor (model.layers.0.mlp.up_proj.weight)"),
        ("mlp.up_proj", {}, "model.layers.2.mlp.up_proj.weight, ...)"),
        ("nothing", {"model.x.bias": np.ones(3)}, "has unexpected 1 tensor (model.x.bias)"),
        ("nothing", {KEY: np.ones((19, 60))}, "has shape [19, 60] where the config asks for [20"),
        ("nothing", {KEY: np.ones((20, 60), np.int32)}, "k_proj.weight is stored as I32"),
    ],
)
def test_wrong_tensors_are_refused_in_one_line(pair, drop, changes, says):
    edit_tensors(pair / "target", drop, **changes)
    assert says in refusal(load_target, pair / "target")


def test_a_failed_write_is_one_line_and_leaves_nothing(pair, tmp_path, monkeypatch):
    full = SafetensorError("I/O error: No space left on device\n(os error 28)")
    target = load_target(pair / "target")
    monkeypatch.setattr(model_folder, "save_file", Mock(side_effect=full))
    said = refusal(save_target, tmp_path / "new", target.config, target.params)
    assert "model.safetensors cannot be written (I/O error: No space left on device)" in said
    assert not (tmp_path / "new").exists()
