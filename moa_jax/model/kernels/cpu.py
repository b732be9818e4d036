"""Float32 weights for CPUs: a matrix split into panels of columns, each contiguous in memory.

    w (D, F)   ->   columns_PDC      panel p holds columns p * C .. p * C + C - 1

XLA's CPU library splits a matrix (D, F) into panels for every product with several rows, which
costs more than multiplying a few rows. `multiply` takes a matrix that was split beforehand: each
weight is read once for any number of rows, and the result of a row has the same bits for any number
of rows. A pass over 4 rows costs little more than a pass over one row.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = jax.Array

# A product of the library takes 0.7 of the time for 64 rows, and as long for 32; with panels a row
# has the same bits among any number of rows.
MANY_ROWS = 64
LEAST_ROWS = 2  # for a single row the library uses a separate sum, 25 times slower


_rows = ContextVar("_rows", default=1)


@contextlib.contextmanager
def laid_out_for(rows: int) -> Iterator[None]:
    """Context in which `cut` prepares weights for products of about this number of rows."""
    before = _rows.set(rows)
    try:
        yield
    finally:
        _rows.reset(before)


def is_for_few() -> bool:
    """Whether `cut` prepares weights for products of few rows in this context."""
    return _rows.get() < MANY_ROWS


@functools.cache
def width() -> int:
    """The number of columns of a panel: two vector registers of the CPU.

    Measured: with registers of 8 numbers (AVX2), products of 4 to 8 rows take twice as long with 64
    columns as with 16; with registers of 16 numbers (AVX-512), 32 and 64 columns are equally fast,
    and 16 are slower.
    """
    simd = np.show_config(mode="dicts").get("SIMD Extensions", {})  # empty lists are left out
    names = [*simd.get("baseline", ()), *simd.get("found", ())]
    return 32 if any(name.startswith(("AVX512", "X86_V4")) for name in names) else 16


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["columns_PDC"], meta_fields=["outputs"]
)
@dataclasses.dataclass(frozen=True)
class Panels:
    """A matrix (D, *outputs) that replaces an array in a parameter tree."""

    columns_PDC: Array
    outputs: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.columns_PDC.shape[1], *self.outputs)

    @property
    def dtype(self) -> Any:
        return self.columns_PDC.dtype

    def whole(self) -> Array:
        """The matrix (D, *outputs) as a single array."""
        return jnp.moveaxis(self.columns_PDC, 0, 1).reshape(self.shape)


def cut(kernel: Any) -> Any:
    """A kernel (D, *outputs) as `Panels`, or unchanged if panels are not applicable.

    A kernel stays unchanged if it is not a float32 array, lies on several devices or has columns
    that do not fill panels, if products have many rows, and if `is_fast` is False.
    """
    inputs, *outputs = kernel.shape
    number, rest = divmod(math.prod(outputs), width())
    is_wide = isinstance(kernel, Array) and kernel.dtype == jnp.float32
    if not is_wide or len(kernel.devices()) > 1 or rest or not is_for_few() or not is_fast():
        return kernel
    return Panels(_cut(kernel.reshape(inputs, number, width())), tuple(outputs))


@jax.jit
def _cut(kernel_DPC: Array) -> Array:
    return jnp.moveaxis(kernel_DPC, 1, 0)


def multiply(x: Array, panels: Panels) -> Array:
    """The product of x (..., D) and the matrix, (..., F) in float32."""
    *before, inputs = x.shape
    rows_XD = x.reshape(-1, inputs).astype(panels.dtype)
    X = len(rows_XD)
    rows_XD = jnp.pad(rows_XD, ((0, max(LEAST_ROWS - X, 0)), (0, 0)))
    # Not a `dot_general`, for which XLA would first copy the rows for each panel. The barrier hides
    # from XLA that several products share the same weights: XLA would broadcast the weights over
    # the rows once for all products, and store the result.
    rows_XD, columns_PDC = lax.optimization_barrier((rows_XD, panels.columns_PDC))
    # Panels are the outer loop: with rows outside, XLA reads all panels again for every two rows.
    y_PXC = jnp.sum(rows_XD[:, :, None] * columns_PDC[:, None], axis=2)
    return jnp.moveaxis(y_PXC[:, :X], 0, 1).reshape(*before, -1)


@jax.custom_vjp
def multiply_bfloat16(x: Array, kernel_DF: Array) -> Array:
    """The product of x (..., D) in bfloat16 and a matrix cast to it, (..., F) in float32.

    XLA's CPU library has bfloat16 products of at least two rows with float32 results. XLA compiles
    all other bfloat16 products, and so those of a gradient, to loops or in float32, several times
    slower. Gradients are summed in float32, like those of other platforms.
    """
    *before, inputs = x.shape
    rows_XD = x.reshape(-1, inputs)
    X = len(rows_XD)
    rows_XD = jnp.pad(rows_XD, ((0, max(LEAST_ROWS - X, 0)), (0, 0)))
    y_XF = jnp.matmul(rows_XD, kernel_DF.astype(x.dtype), preferred_element_type=jnp.float32)
    return y_XF[:X].reshape(*before, -1)


def _forward(x: Array, kernel_DF: Array) -> tuple[Array, tuple[Array, Array]]:
    return multiply_bfloat16(x, kernel_DF), (x, kernel_DF)


def _backward(kept: tuple[Array, Array], towards: Array) -> tuple[Array, Array]:
    x, kernel_DF = kept
    D, F = kernel_DF.shape
    towards_XF = towards.astype(x.dtype).reshape(-1, F)
    of_x = multiply_bfloat16(towards_XF, _transposed(kernel_DF.astype(x.dtype)))
    of_kernel_DF = multiply_bfloat16(_transposed(x.reshape(-1, D)), towards_XF)
    return of_x.reshape(x.shape).astype(x.dtype), of_kernel_DF.astype(kernel_DF.dtype)


multiply_bfloat16.defvjp(_forward, _backward)


def _transposed(matrix: Array) -> Array:
    """The transpose, as an array of its own: it is behind a branch that XLA cannot decide.

    Otherwise XLA joins the transpose and the product, and its library has no such bfloat16 product.
    """
    always = lax.optimization_barrier(jnp.bool_(True))
    none = lambda matrix: jnp.zeros(matrix.shape[::-1], matrix.dtype)
    return lax.cond(always, jnp.transpose, none, matrix)


@functools.cache
def is_fast() -> bool:
    """Whether XLA compiles `multiply` to one library call; XLA's own loop is far slower."""
    if jax.default_backend() != "cpu":
        return False
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, np.float32)
    panels = Panels(struct(4, 256, width()), (4 * width(),))
    program = jax.jit(multiply).lower(struct(1, 256), panels).compile()
    return "__ynn_fusion" in program.as_text()
