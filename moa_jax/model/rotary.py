"""Rotary embeddings: rotate heads by the angles of their tokens' positions.

References: RoFormer (2104.09864).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array


class Rotation(NamedTuple):
    """Cosine and sine of each token's rotary angles, float32; YaRN multiplies both by a factor."""

    cos_BTE: Array  # last axis: half a head, E / 2
    sin_BTE: Array
    query_scale_BT: Array | None = None  # a factor of queries alone, which attention applies


def rotate(x: Array, turn: Rotation) -> Array:
    """Rotates `x` (B, T, heads..., E) by each token's angles; the two halves of E form pairs."""
    spread = (slice(None), slice(None), *(None,) * (x.ndim - 3))
    cos, sin = turn.cos_BTE[spread], turn.sin_BTE[spread]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def rotate_packed(packed_BTKXE: Array, turn: Rotation, has_rows: bool = True) -> Array:
    """Rotates packed heads and moves the token axis after the heads, the layout of attention.

    X is G queries and, if `has_rows`, a key and a value; the value is not rotated. Returns
    (B, K, X, T, E).
    """
    if not has_rows:
        return jnp.moveaxis(rotate(packed_BTKXE, turn), 1, 3)
    G = packed_BTKXE.shape[3] - 2
    q_BTKGE, k_BTK1E, v_BTK1E = jnp.split(packed_BTKXE, (G, G + 1), axis=3)
    turned = (rotate(q_BTKGE, turn), rotate(k_BTK1E, turn), v_BTK1E)
    return jnp.moveaxis(jnp.concatenate(turned, axis=3), 1, 3)
