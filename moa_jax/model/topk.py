"""Argmax and top-k over a vocabulary, in a form that is fast on the device.

Large vocabularies are split into pieces, because a GPU assigns each row to a single processor.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moa_jax.runtime.devices import traced_platform

Array = jax.Array

# Tokens per piece. Smaller pieces would be slower on a CPU, and no faster on a GPU.
PIECE = 8192


def in_pieces(x_BNV: Array, fill: float | int) -> Array:
    """Reshapes a vocabulary to pieces (B, N, X, P) of at most PIECE tokens, padded with `fill`.

    Vocabulary sizes are multiples of powers of two, so padding is rarely needed.
    """
    B, N, V = x_BNV.shape
    X = 1 << ((V - 1) // PIECE).bit_length()
    if missing := -V % X:
        x_BNV = jnp.pad(x_BNV, ((0, 0), (0, 0), (0, missing)), constant_values=fill)
    return x_BNV.reshape(B, N, X, -1)


def argmax(order_XV: Array) -> Array:
    """`argmax` over the last axis of (..., V), as int32 (...); 0 where `finite_argmax` is -1."""
    return jnp.maximum(finite_argmax(order_XV), 0)


def finite_argmax(order_XV: Array) -> Array:
    """`argmax` over the last axis of (..., V), as int32 (...); -1 where the maximum is not finite.

    The result is -1 for a row with a NaN or +infinity, and for a row of -infinity only; this check
    needs no pass besides those of the argmax. XLA on CPUs vectorises a maximum but not an argmax,
    and its maximum ignores NaN.
    """
    if traced_platform() != "cpu":
        best_X, place_X = _argmax_with_max(order_XV)
    else:
        # XLA must not recompute `order_XV` per pass: with other rounding no value would equal the
        # maximum.
        order_XV = lax.optimization_barrier(order_XV)
        V, best_X = order_XV.shape[-1], order_XV.max(axis=-1)
        place_XV = lax.broadcasted_iota(jnp.int32, order_XV.shape, order_XV.ndim - 1)
        less_or_nan_XV = jnp.where(order_XV < best_X[..., None], V, -1)
        is_best_XV = order_XV == best_X[..., None]
        place_X = jnp.where(is_best_XV, place_XV, less_or_nan_XV).min(axis=-1)
    return jnp.where(jnp.isfinite(best_X), place_X, -1)


def _argmax_with_max(order_XV: Array) -> tuple[Array, Array]:
    """The reduction inside `jnp.argmax`, which discards the maximum; returns maximum and index."""

    def better(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        (one, at), (two, other) = a, b
        is_more = (one > two) | (one != one)
        is_first = is_more | (one == two) & (at < other)
        return jnp.where(is_more, one, two), jnp.where(is_first, at, other)

    axis = order_XV.ndim - 1
    place_XV = lax.broadcasted_iota(jnp.int32, order_XV.shape, axis)
    least = np.array(-np.inf, order_XV.dtype)
    return lax.reduce((order_XV, place_XV), (least, np.int32(0)), better, (axis,))


def top_k(order_BNV: Array, count: int) -> tuple[Array, Array]:
    """Equals `lax.top_k`, also for ties: top-k of each piece, then of the pieces' results."""
    if count == 1:
        index_BN1 = argmax(order_BNV)[..., None]
        return jnp.take_along_axis(order_BNV, index_BN1, axis=-1), index_BN1
    order_BNXP = in_pieces(order_BNV, -jnp.inf)
    B, N, X, P = order_BNXP.shape
    if X == 1 or count > order_BNV.shape[-1]:  # `lax.top_k` raises an error for the latter
        return lax.top_k(order_BNV, count)
    # Ties keep their order within a piece, and pieces keep theirs: the lowest index comes first.
    best_BNXk, place_BNXk = lax.top_k(order_BNXP, min(count, P))
    place_BNXk += P * jnp.arange(X, dtype=jnp.int32)[:, None]
    best_BNk, winner_BNk = lax.top_k(best_BNXk.reshape(B, N, -1), count)
    return best_BNk, jnp.take_along_axis(place_BNXk.reshape(B, N, -1), winner_BNk, axis=-1)
