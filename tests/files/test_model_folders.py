"""Folders that are absent, damaged or half written: one clear line, and nothing lost."""

from __future__ import annotations

import json
import os
from pathlib import Path

import huggingface_hub
import jax
import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import SafetensorError

from moa_jax.files import model_folder, whole_files
from moa_jax.pretrained import describe_target, load_drafter, load_target, save_target
from tests.model_folders import edit_tensors, refusal, save_random_pair


@pytest.fixture
def pair(tmp_path):
    save_random_pair(tmp_path / "pair", "llama", seed=1)
    return tmp_path / "pair"


def test_a_folder_that_is_not_there(tmp_path, monkeypatch):
    def unreachable(*_, **__):
        raise LocalEntryNotFoundError("no network\nat all")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    said = refusal(load_target, "someone/some-model")
    assert said.startswith("someone/some-model is neither a folder nor reachable as a hub id")
    assert "is not a folder" in refusal(load_target, tmp_path / "none")
    (tmp_path / "file").write_text("")
    assert "is a file; give the folder" in refusal(load_target, tmp_path / "file")


def test_whatever_the_hub_raises_is_one_line(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("client closed\nits connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", broken)
    assert "as a hub id (client closed)" in refusal(load_target, "someone/some-model")


def test_hub_ids_are_fetched_without_what_is_not_read(pair, monkeypatch):
    asked = []

    def fetch(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(pair / "target")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert load_target("owner/model").folder == pair / "target"
    assert describe_target("owner/model").params is None
    assert [name for name, _ in asked] == ["owner/model"] * 2
    assert "*.safetensors" in asked[0][1] and "*.safetensors" not in asked[1][1]
    assert not any("bin" in pattern or pattern == "*" for pattern in asked[0][1])


def test_hub_ids_of_pickles_name_the_converter(pair, monkeypatch):
    (pair / "draft" / "model.safetensors").unlink()
    listed = {"some/pickles": ["config.json", "pytorch_model.bin"], "some/tables": ["config.json"]}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pair / "draft")
    monkeypatch.setattr(huggingface_hub, "list_repo_files", listed.__getitem__)  # or KeyError
    target = load_target(pair / "target")
    said = refusal(load_drafter, "some/pickles", target)
    assert said.startswith("some/pickles holds pytorch_model.bin but no safetensors")
    assert "hf download some/pickles --local-dir FOLDER" in said
    assert "python -m infer.peers.unpickle FOLDER NEW_FOLDER" in said
    for name in ("some/tables", "not/listed"):
        assert "holds no model.safetensors" in refusal(load_drafter, name, target)


def damage(name: str, folder: Path) -> None:
    weights, config = folder / "model.safetensors", folder / "config.json"
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    key = "model.layers.1.self_attn.k_proj.weight"

    def index_by(content):
        weights.unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))

    {
        "no config": config.unlink,
        "config no JSON": lambda: config.write_text("{"),
        "config no object": lambda: config.write_text("[]"),
        "truncated": lambda: weights.write_bytes(weights.read_bytes()[:-1]),
        "header cut": lambda: weights.write_bytes(weights.read_bytes()[:50]),
        "empty": lambda: weights.write_bytes(b""),
        "pickle": lambda: weights.rename(folder / "pytorch_model.bin"),
        "no weights": weights.unlink,
        "file of index": lambda: index_by(index),
        "index of lists": lambda: index_by({"weight_map": []}),
        "index of numbers": lambda: index_by({"weight_map": {"model.norm.weight": 1}}),
        "index of nothing": lambda: index_by({}),
        "missing": lambda: edit_tensors(folder, drop="mlp.up_proj"),
        "missing one": lambda: edit_tensors(folder, drop=key),
        "extra": lambda: edit_tensors(folder, **{"model.layers.0.bias": np.ones(3)}),
        "shape": lambda: edit_tensors(folder, **{key: np.ones((19, 60), np.float32)}),
        "dtype": lambda: edit_tensors(folder, **{key: np.ones((20, 60), np.int32)}),
    }[name]()


@pytest.mark.parametrize(
    "name, says",
    [
        ("no config", "config.json is missing"),
        ("config no JSON", "config.json is not valid JSON"),
        ("config no object", "config.json holds no JSON object"),
        ("truncated", "model.safetensors is cut short"),
        ("header cut", "model.safetensors is cut short"),
        ("empty", "model.safetensors is cut short"),
        ("pickle", "holds pytorch_model.bin but no safetensors"),
        ("no weights", "holds no model.safetensors"),
        ("file of index", "model-00001-of-00002.safetensors is missing though the index names it"),
        ("index of lists", "index.json: weight_map does not map tensors to files"),
        ("index of numbers", "index.json: weight_map does not map tensors to files"),
        ("index of nothing", "index.json: weight_map does not map tensors to files"),
        (
            "missing",
            "lacks 5 tensors (model.layers.0.mlp.up_proj.weight, "
            "model.layers.1.mlp.up_proj.weight, model.layers.2.mlp.up_proj.weight, ...)",
        ),
        ("missing one", "lacks 1 tensor (model.layers.1.self_attn.k_proj.weight)"),
        ("extra", "has unexpected 1 tensor (model.layers.0.bias)"),
        ("shape", "k_proj.weight has shape [19, 60] where the config asks for [20, 60]"),
        ("dtype", "k_proj.weight is stored as I32"),
    ],
)
def test_damaged_folders_are_refused_in_one_line(pair, name, says):
    damage(name, pair / "target")
    assert says in refusal(load_target, pair / "target")


def test_new_files_have_the_rights_that_the_umask_gives(pair, tmp_path):
    target = load_target(pair / "target")
    for number, umask in enumerate((0o022, 0o077)):
        before = os.umask(umask)
        try:
            new = save_target(tmp_path / str(number), target.config, target.params)
        finally:
            os.umask(before)
        modes = {path.name: path.stat().st_mode & 0o777 for path in new.iterdir()}
        assert "model.safetensors" in modes and set(modes.values()) == {0o666 & ~umask}


def test_a_failed_write_is_one_line_and_leaves_nothing(pair, tmp_path, monkeypatch):
    def full(*_, **__):
        raise SafetensorError("I/O error: No space left on device\n(os error 28)")

    target = load_target(pair / "target")
    monkeypatch.setattr(model_folder, "save_file", full)
    said = refusal(save_target, tmp_path / "new", target.config, target.params)
    assert "model.safetensors cannot be written (I/O error: No space left on device)" in said
    assert not (tmp_path / "new").exists()


def test_an_interrupted_save_leaves_what_was_there(pair, tmp_path, monkeypatch):
    target = load_target(pair / "target")
    params = {k: v for k, v in target.params.items() if k != "final_norm"}
    for folder in (tmp_path / "new", pair / "target"):
        with pytest.raises(KeyError):
            save_target(folder, target.config, params)
    assert not (tmp_path / "new").exists()
    kept = load_target(pair / "target").params
    jax.tree.map(np.testing.assert_array_equal, kept, target.params)
    assert [path.name for path in tmp_path.iterdir()] == ["pair"]
    assert sorted(path.name for path in pair.iterdir()) == ["draft", "target"]


def test_a_json_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "some.json"
    whole_files.write_json(path, {"depth": 3})

    def full_disk(fresh: Path, content: bytes) -> None:
        with fresh.open("wb") as file:
            file.write(content[:9])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full_disk)
        with pytest.raises(OSError, match="No space left"):
            whole_files.write_json(path, {"depth": 4})
    assert whole_files.read_json(path) == {"depth": 3} and list(tmp_path.iterdir()) == [path]
