"""Programs that one side of split decoding runs again and again, compiled once per shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from moa_jax.model.precision import matmul_precision

SMALLEST_BUCKET = 32


def bucket(count: int) -> int:
    """The smallest power of two that holds `count`, and at least 32: few shapes, few compiles."""
    return max(SMALLEST_BUCKET, 1 << (count - 1).bit_length())


def one(value: int) -> np.ndarray:
    """A number for the only row of a batch: (1,) int32."""
    return np.array([value], np.int32)


class Programs:
    """Functions of weights, of a state that each call replaces, and of arrays.

    A function is called as f(*chosen, *fixed, *weights, state, *arrays), its result starts with
    the new state. What is chosen is part of the program's name, with the shapes of the arrays;
    `fixed` and the shapes of weights and state never change.
    """

    def __init__(self, fixed: tuple[Any, ...], weights: tuple[Any, ...], dtype: Any) -> None:
        """`dtype` is that of the weights, by which products are rounded."""
        self._fixed, self._weights, self._dtype = fixed, weights, dtype
        self._compiled: dict[Any, Any] = {}

    def run(
        self, function: Callable[..., Any], chosen: tuple[Any, ...], state: Any, *arrays: Any
    ) -> Any:
        """What the function returns; it is compiled first if it was not. `state` is used up."""
        program = self._compiled.get(_name(function, chosen, arrays))
        if program is None:
            program = self.compile(function, chosen, state, *arrays)
        return program(*self._weights, state, *arrays)

    def compile(
        self, function: Callable[..., Any], chosen: tuple[Any, ...], state: Any, *arrays: Any
    ) -> Any:
        """The compiled program; `state` may be its shapes alone. Any thread may do this."""
        part = functools.partial(function, *chosen, *self._fixed)
        with matmul_precision(self._dtype):
            traced = jax.jit(part, donate_argnums=len(self._weights))
            program = traced.lower(*self._weights, state, *arrays).compile()
        self._compiled[_name(function, chosen, arrays)] = program
        return program


def _name(function: Callable[..., Any], chosen: tuple[Any, ...], arrays: Any) -> Any:
    leaves, structure = jax.tree.flatten(arrays)
    return (function, chosen, structure, *((leaf.shape, leaf.dtype) for leaf in leaves))
