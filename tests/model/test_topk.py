"""The likeliest token is argmax's, however the device finds it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moa_jax.decode import sampling
from moa_jax.model import topk
from moa_jax.model.topk import argmax

NAN, INF = float("nan"), float("inf")

LAWS = {
    "a tie": [0.0, 2.0, 1.0, 2.0],
    "all alike": [1.0] * 4,
    "zeros of two signs": [-1.0, -0.0, 0.0, -0.0],
    "some impossible": [-INF, 1.0, -INF, 1.0],
}
NOT_FINITE = {
    "all impossible": [-INF] * 4,
    "one certain": [0.0, INF, 1.0, INF],
    "not a number, first": [NAN, 1.0, 3.0, 2.0],
    "not a number, last": [3.0, 1.0, 2.0, NAN],
    "not numbers": [NAN] * 4,
}


def with_fallback(order_V: jax.Array) -> jax.Array:
    """As other devices than CPUs compute it."""
    best, place = topk._argmax_with_max(order_V)
    return jnp.where(jnp.isfinite(best), place, -1)


@pytest.mark.parametrize("checked", [topk.finite_argmax, with_fallback])
@pytest.mark.parametrize("law", [*LAWS.values(), *NOT_FINITE.values()], ids=[*LAWS, *NOT_FINITE])
def test_of_one_law(checked, law):
    order_V = jnp.array(law)
    is_finite = law in LAWS.values()
    assert int(jax.jit(checked)(order_V)) == (int(jnp.argmax(order_V)) if is_finite else -1)
    assert int(jax.jit(argmax)(order_V)) == (int(jnp.argmax(order_V)) if is_finite else 0)


@pytest.mark.parametrize("V", [100, 2048])
def test_of_what_is_computed_in_the_same_program(V):
    """Were it computed once for each of two passes, no token need equal the best."""

    def score(logits_BNV: jax.Array, seed: jax.Array) -> jax.Array:
        noise_BNV = jax.random.gumbel(jax.random.key(seed), logits_BNV.shape)
        return jax.nn.log_softmax(1.37 * logits_BNV) * 0.71 + noise_BNV

    @jax.jit
    def drawn(logits_BNV: jax.Array, seed: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores_BNV = score(logits_BNV, seed)
        return sampling.sample(scores_BNV, jnp.zeros(())), scores_BNV

    for seed in range(20):
        logits_BNV = 5 * jax.random.normal(jax.random.key(100 + seed), (2, 6, V))
        found_BN, scores_BNV = drawn(logits_BNV, seed)
        np.testing.assert_array_equal(found_BN, jnp.argmax(scores_BNV, axis=-1))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("V", [1, 7, 2048])
def test_of_many_laws(dtype, V):
    order_BNV = jnp.round(3 * jax.random.normal(jax.random.key(V), (2, 5, V))).astype(dtype)
    found_BN = jax.jit(argmax)(order_BNV)
    assert found_BN.dtype == jnp.int32
    np.testing.assert_array_equal(found_BN, jnp.argmax(order_BNV, axis=-1))
