"""The most likely tokens are those of argmax and lax.top_k on every device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moa_jax.decode import sampling
from moa_jax.model import topk
from moa_jax.model.topk import argmax

NAN, INF = float("nan"), float("inf")
ROWS = {
    "a tie": [0.0, 2.0, 1.0, 2.0],
    "zeros of two signs": [-1.0, -0.0, 0.0, -0.0],
    "some impossible": [-INF, 1.0, -INF, 1.0],
}
NOT_FINITE = {
    "all impossible": [-INF] * 4,
    "one certain": [0.0, INF, 1.0, INF],
    "not a number": [NAN, 1.0, 3.0, 2.0],
}


def with_fallback(order_V: jax.Array) -> jax.Array:
    """Returns the result of the fallback that devices other than CPUs use."""
    best, place = topk._argmax_with_max(order_V)
    return jnp.where(jnp.isfinite(best), place, -1)


@pytest.mark.parametrize("row", [*ROWS.values(), *NOT_FINITE.values()], ids=[*ROWS, *NOT_FINITE])
def test_argmax_of_one_row(row):
    order_V, best = jnp.array(row), int(jnp.argmax(jnp.array(row)))
    is_finite = row in ROWS.values()
    for checked in (topk.finite_argmax, with_fallback):
        assert int(jax.jit(checked)(order_V)) == (best if is_finite else -1)
    assert int(jax.jit(argmax)(order_V)) == (best if is_finite else 0)


@pytest.mark.parametrize("V", [100, 2048])
def test_argmax_of_what_is_computed_in_the_same_program(V):
    """XLA must not compute the input twice, because then no token need equal the maximum."""

    @jax.jit
    def drawn(logits_BNV: jax.Array, seed: jax.Array) -> tuple[jax.Array, jax.Array]:
        noise_BNV = jax.random.gumbel(jax.random.key(seed), logits_BNV.shape)
        scores_BNV = jax.nn.log_softmax(1.37 * logits_BNV) * 0.71 + noise_BNV
        return sampling.sample(scores_BNV, jnp.zeros(())), scores_BNV

    for seed in range(20):
        logits_BNV = 5 * jax.random.normal(jax.random.key(100 + seed), (2, 6, V))
        found_BN, scores_BNV = drawn(logits_BNV, seed)
        np.testing.assert_array_equal(found_BN, jnp.argmax(scores_BNV, axis=-1))


OUT = {"nearly all are out": slice(5, -4), "none is left": slice(None)}


@pytest.mark.parametrize("size", [8, 57, 64])
@pytest.mark.parametrize("name", ["no ties", "many ties", *OUT])
def test_the_best_of_pieces_are_the_best_of_all(name, size, monkeypatch):
    """Values and indices equal those of `lax.top_k`, for more and fewer than a piece has."""
    order_BWU = np.random.default_rng(0).normal(size=(1, 3, size)).astype(np.float32)
    if name == "many ties":
        order_BWU = np.round(order_BWU)  # zeros of both signs among them
    order_BWU[..., OUT.get(name, slice(0))] = -INF
    monkeypatch.setattr(topk, "PIECE", 8)
    for count in (1, 7, 8, 12, size):
        if count <= size:
            value_BWk, place_BWk = topk.top_k(jnp.asarray(order_BWU), count)
            expected_BWk, index_BWk = jax.lax.top_k(order_BWU, count)
            np.testing.assert_array_equal(place_BWk, index_BWk)
            np.testing.assert_array_equal(value_BWk, expected_BWk)
