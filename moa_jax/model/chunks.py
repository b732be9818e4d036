"""Work along the token axis, one chunk at a time.

The backward pass of `sum_over` and `map_over` recomputes each chunk.

T tokens     | C | C | C | rest |      intermediate arrays of one chunk live at a time
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array


def sum_over(function: Callable[[Any], Any], arrays: Any, size: int, axis: int = 1) -> Any:
    """The sum of `function(chunk)` over chunks of `size` tokens of `arrays` along `axis`.

    A `size` of 0 takes all tokens at once. Forward and backward pass keep the intermediate arrays
    of one chunk at a time.
    """
    T = jax.tree.leaves(arrays)[0].shape[axis]
    if not 0 < size < T:
        return function(arrays)
    one = _again(function, arrays, axis)

    def add(total: Any, start: Array) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, one(start, size)), None

    blank = jax.eval_shape(lambda: one(0, size))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), blank)
    total, _ = lax.scan(add, zeros, jnp.arange(T // size) * size)
    if T % size:
        total = jax.tree.map(jnp.add, total, one(T - T % size, T % size))
    return total


def map_over(function: Callable[[Any], Array], arrays: Any, size: int, axis: int) -> Array:
    """`function(chunk)` of every chunk, concatenated along axis 1 of the results."""
    T = jax.tree.leaves(arrays)[0].shape[axis]
    if not 0 < size < T:
        return function(arrays)
    one = _again(function, arrays, axis)
    found_IBC = lax.map(lambda start: one(start, size), jnp.arange(T // size) * size)
    return _joined(found_IBC, one(T - T % size, T % size) if T % size else None)


def sum_and_join(
    function: Callable[[Any], tuple[Any, Any]], arrays: Any, size: int
) -> tuple[Any, Any]:
    """Sums the first results of `function(chunk)` and concatenates the second ones along axis 1.

    The chunks are taken along axis 1. The gradient of this function does not save memory.
    """
    T = jax.tree.leaves(arrays)[0].shape[1]
    one = lambda start, size: function(_cut(arrays, start, size, 1))

    def add(total: Any, start: Array) -> tuple[Any, Any]:
        summed, joined = one(start, size)
        return jax.tree.map(jnp.add, total, summed), joined

    blank, _ = jax.eval_shape(lambda: one(0, size))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), blank)
    total, found = lax.scan(add, zeros, jnp.arange(T // size) * size)
    if not T % size:
        return total, jax.tree.map(_joined, found)
    summed, rest = one(T - T % size, T % size)
    return jax.tree.map(jnp.add, total, summed), jax.tree.map(_joined, found, rest)


def _joined(found_IBC: Array, rest_BC: Array | None = None) -> Array:
    I, B, C, *rest = found_IBC.shape  # noqa: E741
    joined_BT = found_IBC.swapaxes(0, 1).reshape(B, I * C, *rest)
    return joined_BT if rest_BC is None else jnp.concatenate([joined_BT, rest_BC], axis=1)


def _again(function: Callable[[Any], Any], arrays: Any, axis: int) -> Callable[..., Any]:
    """`function` of one chunk, recomputed in the backward pass."""

    def piece(start: Array | int, size: int) -> Any:
        return jax.checkpoint(function)(_cut(arrays, start, size, axis))

    return piece


def _cut(arrays: Any, start: Array | int, size: int, axis: int) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size, axis), arrays)
