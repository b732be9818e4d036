"""Float32 weights for CPUs: a matrix cut into panels of columns, each of which lies in one piece.

    w (D, F)   ->   columns_PDC      panel p holds columns p * C .. p * C + C - 1

XLA's library for CPUs cuts a matrix (D, F) like this in every product with several rows, which
costs more than multiplying few of them. Cut beforehand and multiplied as `multiply` does, each
weight is read once for any number of rows, and a row has the same bits among any number of rows. A
pass over 4 rows costs little more than a pass over one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = jax.Array

WIDTH = 64  # columns of a panel; 32 are as fast, 16 and 128 are not
LEAST_ROWS = 2  # of a single row the library makes a sum of its own, 25 times slower


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["columns_PDC"], meta_fields=["outputs"]
)
@dataclasses.dataclass(frozen=True)
class Panels:
    """A matrix (D, *outputs) in the place of an array in a parameter tree."""

    columns_PDC: Array
    outputs: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.columns_PDC.shape[1], *self.outputs)

    @property
    def dtype(self) -> Any:
        return self.columns_PDC.dtype

    def whole(self) -> Array:
        """The matrix (D, *outputs) as it was."""
        return jnp.moveaxis(self.columns_PDC, 0, 1).reshape(self.shape)


def cut(kernel: Any) -> Any:
    """A kernel (D, *outputs) in panels, or as it is where panels would not help.

    These are kernels that are no float32 array, that lie on several devices, or whose columns do
    not fill panels.
    """
    inputs, *outputs = kernel.shape
    number, rest = divmod(math.prod(outputs), WIDTH)
    is_wide = isinstance(kernel, Array) and kernel.dtype == jnp.float32
    if not is_wide or len(kernel.devices()) > 1 or rest or not is_fast():
        return kernel
    return Panels(_cut(kernel.reshape(inputs, number, WIDTH)), tuple(outputs))


@jax.jit
def _cut(kernel_DPC: Array) -> Array:
    return jnp.moveaxis(kernel_DPC, 1, 0)


def multiply(x: Array, panels: Panels) -> Array:
    """x (..., D) with the matrix, (..., F) in float32."""
    *before, inputs = x.shape
    rows_XD = x.reshape(-1, inputs).astype(panels.dtype)
    X = len(rows_XD)
    rows_XD = jnp.pad(rows_XD, ((0, max(LEAST_ROWS - X, 0)), (0, 0)))
    # Not a `dot_general`, for which XLA would first copy the rows for each panel. And where the
    # same weights are multiplied again, XLA must not see it: it would spread them over the rows
    # once for all products, and store that.
    rows_XD, columns_PDC = lax.optimization_barrier((rows_XD, panels.columns_PDC))
    # Panels are the outer loop: with rows outside, XLA reads all panels again for every two rows.
    y_PXC = jnp.sum(rows_XD[:, :, None] * columns_PDC[:, None], axis=2)
    return jnp.moveaxis(y_PXC[:, :X], 0, 1).reshape(*before, -1)


def multiply_bfloat16(x: Array, kernel_DF: Array) -> Array:
    """x (..., D) with a matrix, both in bfloat16, (..., F) in float32.

    XLA's library for CPUs has products in bfloat16 of at least two rows with float32 results. All
    others are loops, several times slower.
    """
    *before, inputs = x.shape
    rows_XD = x.reshape(-1, inputs)
    X = len(rows_XD)
    rows_XD = jnp.pad(rows_XD, ((0, max(LEAST_ROWS - X, 0)), (0, 0)))
    y_XF = jnp.matmul(rows_XD, kernel_DF, preferred_element_type=jnp.float32)
    return y_XF[:X].reshape(*before, -1)


@functools.cache
def is_fast() -> bool:
    """Whether XLA here makes one library call of `multiply`; a loop of its own is far slower."""
    if jax.default_backend() != "cpu":
        return False
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, np.float32)
    panels = Panels(struct(4, 256, WIDTH), (4 * WIDTH,))
    program = jax.jit(multiply).lower(struct(1, 256), panels).compile()
    return "__ynn_fusion" in program.as_text()
