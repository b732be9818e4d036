"""Folders that are absent, damaged or half written: one clear line, and nothing lost."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import SafetensorError

from moa_jax.files import model_folder, whole_files
from moa_jax.pretrained import describe_target, load_drafter, load_target, save_target
from tests.model_folders import edit_tensors, refusal


def test_a_folder_that_is_not_there(tmp_path, monkeypatch):
    for error in (LocalEntryNotFoundError("no network\nat all"), RuntimeError("closed\nby whom")):
        fails = Mock(side_effect=error)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
        said = refusal(load_target, "someone/some-model")
        assert said.startswith("someone/some-model is neither a folder nor reachable as a hub id")
    assert "as a hub id (closed)" in said
    assert "is not a folder" in refusal(load_target, tmp_path / "none")
    (tmp_path / "file").write_text("")
    assert "is a file; give the folder" in refusal(load_target, tmp_path / "file")


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


KEY = "model.layers.1.self_attn.k_proj.weight"
SPLIT = {"model.norm.weight": "model-00001-of-00002.safetensors"}
NO_MAP = "index.json: weight_map does not map tensors to files"


def weights_of(folder: Path) -> Path:
    return folder / "model.safetensors"


def index_by(content: object) -> Callable[[Path], object]:
    """Puts an index in place of the weights."""

    def change(folder: Path) -> None:
        weights_of(folder).unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))

    return change


def cut(size: int | None) -> Callable[[Path], object]:
    return lambda folder: weights_of(folder).write_bytes(weights_of(folder).read_bytes()[:size])


def config(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(text)


def named(name: str) -> Callable[[Path], object]:
    return lambda folder: weights_of(folder).rename(folder / name)


def edited(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: edit_tensors(folder, **changes)


@pytest.mark.parametrize(
    "damage, says",
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (config("{"), "config.json is not valid JSON"),
        (config("[]"), "config.json holds no JSON object"),
        (cut(-1), "model.safetensors is cut short"),
        (cut(50), "model.safetensors is cut short"),
        (cut(0), "model.safetensors is cut short"),
        (named("pytorch_model.bin"), "holds pytorch_model.bin but no safetensors"),
        (named("consolidated.safetensors"), "consolidated.safetensors but no model.safetensors"),
        (lambda folder: weights_of(folder).unlink(), "holds no model.safetensors"),
        (
            index_by({"weight_map": SPLIT}),
            "-00002.safetensors is missing though the index names it",
        ),
        (index_by({"weight_map": []}), NO_MAP),
        (index_by({"weight_map": {"model.norm.weight": 1}}), NO_MAP),
        (index_by({}), NO_MAP),
        (
            edited(drop="mlp.up_proj"),
            "lacks 5 tensors (model.layers.0.mlp.up_proj.weight, "
            "model.layers.1.mlp.up_proj.weight, model.layers.2.mlp.up_proj.weight, ...)",
        ),
        (edited(drop=KEY), f"lacks 1 tensor ({KEY})"),
        (
            edited(**{"model.layers.0.bias": np.ones(3)}),
            "has unexpected 1 tensor (model.layers.0.bias)",
        ),
        (
            edited(**{KEY: np.ones((19, 60))}),
            "has shape [19, 60] where the config asks for [20, 60]",
        ),
        (edited(**{KEY: np.ones((20, 60), np.int32)}), "k_proj.weight is stored as I32"),
    ],
)
def test_damaged_folders_are_refused_in_one_line(pair, damage, says):
    damage(pair / "target")
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
