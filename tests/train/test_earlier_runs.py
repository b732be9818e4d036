"""A run that commit 757377e saved goes on, and its drafter decodes.

run_of_757377e.tar.gz holds the run of `tests.train.test_training.distill_config` there: the
checkpoint of step 8 of 12, the finished drafter and its target. All paths are relative.
"""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import jax
import numpy as np
import pytest

from moa_jax import Session, load_drafter, load_target
from moa_jax.config import DraftShape
from tests.train.test_training import CONVERSATIONS, changed, distill_config
from train import distill


@pytest.fixture
def earlier(tmp_path, monkeypatch) -> Path:
    """The run's folder, which is the working directory."""
    with tarfile.open(Path(__file__).with_name("run_of_757377e.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    shutil.copy(CONVERSATIONS, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def drafted(target, folder: str) -> list[int]:
    session = Session(target, load_drafter(folder, target), DraftShape(3))
    (result,) = session.generate([[5, 9, 40, 7]], 16, stop_ids=())
    return result.token_ids


@pytest.mark.slow
def test_an_earlier_checkpoint_goes_on_and_an_earlier_drafter_decodes(earlier, capsys):
    target = load_target("target", np.float32)
    (plain,) = Session(target).generate([[5, 9, 40, 7]], 16, stop_ids=())
    assert drafted(target, "draft") == plain.token_ids
    paths = (Path(CONVERSATIONS).name,)
    finished = load_drafter("draft", target).params
    config = distill_config(Path(), Path("target"))
    distill.distill(changed(config, data_train=paths, data_validation=paths))
    assert "12 steps, the last 4 in" in capsys.readouterr().err
    compare(finished, load_drafter("draft", target).params)


def compare(one, other) -> None:
    """Both trained for the same 12 steps, four of them by this version."""
    for ours, theirs in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
