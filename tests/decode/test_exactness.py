"""The first difference between two answers, and its margin, as numbers that JSON can hold."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import pytest

from infer.bench.random_pair import random_target
from moa_jax.config import BlockConfig, Sampling, TargetConfig
from moa_jax.decode.exactness import Difference, compare, scores_after

PROMPT = [5, 9, 4]


@pytest.fixture(scope="module")
def target():
    block = BlockConfig(16, 2, 1, 8, 24, 1e-5, 10000.0, None)
    return random_target(TargetConfig("llama", 64, 1, block, False, 256), jnp.float32, Path("tiny"))


def test_answers_differ_at_a_place_and_by_a_margin(target):
    scores_V = scores_after(target, PROMPT, [7], Sampling())
    margin = pytest.approx(float(scores_V[8] - scores_V[3]))
    assert compare(target, PROMPT, [7, 8], [7, 3]) == Difference(1, 8, 3, margin)
    assert compare(target, PROMPT, [7, 8], [7, 8]) is None
    ended = compare(target, PROMPT, [7, 8], [7])
    assert ended == Difference(1, 8, None, None) and "one answer ended sooner" in str(ended)
    assert str(Difference(1, 8, 3, 0.25)).endswith("; the target prefers plain's by 0.25")
