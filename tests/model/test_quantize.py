"""Weights of eight bits: rounding, products, and damaged channels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moa_jax.model import quantize
from moa_jax.model.layers import Linear
from moa_jax.model.quantize import FORMATS, Quantized, format_of, quantize_params
from tests.compare import assert_close
from tests.drafting import calm_target  # noqa: F401

both = pytest.mark.parametrize("weights", FORMATS)


def drawn(*shape: int, dtype=jnp.float32, seed: int = 0) -> jax.Array:
    """Returns random numbers; the scale differs per channel."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=shape) * rng.uniform(0.1, 9, shape[-1]), dtype)


def restored(matrix: Quantized, summed: int) -> np.ndarray:
    values, scale = (np.asarray(part, np.float32) for part in matrix)
    return values * np.expand_dims(scale, summed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("summed", [0, 1])
def test_int8_rounds_to_the_nearest_of_255_steps(dtype, summed):
    weight = drawn(40, 24, dtype=dtype)
    matrix = quantize.quantize(weight, "int8", summed)
    assert (matrix.values.dtype, matrix.dtype, matrix.shape) == (jnp.int8, dtype, (40, 24))
    assert matrix.scale.shape == ((24,) if summed == 0 else (40,))
    step = np.expand_dims(np.asarray(matrix.scale, np.float32), summed)
    wide = np.asarray(weight, np.float32)
    most = 0.5001 if dtype == "float32" else 1.0  # a scale in bfloat16 may cut the largest
    assert np.all(np.abs(restored(matrix, summed) - wide) <= most * step)
    assert np.abs(np.asarray(matrix.values, int)).max(summed).tolist() == [127] * step.size


def test_fp8_keeps_three_mantissa_bits():
    weight = drawn(40, 24)
    matrix = quantize.quantize(weight, "fp8", 0)
    assert matrix.values.dtype == jnp.float8_e4m3fn
    found, step = restored(matrix, 0), np.asarray(matrix.scale)
    most = np.maximum(np.abs(weight) * 2**-4, step * 2**-10)  # below 2**-6 steps are even
    assert np.all(np.abs(found - weight) <= 1.0001 * most)


@both
@pytest.mark.parametrize("outputs", [(24,), (2, 3, 4)])
def test_products_are_those_of_the_dequantized_values(weights, outputs):
    kernel, x = drawn(40, *outputs), drawn(2, 5, 40, seed=1)
    matrix = quantize.quantize(kernel, weights, 0)
    expected = np.tensordot(x, restored(matrix, 0), 1)
    assert_close(quantize.matmul(x, matrix, jnp.float32), expected, "product")
    module = Linear(outputs, bias=True)
    params = {"kernel": matrix, "bias": drawn(*outputs, seed=2)}
    assert_close(module.apply({"params": params}, x), expected + params["bias"], "Linear")


@both
def test_a_table_serves_lookup_and_head(weights):
    table_VD, x_TD = drawn(30, 16), drawn(5, 16, seed=1)
    matrix = quantize.quantize(table_VD, weights, 1)
    whole_VD = restored(matrix, 1)
    ids = jnp.array([[0, 29, 7]])
    np.testing.assert_array_equal(quantize.lookup(matrix, ids), whole_VD[ids])
    assert_close(quantize.matmul_rows(x_TD, matrix, jnp.float32), x_TD @ whole_VD.T, "rows")
    turned = quantize.transposed(matrix)
    assert_close(quantize.matmul(x_TD, turned, jnp.float32), x_TD @ whole_VD.T, "turned")
    some = quantize.columns(turned, ids[0])
    assert_close(quantize.matmul(x_TD, some, jnp.float32), x_TD @ whole_VD[ids[0]].T, "some")


@pytest.mark.parametrize("count", [64, 70])
def test_a_tpu_looks_few_rows_up_in_their_tiles(count, monkeypatch):
    """A table without a whole number of tiles is read as on other devices."""
    table = quantize.quantize(drawn(count, 16), "int8", 1)
    ids = jnp.array([[0, count - 1, 31, 32], [7, 33, 7, 1]])
    wanted, program = quantize.lookup(table, ids), str(jax.make_jaxpr(quantize.lookup)(table, ids))
    monkeypatch.setattr(quantize, "traced_platform", lambda: "tpu")
    np.testing.assert_array_equal(quantize.lookup(table, ids), wanted)
    tiled = str(jax.make_jaxpr(lambda *arrays: quantize.lookup(*arrays))(table, ids))
    assert ("reduce_sum" in tiled) == (count == 64) and "reduce_sum" not in program


@both
@pytest.mark.parametrize("smallest", [0.0, 1e-38])
def test_channels_of_nothing_give_nothing(weights, smallest):
    """Channels hold zeros, or numbers too small for a scale that could divide."""
    matrix = quantize.quantize(drawn(8, 3).at[:, 1].set(smallest), weights, 0)
    assert float(matrix.scale[1]) == 1 and not np.any(np.asarray(matrix.values[:, 1], float))
    y = quantize.matmul(drawn(2, 8), matrix, jnp.float32)
    assert np.all(y[:, 1] == 0) and np.all(np.isfinite(y))


@both
def test_a_damaged_channel_has_a_scale_that_shows_it(weights):
    matrix = quantize.quantize(drawn(8, 4).at[5, 1:3].set([np.nan, np.inf]), weights, 0)
    assert np.isfinite(matrix.scale).tolist() == [True, False, False, True]


@both
def test_matrices_of_a_tree_are_quantized_and_no_vectors(calm_target, weights):  # noqa: F811
    params = calm_target.params
    found = quantize_params(params, weights)
    assert (format_of(params), format_of(found)) == (None, weights)
    is_matrix = lambda leaf: isinstance(leaf, Quantized)
    for path, leaf in jax.tree_util.tree_leaves_with_path(found, is_leaf=is_matrix):
        assert is_matrix(leaf) == (path[-1].key != "scale") and leaf.dtype == jnp.float32
    size = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    assert size(found) < 0.32 * size(params)
