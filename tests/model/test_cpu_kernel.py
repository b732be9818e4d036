"""CPU kernels in panels compute the same products, in one library call each, without copies."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.bench.plan.hlo import ENTRY, arrays, parse
from moa_jax.model import quantize
from moa_jax.model.kernels import cpu
from moa_jax.model.kernels.cpu import Panels
from tests.compare import assert_close

KERNEL = np.random.default_rng(0).standard_normal((96, 3, 4, 16), np.float32)


@pytest.mark.parametrize("simd, width", [({}, 16), ({"baseline": ["X86_V4"]}, 32)])
def test_panels_are_two_vector_registers_wide(simd, width, monkeypatch):
    """NumPy leaves out empty lists of features."""
    monkeypatch.setattr(np, "show_config", lambda mode: {"SIMD Extensions": simd} if simd else {})
    assert cpu.width.__wrapped__() == width


@pytest.mark.parametrize("rows", [(1, 1), (2, 1), (2, 5), (3,)])
def test_products_equal_those_with_the_matrix(rows):
    x = np.random.default_rng(1).standard_normal((*rows, 96), np.float32)
    kernel = cpu.cut(jnp.asarray(KERNEL))
    assert isinstance(kernel, Panels) and kernel.shape == KERNEL.shape
    want = np.tensordot(x, KERNEL, 1)
    assert_close(quantize.matmul(x, kernel, jnp.float32), want, "product", 2e-6)


@pytest.mark.skipif(not cpu.is_fast(), reason="panels need XLA's library for CPUs")
@pytest.mark.parametrize("rows", [2, 5, 16, 64, 100])
def test_a_row_has_the_same_bits_among_any_number_of_rows(rows):
    """So a verified draft and a plain round have equal products, bit by bit."""
    kernel = cpu.cut(jnp.asarray(KERNEL))
    x = np.random.default_rng(1).standard_normal((rows, 96), np.float32)
    alone, among = (jax.jit(cpu.multiply)(x[:count], kernel) for count in (1, rows))
    np.testing.assert_array_equal(alone[0], among[0])


def test_a_matrix_is_restored_from_its_panels():
    np.testing.assert_array_equal(cpu.cut(jnp.asarray(KERNEL)).whole(), KERNEL)
    with cpu.laid_out_for(cpu.MANY_ROWS):
        assert not isinstance(cpu.cut(jnp.asarray(KERNEL)), Panels)
    matrix = cpu.cut(jnp.asarray(KERNEL.reshape(96, -1)))
    ids = np.array([5, 0, 190])
    np.testing.assert_array_equal(quantize.columns(matrix, ids), KERNEL.reshape(96, -1)[:, ids])


@pytest.mark.parametrize("rows", [1, 3])
def test_each_product_is_one_library_call(rows):
    """XLA could otherwise broadcast the weights over the rows, and store the result.

    A single row is padded to two rows, because XLA's library computes one row slowly.
    """
    width, kernel = cpu.width(), cpu.cut(jnp.ones((128, 128)))

    def twice(x, kernel):
        return cpu.multiply(jnp.tanh(cpu.multiply(x, kernel)), kernel)

    hlo = jax.jit(twice).lower(jnp.ones((rows, 128)), kernel).compile().as_text()
    main = parse(hlo)[ENTRY].values()
    calls = [arrays(each.shape)[0] for each in main if "__ynn_fusion" in each.attributes]
    panels = (128 // width, max(rows, 2), width)  # they are outermost
    assert [call.dims for call in calls] == [panels] * 2
    assert max(each.size for each in main) <= kernel.columns_PDC.nbytes


def test_bfloat16_products_of_training_are_those_of_the_library():
    """XLA would compile bfloat16 results to loops, and transposed operands in float32."""

    def loss(kernel, x):
        return jnp.tanh(quantize.matmul(x, kernel, x.dtype)).astype(jnp.float32).sum()

    gradient = jax.jit(jax.grad(loss, (0, 1)))
    x = np.random.default_rng(1).standard_normal((4, 5, 96), np.float32)
    given = jnp.asarray(0.1 * KERNEL), jnp.asarray(x, jnp.bfloat16)
    hlo = gradient.lower(*given).compile().as_text()
    dtypes = dict(re.findall(r"%(\S+) = (\w+)\[", hlo))
    products = re.findall(r"%(\S+) = \w+\S+ dot\(%(\S+), %(\S+)\)", hlo)
    found = [[dtypes[name] for name in names] for names in products]
    assert found == [["f32", "bf16", "bf16"]] * 3
    for found, exact in zip(gradient(*given), gradient(given[0], x), strict=True):
        assert_close(np.float32(found), exact, "gradient", 0.01)
