"""A drafter that is trained once, and a target that regenerates conversations."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.test_regenerate import CONVERSATIONS, Scripted, save_talkative_target
from tests.train.test_training import distill_config
from train import distill, regenerate


@pytest.fixture(scope="session")
def distilled(small_target, tmp_path_factory) -> Path:
    """Returns the folder of an uninterrupted run; to be read, not changed."""
    folder = tmp_path_factory.mktemp("distilled")
    distill.distill(distill_config(folder, small_target))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_talkative_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def scripted(monkeypatch):
    monkeypatch.setattr(regenerate, "_local", Scripted)


@pytest.fixture
def ask(folder):
    """Runs the program."""

    def ask(output: Path, *flags: str, prompts: Path = CONVERSATIONS) -> None:
        given = ["--target", str(folder), "--prompts", str(prompts), *map(str, flags)]
        regenerate.main([*given, "--output", str(output)])

    return ask
