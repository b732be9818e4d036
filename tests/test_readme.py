"""What the README shows works as it stands there."""

# ruff: noqa: F811 (an imported fixture is an argument too)

import dataclasses
import re
import types

import pytest

from infer.info import ROOT
from moa_jax import config
from moa_jax.config import DraftShape
from moa_jax.drafters import DRAFTERS
from tests.drafting import (
    assert_changes_nothing,
    assert_drafting_equals_training,
    calm_target,  # noqa: F401
    untrained,
)

FENCED = re.compile(r"```python\n# (\S+)\n(.*?)```", re.DOTALL)


@pytest.fixture
def blocks() -> dict[str, str]:
    """The README's pieces of code that name their file."""
    return dict(FENCED.findall((ROOT / "README.md").read_text(encoding="utf-8")))


def test_the_drafter_in_60_lines(blocks, calm_target, monkeypatch):
    names = {"dataclasses": dataclasses}
    exec(blocks["moa_jax/config.py"], names)
    monkeypatch.setattr(config, "LastTokenConfig", names["LastTokenConfig"], raising=False)
    code = blocks["moa_jax/drafters/last_token.py"]
    module = types.ModuleType("last_token")
    exec(code, module.__dict__)
    monkeypatch.setitem(DRAFTERS, "last-token", module.KIND)
    drafter = untrained(calm_target, "last-token", names["LastTokenConfig"](24))
    assert len([line for line in code.splitlines() if line.strip()]) <= 60
    assert_drafting_equals_training(calm_target, drafter)
    assert_changes_nothing(calm_target, drafter, [DraftShape(4)])
