"""A target that regenerates conversations, for the tests of one file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.test_regenerate import CONVERSATIONS, Scripted, save_talkative_target
from train import regenerate


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
