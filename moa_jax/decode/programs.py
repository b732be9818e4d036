"""Compiled programs: one for each function, static choice and shapes of arguments.

Nothing is compiled while it is timed, and any thread may compile while another one runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from moa_jax.model.precision import matmul_precision

SMALLEST_BUCKET = 32
ROWS_OF_A_TILE = 128  # XLA pads caches of other sizes in every layer and round

Program = Callable[..., Any]  # of (*weights, *arrays)


class Programs:
    """Compiled functions f(*fixed, *weights, *arrays, **static).

    `fixed` and `static` are compiled in. The weights stay the same; the arrays change from call to
    call. With `donate` the first array is a state, and the new state takes over its memory.
    """

    def __init__(self, fixed: tuple[Any, ...], weights: tuple[Any, ...], dtype: Any) -> None:
        """`dtype` is that of the weights; it decides how products are rounded."""
        self._fixed, self.weights, self._dtype = fixed, weights, dtype
        self._compiled: dict[Any, Program] = {}

    def __len__(self) -> int:
        """Programs compiled so far."""
        return len(self._compiled)

    def run(self, function: Program, *arrays: Any, donate: bool = True, **static: Any) -> Any:
        """Calls the function, and compiles it first if it has not been compiled."""
        program = self.compile(function, *arrays, donate=donate, **static)
        return program(*self.weights, *arrays)

    def compile(
        self, function: Program, *arrays: Any, donate: bool = True, **static: Any
    ) -> Program:
        """The compiled program for these arrays; `ShapeDtypeStruct`s may stand in for them."""
        leaves, structure = jax.tree.flatten(arrays)
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        key = (function, donate, structure, shapes, *static.items())
        if key not in self._compiled:
            part = functools.partial(function, *self._fixed, **static)
            donated = len(self.weights) if donate else ()
            with matmul_precision(self._dtype):
                traced = jax.jit(part, donate_argnums=donated)
                self._compiled[key] = traced.lower(*self.weights, *arrays).compile()
        return self._compiled[key]


def bucket(count: int) -> int:
    """The smallest power of two that holds `count`, and at least 32: few shapes, few compiles."""
    return max(SMALLEST_BUCKET, 1 << (count - 1).bit_length())


def cache_rows_for(count: int) -> int:
    """Rows of a cache that holds `count`: the next multiple of 128."""
    return -(-count // ROWS_OF_A_TILE) * ROWS_OF_A_TILE


def one(value: int) -> np.ndarray:
    """A number for the only row of a batch: (1,) int32."""
    return np.array([value], np.int32)
