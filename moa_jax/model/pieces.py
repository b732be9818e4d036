"""The likeliest tokens of a vocabulary, in the way that the device finds them fast.

Large vocabularies are cut in pieces, because a GPU gives each row to one of its many processors.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moa_jax.runtime.devices import traced_platform

Array = jax.Array

# Tokens of a piece. Below, a CPU would lose by pieces, and a GPU would gain nothing.
PIECE = 8192


def in_pieces(x_BNV: Array, fill: float | int) -> Array:
    """A vocabulary as pieces (B, N, X, P) of at most PIECE tokens; `fill` stands behind the last.

    Sizes of vocabularies are multiples of powers of two, so hardly any has to be filled up.
    """
    B, N, V = x_BNV.shape
    X = 1 << ((V - 1) // PIECE).bit_length()
    if missing := -V % X:
        x_BNV = jnp.pad(x_BNV, ((0, 0), (0, 0), (0, missing)), constant_values=fill)
    return x_BNV.reshape(B, N, X, -1)


def likeliest(order_XV: Array) -> Array:
    """`argmax` over the last axis of (..., V), as int32 (...); 0 where `finite_argmax` has -1."""
    return jnp.maximum(finite_argmax(order_XV), 0)


def finite_argmax(order_XV: Array) -> Array:
    """`argmax` over the last axis of (..., V), as int32 (...); -1 where the maximum is not finite.

    So it is for NaN anywhere in a row, for infinity, and for -infinity alone: the passes of an
    argmax see it on their way. XLA for CPUs goes through an argmax number by number, and through a
    maximum vector by vector; but its maximum leaves out NaN.
    """
    if traced_platform() != "cpu":
        best_X, place_X = _argmax_with_max(order_XV)
    else:
        # XLA must not compute it twice, once for each pass: rounded otherwise, none would be best.
        order_XV = lax.optimization_barrier(order_XV)
        V, best_X = order_XV.shape[-1], order_XV.max(axis=-1)
        place_XV = lax.broadcasted_iota(jnp.int32, order_XV.shape, order_XV.ndim - 1)
        less_or_nan_XV = jnp.where(order_XV < best_X[..., None], V, -1)
        is_best_XV = order_XV == best_X[..., None]
        place_X = jnp.where(is_best_XV, place_XV, less_or_nan_XV).min(axis=-1)
    return jnp.where(jnp.isfinite(best_X), place_X, -1)


def _argmax_with_max(order_XV: Array) -> tuple[Array, Array]:
    """The reduction of `jnp.argmax`, which drops the first of its two results."""

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
    """`lax.top_k`, ties included: of each piece, then of what is best in all pieces."""
    if count == 1:
        index_BN1 = likeliest(order_BNV)[..., None]
        return jnp.take_along_axis(order_BNV, index_BN1, axis=-1), index_BN1
    order_BNXP = in_pieces(order_BNV, -jnp.inf)
    B, N, X, P = order_BNXP.shape
    if X == 1 or count > order_BNV.shape[-1]:  # the latter is refused
        return lax.top_k(order_BNV, count)
    # Equals of a piece come out in their order, and so do the pieces: the first of equals wins.
    best_BNXk, place_BNXk = lax.top_k(order_BNXP, min(count, P))
    place_BNXk += P * jnp.arange(X, dtype=jnp.int32)[:, None]
    best_BNk, winner_BNk = lax.top_k(best_BNXk.reshape(B, N, -1), count)
    return best_BNk, jnp.take_along_axis(place_BNXk.reshape(B, N, -1), winner_BNk, axis=-1)
