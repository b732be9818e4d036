"""Runs, checkpoints and data in an object store: gs://bucket/... is used like a folder.

A store is never locked or renamed. Tests replace two accesses to a real store: the file system of
fsspec, through which epath reads and writes, and the store that Orbax names to TensorStore.
"""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path
from typing import Any

import fsspec
import jax
import numpy as np
import pytest
from etils.epath import backend
from fsspec.implementations.local import LocalFileSystem
from orbax.checkpoint._src.path import gcs_utils

from moa_jax.config import output_of
from moa_jax.data import sources
from moa_jax.files import paths, replace
from moa_jax.files.paths import place
from moa_jax.training.checkpoint import steps_of
from moa_jax.training.metrics import read_records
from tests.model_folders import refusal
from tests.train.test_training import changed
from tests.train.toy_run import cut_at, toy_config, toy_job
from train.run import output
from train.run.loop import fit
from train.run.settings import expanded

RUN = "gs://bucket/runs/toy"


def stand_in(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Maps gs://NAME to `folder`/NAME from now on."""

    class Folder(LocalFileSystem):
        protocol = ("gcs", "gs")
        cachable = False

        def __init__(self, **_: Any) -> None:
            super().__init__(auto_mkdir=True)

        @classmethod
        def _strip_protocol(cls, path: Any) -> str:
            path = str(path)
            if path.startswith(str(folder)):
                return path
            return str(folder / path.removeprefix("gcs://").removeprefix("gs://").strip("/"))

        def glob(self, path: str, **settings: Any) -> list[str]:
            return [found.removeprefix(f"{folder}/") for found in super().glob(path, **settings)]

        def mv(self, *_: Any, **__: Any) -> None:
            raise AssertionError("a store renames nothing")

    (folder / "bucket").mkdir(parents=True)
    patch.setattr(paths, "_is_installed", lambda package: True)
    fsspec.register_implementation("gcs", Folder, clobber=True)
    backend.fsspec_backend._get_filesystem.cache_clear()
    patch.setattr(gcs_utils, "is_hierarchical_namespace_enabled", lambda path: False)
    files = lambda path: {"driver": "file", "path": path.replace("gs://", f"{folder}/")}
    patch.setattr(gcs_utils, "get_kvstore_for_gcs", files)


@pytest.fixture
def store(tmp_path, monkeypatch) -> Path:
    stand_in(monkeypatch, tmp_path / "store")
    return tmp_path / "store"


def trained(config, **changes):
    return jax.tree.map(np.asarray, fit(toy_job(config, **changes), None))


def test_a_run_in_a_store_is_that_in_a_folder(store, tmp_path, monkeypatch):
    """The run is interrupted, and resumes from its last complete checkpoint."""
    monkeypatch.chdir(tmp_path)  # where no folder of a URL's name may appear
    wanted = trained(toy_config(tmp_path / "beside"))
    config = changed(toy_config(tmp_path), run_directory=RUN)
    with pytest.raises(KeyboardInterrupt):
        fit(toy_job(config, batch=cut_at(9)), None)
    assert steps_of(config) == [4, 8]
    (store / "bucket/runs/toy/checkpoints/8/commit_success.txt").unlink()
    assert steps_of(config) == [4]
    found = trained(config)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    ours, theirs = (
        read_records(place(run) / "metrics.jsonl") for run in (RUN, tmp_path / "beside" / "run")
    )
    assert ours == theirs and len(ours) > 6
    assert not (tmp_path / "gs:").exists()


def test_a_model_in_a_store_is_complete_with_its_config(store, tmp_path, monkeypatch):
    """An upload that is cut leaves no config.json, and is repeated; other runs are refused."""
    config = changed(toy_config(tmp_path), run_directory=RUN, output=None)
    trained(config)
    folder, copy, names, cuts = place(output_of(config)), shutil.copyfileobj, [], []
    files = {"config.json": b"{}", "model.safetensors": b"", **output.record(config, 12)}

    def write():
        output.check_writable(config, overwrite=False)
        with replace.replacing(folder) as fresh:
            for name, content in files.items():
                (fresh / name).write_bytes(content)

    def copied(source, *rest):
        names.append(Path(source.name).name)
        copy(source, *rest)
        if cuts:
            raise cuts.pop()

    monkeypatch.setattr(shutil, "copyfileobj", copied)
    write()
    assert len(names) == 3 and names[-1] == "config.json"
    cuts.append(OSError("cut"))
    with pytest.raises(OSError, match="cut"):
        write()
    assert not (folder / "config.json").exists() and (folder / "model.safetensors").exists()
    write()
    assert {path.name for path in folder.iterdir()} == set(files)
    other = changed(config, run_directory=str(tmp_path / "other"), output=str(folder))
    line = refusal(output.check_writable, other, overwrite=False)
    assert f"{folder} holds a model that the run in {RUN} wrote; choose another output" in line
    output.check_writable(other, overwrite=True)


def test_data_is_read_from_a_store(store):
    folder = store / "bucket" / "chat"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "one"}\n')
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "two"}\n'))
    found = [record["text"] for _, record in sources.read_all("gs://bucket/chat")]
    assert found == ["one", "two"] and sources.count("gs://bucket/chat/a.jsonl") == 1
    refused = refusal(sources.files_of, "gs://bucket/nothing")
    assert refused.startswith("no file or folder gs://bucket/nothing")


def test_stores_that_cannot_be_reached_are_refused(tmp_path, monkeypatch):
    at = lambda url: changed(toy_config(tmp_path), run_directory=url)
    refused = refusal(expanded, at("s3://bucket/run"))
    assert refused.startswith("s3://bucket/run: s3:// is no store that is known; use gs://")
    monkeypatch.setattr(paths, "_is_installed", lambda name: False)
    refused = refusal(expanded, at(RUN))
    assert refused.startswith(f"{RUN} needs the package ")
    assert refused.endswith("; pip install 'moa-jax[gcs]'")
