"""Isolates each test from measured costs of other tests, and shares a small pair."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from moa_jax import load_target
from moa_jax.config import MoaConfig
from moa_jax.drafters import DRAFTERS
from moa_jax.pretrained import save_drafter
from tests.train.test_regenerate import save_talkative_target

DRAFTER = MoaConfig(2, 24, 2, 24, 2, 16)


@pytest.fixture(autouse=True)
def costs_in_memory(monkeypatch):
    monkeypatch.setattr("infer.cli.flags.auto.folder", lambda: None)


@pytest.fixture(scope="session")
def talkative(tmp_path_factory) -> Path:
    """Returns a folder with a random target that soon stops, `target`, and a drafter, `draft`."""
    folder = tmp_path_factory.mktemp("talkative")
    target = load_target(save_talkative_target(folder), jnp.float32)
    params = jax.jit(DRAFTERS["moa"].make(DRAFTER, target.config).init)(jax.random.key(1))
    save_drafter(folder / "draft", "moa", DRAFTER, params, target)
    return folder
