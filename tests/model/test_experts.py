"""Experts: four ways to compute one sum, which nothing else in the batch changes."""

import functools

import jax
import numpy as np
import pytest

from moa_jax.model import experts, quantize
from moa_jax.training import flops
from tests.compare import assert_close
from tests.conftest import slow
from tests.decode.tiny import TINY

T, D, mix = 14, 16, functools.partial(experts.mix, TINY.experts.config.block.experts)


@pytest.mark.parametrize("weights", [None, slow("int8")])
def test_every_way_gives_the_same_sums(weights, monkeypatch):
    """Four tokens read their experts, more read all; the last tokens are equal, none is lost."""
    params = TINY.experts.target(weights).params["layers"][0]["mlp"]
    of = lambda name: quantize.restored((name,), params[name]) if weights else params[name]
    whole = params | {name: of(name) for name in ("gate_up", "down")}
    x_TD = np.random.default_rng(9).standard_normal((T, D), np.float32)
    x_TD[-5:] = 0.3
    jitted = lambda: jax.jit(lambda *given: mix(*given))  # traced anew
    in_fours = lambda ours: np.concatenate([ours(params, x_TD[i : i + 4]) for i in range(0, T, 4)])
    every, ours = jitted()(whole, x_TD), jitted()
    assert_close(in_fours(ours), every, "chosen")
    assert_close(ours(params, x_TD), every, "every")
    monkeypatch.setattr(experts, "traced_platform", lambda: "tpu")
    assert_close(in_fours(jitted()), every, "in turn")
    monkeypatch.setattr(experts, "MOST_TOKENS_OF_EVERY", 1)
    assert_close(jitted()(params, x_TD), every, "sorted")
    if not weights:  # FLOPs are those of the router and of two of the eight experts
        assert flops.count(lambda *given: mix(*given), params, x_TD) == 2 * T * D * (8 + 2 * 3 * 12)
