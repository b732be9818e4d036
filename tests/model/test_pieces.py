"""The likeliest token is argmax's, however the device finds it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moa_jax.model.pieces import likeliest

NAN, INF = float("nan"), float("inf")

LAWS = {
    "a tie": [0.0, 2.0, 1.0, 2.0],
    "all alike": [1.0] * 4,
    "all impossible": [-INF] * 4,
    "one certain": [0.0, INF, 1.0, INF],
    "not a number": [3.0, 1.0, NAN, NAN],
    "zeros of two signs": [-1.0, -0.0, 0.0, -0.0],
}


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_of_one_law(law):
    order_V = jnp.array(law)
    assert int(jax.jit(likeliest)(order_V)) == int(jnp.argmax(order_V))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("V", [1, 7, 2048])
def test_of_many_laws(dtype, V):
    order_BNV = jnp.round(3 * jax.random.normal(jax.random.key(V), (2, 5, V))).astype(dtype)
    found_BN = jax.jit(likeliest)(order_BNV)
    assert found_BN.dtype == jnp.int32
    np.testing.assert_array_equal(found_BN, jnp.argmax(order_BNV, axis=-1))
