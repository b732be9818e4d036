"""Hashes that reports and answer folders store and that the wire carries: they never change."""

import json

import pytest

from infer.info import ROOT
from moa_jax.files import folders, parts
from train.run import grid_files

DEMO = ROOT / "moa_jax" / "demo"
STORED = {  # of the bundled models: of all their bytes (answer folders), of samples (the wire)
    "target": (
        "e9309daf0276962b33946d189790d4e67efd5cc0e0454570077ac6f9b2fb750f",
        "f2a81ab0836ae8659e2cea863fea617834966e363f71471fc06cdb137cbfb0ef",
    ),
    "draft": (
        "2510f4800e5891bcda7179e20fe7ac734e2b11fe433770c3a5dde258ff9ce6ab",
        "e1f3baf7cefe269d207df5cdd08bad1e948c25c3daa668ec8d11471dc9bc4d0c",
    ),
}


@pytest.mark.parametrize("name", STORED)
def test_the_bundled_models_keep_their_hashes(name):
    folder = DEMO / name
    assert (folders.folder_hash(folder), parts.model_hash(folder)) == STORED[name]


@pytest.mark.parametrize("name", ["matched", "matched_longer"])
def test_committed_reports_name_the_bundled_target(name):
    files = json.loads((ROOT / "reports" / f"{name}.json").read_text())["files"]
    prefix = "moa_jax/demo/target: "
    stored = {key: facts for key, facts in files.items() if key.startswith(prefix)}
    assert len(stored) == 5
    for key, facts in stored.items():
        assert grid_files.facts(DEMO / "target" / key.removeprefix(prefix)) == facts


def test_the_order_of_keys_is_no_part_of_a_hash():
    assert folders.json_hash({"a": 1, "b": [2]}) == folders.json_hash({"b": [2], "a": 1})
    assert folders.json_hash({"b": [2], "a": 1}) != folders.json_hash({"a": 1, "b": [3]})
