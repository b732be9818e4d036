"""What the README shows works as it stands there."""

# ruff: noqa: F811 (an imported fixture is an argument too)

import dataclasses
import re
import types

import numpy as np
import pytest

from infer.info import ROOT
from moa_jax import config
from moa_jax.config import DraftShape
from moa_jax.drafters import DRAFTERS
from tests.drafting import (
    assert_changes_nothing,
    assert_drafting_equals_training,
    assert_training_makes_a_drafter,
    batch_of,
    calm_target,  # noqa: F401
    loss_and_gradient,
    untrained,
)

FENCED = re.compile(r"```python\n# (\S+)\n(.*?)```", re.DOTALL)


@pytest.fixture
def last_token(monkeypatch):
    """The config of the README's drafter, which is registered; not longer than it says."""
    blocks = dict(FENCED.findall((ROOT / "README.md").read_text(encoding="utf-8")))
    names = {"dataclasses": dataclasses}
    exec(blocks["moa_jax/config.py"], names)
    monkeypatch.setattr(config, "LastTokenConfig", names["LastTokenConfig"], raising=False)
    code = blocks["moa_jax/drafters/last_token.py"]
    assert len([line for line in code.splitlines() if line.strip()]) <= 60
    module = types.ModuleType("last_token")
    exec(code, module.__dict__)
    monkeypatch.setitem(DRAFTERS, "last-token", module.KIND)
    return names["LastTokenConfig"](24)


def test_the_drafter_in_60_lines_drafts(last_token, calm_target):
    drafter = untrained(calm_target, "last-token", last_token)
    assert_drafting_equals_training(calm_target, drafter)
    assert_changes_nothing(calm_target, drafter, [DraftShape(4)])


def test_the_drafter_in_60_lines_has_a_loss(last_token, calm_target):
    drafter = untrained(calm_target, "last-token", last_token)
    tokens_BT = np.arange(24).reshape(2, 12)
    batch = batch_of(tokens_BT, np.ones((2, 12)), tokens_BT % 3 > 0)
    parts, gradient = loss_and_gradient(calm_target, drafter, batch)
    assert 0 < parts["loss"] < parts["cross_entropy"]
    assert gradient.keys() == {"up.weight", "down.weight"}
    assert all(np.isfinite(x).all() and np.any(x) for x in gradient.values())


@pytest.mark.slow
def test_the_drafter_in_60_lines_is_trained(last_token, small_target, tmp_path):
    assert_training_makes_a_drafter(small_target, tmp_path, type(last_token)(256))
