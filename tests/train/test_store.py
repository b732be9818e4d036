"""Runs, checkpoints and data in an object store: gs://bucket/... is a folder.

It is never locked or renamed. What reaches a real one is replaced at two places: the file system of
fsspec, through which epath reads and writes, and the store that Orbax names to TensorStore.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import fsspec
import jax
import numpy as np
import pytest
from etils.epath import backend
from fsspec.implementations.local import LocalFileSystem
from orbax.checkpoint._src.path import gcs_utils

from moa_jax.data import sources
from moa_jax.files import paths
from moa_jax.files.paths import place
from moa_jax.training.checkpoint import steps_of
from moa_jax.training.metrics import read_records
from tests.model_folders import refusal
from tests.train.test_training import changed, distill_config, metrics
from tests.train.toy_run import toy_config, toy_job
from train import distill, export
from train.run.loop import check, fit
from train.run.settings import expanded

RUN = "gs://bucket/runs/toy"


def stand_in(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """From now on gs://NAME is `folder`/NAME."""

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
    patch.setattr(
        gcs_utils,
        "get_kvstore_for_gcs",
        lambda path: {"driver": "file", "path": path.replace("gs://", f"{folder}/")},
    )


@pytest.fixture
def store(tmp_path, monkeypatch) -> Path:
    stand_in(monkeypatch, tmp_path / "store")
    return tmp_path / "store"


def trained(config, **changes):
    return jax.tree.map(np.asarray, fit(toy_job(config, **changes), None))


def test_a_run_in_a_store_is_that_in_a_folder(store, tmp_path, monkeypatch):
    """It is cut and goes on from its last checkpoint that is whole."""
    monkeypatch.chdir(tmp_path)  # where no folder of a URL's name may appear
    wanted = trained(toy_config(tmp_path / "beside"))
    config = changed(toy_config(tmp_path), run_directory=RUN)

    class Killed(Exception):
        pass

    def update(*arguments):
        update.count += 1
        if update.count > 9:
            raise Killed
        return job.update(*arguments)

    update.count, job = 0, toy_job(config)
    with pytest.raises(Killed):
        fit(dataclasses.replace(job, update=update), None)
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


@pytest.mark.slow
def test_a_drafter_in_a_store_is_taken_out_and_trained_on(store, small_target, tmp_path):
    first = changed(distill_config(tmp_path / "first", small_target), run_directory=RUN)
    distill.distill(first)
    copy = dataclasses.replace(first, output=str(tmp_path / "copy"))
    export.export(copy, export.step_of(copy, "best"))
    files = lambda folder: {file.name: file.read_bytes() for file in folder.iterdir()}
    assert files(tmp_path / "copy") == files(tmp_path / "first" / "draft") != {}
    second = distill_config(tmp_path / "second", small_target)
    distill.distill(dataclasses.replace(second, init_from=RUN))
    *_, last = (each for each in read_records(place(RUN) / "metrics.jsonl") if "kl" in each)
    assert metrics(tmp_path / "second", "eval")[0] == last | {"step": 0}


def test_data_comes_from_a_store(store):
    folder = store / "bucket" / "chat"
    folder.mkdir()
    records = [{"text": f"number {index}"} for index in range(3)]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "a.jsonl").write_text(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    found = [record for _, record in sources.read_all("gs://bucket/chat")]
    assert found == 2 * records
    assert sources.count("gs://bucket/chat/a.jsonl") == 3
    said = refusal(sources.files_of, "gs://bucket/nothing")
    assert said.startswith("no file or folder gs://bucket/nothing")


def test_stores_that_cannot_be_reached_are_refused(tmp_path, monkeypatch):
    config = toy_config(tmp_path)
    at = lambda url: changed(config, run_directory=url)
    said = refusal(expanded, at("s3://bucket/run"))
    assert said.startswith("s3://bucket/run: s3:// is no store that is known; use gs://")
    for package in paths.PACKAGES:
        monkeypatch.setattr(paths, "_is_installed", lambda name, missing=package: name != missing)
        said = refusal(expanded, at(RUN))
        assert said == f"{RUN} needs the package {package}; pip install 'moa-jax[gcs]'"
    monkeypatch.setattr(paths, "_is_installed", lambda name: True)
    said = refusal(check, changed(at(RUN), run_tensorboard=True))
    assert said.startswith("run.tensorboard: no events can be written to a store")
